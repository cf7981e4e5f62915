// What an emulated GPU has beside its threads: each CTA's shared and tensor memory, barriers, and
// the asynchronous operations that are on their way.
//
// Copies come to their end in any order, what one CTA's tensor cores do in the order of issue;
// when, chance under the run's seed decides. An operation is held against the clocks of what its
// thread knew when it began, and again when it is carried out: so neither a forgotten wait nor one
// that came too early passes, whatever the order was.
//
// What tensor cores access counts as their own: no thread knows of it, not even the one that began
// it, unless it waited for a commit. And whoever waited for an asynchronous operation knows of that
// operation alone, not of what its thread had seen of others.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "emulator/barriers.hpp"
#include "emulator/mutants.hpp"
#include "emulator/shared_memory.hpp"
#include "emulator/tensor_memory.hpp"
#include "host/machine.hpp"
#include "megamoe/ptx/sm100.hpp"

namespace megamoe::emulator {

using host::World;
using ptx::Site;

struct Thread {
  int cta_idx;  // among all
  int thread;
  int agent;
  Clock proxy{};            // what the thread knew at its last proxy fence
  Clock tensor{};           // and at its last tcgen05.fence::after_thread_sync
  Clock tensor_before{};    // and at the one before that
  Clock at_read{};          // and at its last tcgen05.ld
  bool handed_over = true;  // tcgen05.fence::before_thread_sync since the last tcgen05.ld or st
  int pair_syncs = 0;
};

struct CtaState;

// An operation on its way: whose (the thread's; in the clocks the tensor cores', if they do it),
// what is known with it, what happens at its end, and for products the CTAs and columns of tensor
// memory that they write.
struct Pending {
  Site site;
  int agent, by;
  Clock known;
  std::function<void(const Pending&)> carry_out;
  std::vector<CtaState*> ctas{};
  int first_column = 0, num_columns = 0;

  bool reaches(const CtaState& cta) const {
    return std::find(ctas.begin(), ctas.end(), &cta) != ctas.end();
  }
};

// A warp that stores to tensor memory: what its lanes have brought so far.
struct Storing {
  host::Meeting meeting;
  uint32_t to = 0;
  std::array<const float*, kWarpSize> values{};
};

struct CtaState {
  SharedMemory shared;
  TensorMemory tensor;
  std::map<uint32_t, Barrier> barriers;
  std::vector<Pending> copies;
  std::deque<Pending> products;
  Clock consumed{};      // of those who copied what products, begun here, read
  std::map<uint32_t, Stamp> tensor_words;  // where the address of tensor memory was stored
  int cta_group = 0;        // of the launch's first tcgen05 instruction: all have the same
  bool may_allocate = true;
  std::function<void()> allocate_late;  // a mutant's
  host::Meeting pair;    // of a leader
  bool leaving = false;  // it has freed tensor memory, the last thing that it does
  Clock visitors{};      // the last time that each agent of the pair's other CTA came here
  int elected = 0;       // the lane that elect() names, in all warps
  host::Meeting allocating;  // of the warp that allocates or frees tensor memory
  int allocating_warp = 0;
  std::map<int, Storing> storing;  // by warp
  const uint8_t* first_scales = nullptr;  // of the stage that is filled

  CtaState(size_t shared_bytes, int num_agents)
      : shared(shared_bytes, num_agents), tensor(num_agents) {}
};

// Where things are in a stage of shared memory; what mutants confuse.
struct Geometry {
  int num_stage_barriers;  // pairs of full and free, before those of the accumulators
  uint32_t stage_bytes, tokens_at, weight_scales_at, token_scales_at;
  uint32_t accumulator_columns;
  int tokens_warp, epilogue_warp;

  uint32_t in_stage(uint32_t address) const {
    return (address - SharedMemory::kBase) % stage_bytes;
  }
};

class Emulation {
 public:
  Emulation(World& world, const Geometry& geometry, Mutant mutant)
      : world(world), geometry(geometry), mutant_(mutant) {}

  CtaState& add_cta(size_t shared_bytes) {
    ctas_.push_back(std::make_unique<CtaState>(shared_bytes, world.num_agents()));
    ctas_.back()->elected = static_cast<int>(world.crew.random.below(kWarpSize));
    return *ctas_.back();
  }
  void add_thread(int rank, int cta, int thread) {
    threads_.push_back(
        {rank * world.num_ctas + cta, thread, world.agent(rank, cta, thread / kWarpSize)});
  }

  bool is(Mutant mutant) const { return mutant != Mutant::kNone && mutant_ == mutant; }

  Thread& thread() { return threads_[static_cast<size_t>(world.crew.running())]; }
  Thread& thread(int cta_idx, int thread) {
    const int per_cta = world.warps_per_cta * kWarpSize;
    return threads_[static_cast<size_t>(cta_idx * per_cta + thread)];
  }
  CtaState& cta() { return cta(thread().cta_idx); }
  CtaState& cta(int index) { return *ctas_[static_cast<size_t>(index)]; }

  // CTAs 2 i and 2 i + 1 of a rank are a pair, the first of them its leader.
  bool leads() { return thread().cta_idx % 2 == 0; }
  CtaState& leader() { return cta(thread().cta_idx / 2 * 2); }
  // The CTAs that work together on what the running thread begins: its own, or both of the pair.
  std::vector<CtaState*> group(int num_ctas) {
    if (num_ctas == 1) return {&cta()};
    const int first = thread().cta_idx / 2 * 2;
    return {&cta(first), &cta(first + 1)};
  }
  // All threads of a pair meet.
  void meet_pair() {
    const int first = thread().cta_idx / 2 * 2, warps = world.warps_per_cta;
    const int rank = first / world.num_ctas, cta_idx = first % world.num_ctas;
    world.crew.meet(world.crew.running(), leader().pair, 2 * warps * kWarpSize, [&] {
      std::vector<int> agents;
      for (int warp = 0; warp < warps; ++warp) {
        agents.push_back(world.agent(rank, cta_idx, warp));
        agents.push_back(world.agent(rank, cta_idx + 1, warp));
      }
      world.clocks.meet(agents);
    });
  }

  // Before each instruction: others may run, and something on its way may come to its end.
  void step() {
    world.crew.not_waiting(world.crew.running());
    world.crew.maybe_switch(world.crew.running());
    if (world.crew.random.one_in(6)) complete_one();
  }

  // What the running thread knows when it begins something: `base`, and all that it did itself.
  Clock known(const Clock& base) {
    const int agent = thread().agent;
    Clock clock = base;
    clock[static_cast<size_t>(agent)] = world.clocks.of(agent)[static_cast<size_t>(agent)];
    return clock;
  }
  Clock known_now() { return world.clocks.of(thread().agent); }

  // The tensor cores that carry out what the running thread begins.
  int engine() {
    const int cta_idx = thread().cta_idx;
    return world.engine(cta_idx / world.num_ctas, cta_idx % world.num_ctas);
  }
  // What they may touch: what the thread might by its last fence, and what they did before.
  Clock known_to_engine() {
    Clock clock = known(thread().tensor);
    const size_t at = static_cast<size_t>(engine());
    clock[at] = world.clocks.of(engine())[at];
    return clock;
  }
  // A commit: all that they did, and the copies that they read, which had therefore ended.
  Clock commit() {
    Clock done = world.clocks.publish_own(engine());
    host::join(done, cta().consumed);
    return done;
  }
  // Whether a wait of the rank was given up: then time alone orders what is left to do.
  bool given_up() {
    const int rank = thread().cta_idx / world.num_ctas;
    const Fields mine{world.buffers, rank};
    return world.buffers.base[rank] && mine.failure()[kFailureWait] != 0;
  }

  bool complete_one() {
    const uint32_t count = static_cast<uint32_t>(ctas_.size());
    const uint32_t first = world.crew.random.below(count);
    for (uint32_t i = 0; i < count; ++i) {
      CtaState& at = *ctas_[(first + i) % count];
      const uint32_t copies = static_cast<uint32_t>(at.copies.size());
      const uint32_t choices = copies + !at.products.empty();
      if (choices == 0) continue;
      const uint32_t chosen = world.crew.random.below(choices);
      Pending pending;
      if (chosen < copies) {
        pending = std::move(at.copies[chosen]);
        at.copies.erase(at.copies.begin() + chosen);
      } else {
        pending = std::move(at.products.front());
        at.products.pop_front();
      }
      pending.carry_out(pending);
      return true;
    }
    return false;
  }

  std::string where(const Site& site) const {
    const char* name = std::strrchr(site.file, '/');
    std::ostringstream text;
    text << " (" << (name ? name + 1 : site.file) << ":" << site.line << ")";
    return text.str();
  }
  // From a running thread: it never runs again.
  [[noreturn]] void stop(const Site& site, const std::string& what) {
    world.crew.stop(world.crew.running(), world.who(thread().agent) + " " + what + where(site));
  }
  // From an operation that is carried out.
  void note(const Pending& pending, const std::string& what) {
    world.crew.note("what " + world.who(pending.agent) + " began " + what + where(pending.site));
  }
  // Why two accesses conflict, in words.
  std::string conflict(const host::Shadow::Found& found, const char* access,
                       const char* what) const {
    const std::string begin = std::string(access) + " " + what;
    using Conflict = host::Shadow::Conflict;
    if (found.conflict == Conflict::kNeverWritten) return begin + ", which nobody has written";
    return begin + " without waiting for " + world.who(found.other) + ", which " +
           (found.conflict == Conflict::kUnseenWrite ? "wrote it" : "still reads it");
  }

  World& world;
  const Geometry geometry;

 private:
  Mutant mutant_;
  std::vector<std::unique_ptr<CtaState>> ctas_;
  std::vector<Thread> threads_;
};

// The run that instructions belong to; runs follow each other.
inline Emulation* emulation = nullptr;

}  // namespace megamoe::emulator
