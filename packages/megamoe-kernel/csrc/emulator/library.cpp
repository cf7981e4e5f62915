// What the tests call, by ctypes: whole layers through the kernel for sm_100a, emulated.
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <tuple>

#include "emulator/launch_run.hpp"
#include "emulator/step_run.hpp"
#include "emulator/tile_run.hpp"

using namespace megamoe;
using namespace megamoe::emulator;

namespace {

// The tilings that are compiled: small ones, so that a CTA has few threads and little memory, and
// some of those that sm100_kernel.py chooses.
using Tilings =
    std::tuple<Sm100Tiling<16, 1, 2, 1, 1>, Sm100Tiling<32, 2, 3, 1, 1>,
               Sm100Tiling<144, 1, 2, 1, 1>, Sm100Tiling<64, 1, 2, 1, 1, 2>,
               Sm100Tiling<160, 1, 2, 1, 1, 2>, Sm100Tiling<16, 2, 5, 5, 2, 1, 80, 176>,
               Sm100Tiling<112, 2, 3, 5, 2, 1, 80, 176>, Sm100Tiling<224, 1, 3, 5, 2, 1, 80, 176>,
               Sm100Tiling<224, 1, 4, 5, 2, 2, 80, 176>>;

void copy_text(const std::string& text, char* to, int capacity) {
  const size_t length = std::min(text.size(), static_cast<size_t>(capacity - 1));
  std::memcpy(to, text.data(), length);
  to[length] = 0;
}

template <class Tiling>
int run(const LayerRun& arguments, char* message, int capacity) {
  const int agents = World::agents_in(1, arguments.num_ctas, Sm100Warps<Tiling>::count, 1);
  const Problem& p = arguments.problem;
  const char* error = nullptr;
  if (p.num_ranks * agents > host::kMaxAgents) error = "too many warps for the clocks";
  if (arguments.num_ctas % Tiling::ctas) error = "CTAs are not pairs";
  if (!shares_out(p, Tiling::ctas)) error = "a pair's rows divide no layer";
  if (error) {
    copy_text(error, message, capacity);
    return 2;
  }
  const auto stopped = host::LayerRunner<Nvfp4, Sm100Kernel<Tiling>>(arguments).run();
  copy_text(stopped.value_or(""), message, capacity);
  return stopped ? 1 : 0;
}

// f(the compiled tiling of a problem); 2 if there is none.
template <class F>
int with_tiling(const Problem& p, int ctas, char* message, int capacity, F f) {
  if (const char* error = problem_error<Nvfp4>(p)) {
    copy_text(error, message, capacity);
    return 2;
  }
  int result = -1;
  const auto run_if_it_fits = [&]<class Tiling>(Tiling tiling) {
    if (p.block_rows != Tiling::block_rows || p.weight_rows != Tiling::weight_rows ||
        ctas != Tiling::ctas) {
      return false;
    }
    result = f(tiling);
    return true;
  };
  const auto find = [&]<class... Tiling>(std::tuple<Tiling...>) {
    return (run_if_it_fits(Tiling{}) || ...);
  };
  if (find(Tilings{})) return result;
  copy_text("no compiled tiling has these block_rows and weight_rows", message, capacity);
  return 2;
}

}  // namespace

extern "C" {

// 0: all threads ended, perhaps with failure records. 1: stopped, 2: not a problem that can be run;
// message says why. ctas: 2 for a tiling of pairs.
int megamoe_emulate_sm100(const LayerRun* arguments, int ctas, int mutant, char* message,
                          int capacity) {
  chosen_mutant = static_cast<Mutant>(mutant);
  return with_tiling(arguments->problem, ctas, message, capacity, [&]<class Tiling>(Tiling) {
    return run<Tiling>(*arguments, message, capacity);
  });
}

// The same for one launch from a kernel's argument. Only tilings of the real kernels.
int megamoe_emulate_launch(const LaunchRun* launch, int ctas, char* message, int capacity) {
  return with_tiling(launch->problem, ctas, message, capacity, [&]<class Tiling>(Tiling) {
    if constexpr (Tiling::other_registers == 0) {
      copy_text("no real kernel has this tiling", message, capacity);
      return 2;
    } else {
      const auto stopped = LaunchRunner<Tiling>(*launch).run();
      copy_text(stopped.value_or(""), message, capacity);
      return stopped ? 1 : 0;
    }
  });
}

// 0: run->sums has the tile's sums. 1: message says why it was stopped.
int megamoe_emulate_tile(const TileRun* run, char* message, int capacity) {
  const auto stopped = TileRunner(*run).run();
  copy_text(stopped.value_or(""), message, capacity);
  return stopped ? 1 : 0;
}

// 0: all warps came to the end of their steps. 1: message says why not.
int megamoe_emulate_steps(const StepRun* run, char* message, int capacity) {
  const auto stopped = run->cta_group == 1 ? StepRunner<1>(*run).run() : StepRunner<2>(*run).run();
  copy_text(stopped.value_or(""), message, capacity);
  return stopped ? 1 : 0;
}

// Where the kernel's argument has its fields, in their order, and its size at last.
int megamoe_sm100_arguments(int64_t* out) {
  using A = Sm100Arguments;
  const size_t offsets[] = {
      offsetof(A, token_map),  offsetof(A, w13_map),    offsetof(A, buffers),
      offsetof(A, w13_scales), offsetof(A, w13_alpha),  offsetof(A, input_scale),
      offsetof(A, limit),      offsetof(A, num_tokens), offsetof(A, output),
      offsetof(A, rank_idx),   offsetof(A, wait_limit), sizeof(A)};
  std::copy(std::begin(offsets), std::end(offsets), out);
  return static_cast<int>(std::size(offsets));
}

// What a mutant does, null beyond the last one. 0 is none.
const char* megamoe_mutant(int index) { return mutant_words(index); }
}
