// One launch of one rank from the very argument that a kernel gets, on the memory that it names:
// what Python filled in for a GPU, with maps that the emulator understands.
#pragma once

#include "emulator/sm100_kernel.hpp"

namespace megamoe::emulator {

struct LaunchRun {
  Problem problem;
  int32_t num_ctas;
  uint64_t seed;
  const Sm100Arguments* arguments;  // aligned to 64, as kernels have them
};

template <class Tiling>
class LaunchRunner {
 public:
  explicit LaunchRunner(const LaunchRun& run)
      : run_(run),
        world_(run.seed, run.arguments->buffers, 1, run.num_ctas, Warps::count, 1),
        emulation_(world_, Sm100Kernel<Tiling>::geometry(), Mutant::kNone) {
    emulation = &emulation_;
    ctas_.resize(static_cast<size_t>(run.num_ctas));
    // All that the buffer holds counts as the host's.
    world_.memory.shadow({0, 0}).write(0, run.arguments->buffers.layout.bytes, 0,
                                       world_.clocks.of(0), false);
    std::vector<int> agents(static_cast<size_t>(world_.num_agents()));
    std::iota(agents.begin(), agents.end(), 0);
    world_.clocks.meet(agents);
    for (int cta = 0; cta < run.num_ctas; ++cta) {
      Cta& at = ctas_[static_cast<size_t>(cta)];
      at.warps.resize(Warps::count);
      emulation_.add_cta(static_cast<size_t>(Sm100Shared<Tiling, Problem>::bytes(run.problem)));
      Sm100Kernel<Tiling>::watch_tile(at, emulation_.cta(cta), run.problem);
      for (int thread = 0; thread < Warps::threads; ++thread) {
        const int self = cta * Warps::threads + thread;
        emulation_.add_thread(0, cta, thread);
        world_.crew.add([this, &at, cta, thread, self] {
          LayerMachine m(HostMachine(world_, at, self, run_.arguments->rank_idx, cta, thread));
          sm100_run<Tiling>(m, run_.problem, *run_.arguments, emulation_.cta().shared.base());
        });
      }
    }
  }

  std::optional<std::string> run() {
    const auto stopped = world_.crew.run(
        [this] { return emulation_.complete_one() || world_.memory.complete_one(); });
    for (int cta = 0; cta < run_.num_ctas; ++cta) world_.memory.release(0, cta, Scope::kSystem);
    return stopped;
  }

 private:
  using Warps = Sm100Warps<Tiling>;

  const LaunchRun run_;
  World world_;
  Emulation emulation_;
  std::vector<Cta> ctas_;
};

}  // namespace megamoe::emulator
