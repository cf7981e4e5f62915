// ptx/sm100.hpp for a host: addresses, barriers, fences.
#pragma once

#include "emulator/emulation.hpp"

namespace megamoe::emulator {

// Barriers by what they are for: the order in which the kernel initializes them, pairs of full and
// free for each stage, then for each accumulator. Mutants want to know.
enum class BarrierKind { kFull, kFree, kSumsFull, kSumsFree };

inline BarrierKind kind_of(const Barrier& barrier) {
  const bool of_stage = barrier.kind < emulation->geometry.num_stage_barriers,
             is_full = barrier.kind % 2 == 0;
  if (of_stage) return is_full ? BarrierKind::kFull : BarrierKind::kFree;
  return is_full ? BarrierKind::kSumsFull : BarrierKind::kSumsFree;
}

inline Barrier& barrier_at(CtaState& cta, uint32_t address, const Site& site) {
  const int agent = emulation->thread().agent;
  const auto found = cta.barriers.find(address);
  if (found == cta.barriers.end()) emulation->stop(site, "uses a barrier that is none");
  Barrier& barrier = found->second;
  if (!barrier.fenced && barrier.initialized_by != agent) {
    emulation->stop(site, "uses a barrier whose initialization is not fenced");
  }
  const Clock& known = emulation->world.clocks.of(agent);
  if (known[static_cast<size_t>(barrier.initialized_by)] < barrier.initialized_at) {
    emulation->stop(site, "uses a barrier without having waited for its initialization");
  }
  if (cta.leaving) emulation->stop(site, "uses a barrier of a CTA that may have ended");
  return barrier;
}

// The mutant of these four that fits a barrier's kind.
inline bool is_of(const Barrier& barrier, Mutant full, Mutant free, Mutant sums_full,
                  Mutant sums_free) {
  const Mutant of_kind[4] = {full, free, sums_full, sums_free};
  return emulation->is(of_kind[static_cast<int>(kind_of(barrier))]);
}

inline void arrive(Barrier& barrier, const Clock& known, int64_t bytes) {
  if (barrier.arrive(known, bytes)) emulation->world.crew.memory_changed();
}

}  // namespace megamoe::emulator

namespace megamoe::ptx {

using emulator::emulation;
using emulator::Mutant;

inline uint32_t shared_address(const void* pointer, Site site) {
  emulator::SharedMemory& shared = emulation->cta().shared;
  const std::ptrdiff_t offset = static_cast<const uint8_t*>(pointer) - shared.base();
  const uint32_t address = static_cast<uint32_t>(offset) + emulator::SharedMemory::kBase;
  if (offset < 0 || !shared.has(address, 1)) emulation->stop(site, "names no shared memory");
  return address;
}

inline bool elect(Site) {
  return emulation->thread().thread % kWarpSize == emulation->cta().elected;
}

inline void barrier_init(uint32_t address, int arrivals, Site site) {
  emulation->step();
  emulator::CtaState& cta = emulation->cta();
  if (address % 8 || !cta.shared.has(address, 8)) emulation->stop(site, "makes a barrier nowhere");
  emulator::Barrier barrier;
  barrier.kind = static_cast<int>(cta.barriers.size());
  const emulator::BarrierKind kind = kind_of(barrier);
  if (emulation->is(Mutant::kFewerArrivals) && kind == emulator::BarrierKind::kFull) arrivals = 1;
  if (emulation->is(Mutant::kNoReport) && kind == emulator::BarrierKind::kFull) arrivals = 2;
  if (emulation->is(Mutant::kFewerReaders) && kind == emulator::BarrierKind::kSumsFree) --arrivals;
  barrier.expected = barrier.pending = arrivals;
  barrier.initialized_by = emulation->thread().agent;
  barrier.initialized_at = emulation->known_now()[static_cast<size_t>(barrier.initialized_by)];
  if (!cta.barriers.emplace(address, barrier).second) {
    emulation->stop(site, "initializes a barrier twice");
  }
}

inline void fence_barrier_init(Site) {
  emulation->step();
  if (emulation->is(Mutant::kNoBarrierFence)) return;
  for (auto& [address, barrier] : emulation->cta().barriers) barrier.fenced = true;
}

inline void barrier_arrive_at(emulator::CtaState& cta, uint32_t address, Site site) {
  emulation->step();
  const emulator::Thread& self = emulation->thread();
  emulator::Barrier& barrier = barrier_at(cta, address, site);
  // The warp's lanes have met before one of them arrives for all.
  const int first = self.thread / kWarpSize * kWarpSize;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (!emulation->thread(self.cta_idx, first + lane).handed_over) {
      emulation->stop(site, "hands over tensor memory without tcgen05.fence::before_thread_sync");
    }
  }
  using M = Mutant;
  const size_t agent = static_cast<size_t>(self.agent);
  if (&cta != &emulation->cta()) cta.visitors[agent] = emulation->known_now()[agent];
  if (is_of(barrier, M::kLoseReport, M::kNone, M::kNone, M::kLoseSumsFree)) return;
  const emulator::Clock known = emulation->world.clocks.publish(self.agent);
  if (&cta == &emulation->cta()) return arrive(barrier, known, 0);
  if (barrier.arrive_from_far(known)) emulation->world.crew.memory_changed();
}

inline void barrier_arrive(uint32_t address, Site site) {
  barrier_arrive_at(emulation->cta(), address, site);
}
inline void barrier_arrive_at_leader(uint32_t address, Site site) {
  barrier_arrive_at(emulation->leader(), address, site);
}

inline void barrier_arrive_expect(uint32_t address, int bytes, Site site) {
  emulation->step();
  emulator::Barrier& barrier = barrier_at(emulation->cta(), address, site);
  if (emulation->is(Mutant::kLoseFull)) return;
  if (emulation->is(Mutant::kExpectMore)) bytes += 16;
  if (emulation->is(Mutant::kExpectLess)) bytes -= 16;
  if (emulation->is(Mutant::kOtherExpectsLess) && !emulation->leads()) bytes -= 512;
  if (bytes <= 0 || bytes >= 1 << 20) emulation->stop(site, "expects no number of bytes");
  arrive(barrier, emulation->world.clocks.publish(emulation->thread().agent), bytes);
}

template <int kCtas>
inline bool barrier_test(uint32_t address, uint32_t parity, Site site) {
  emulation->world.crew.maybe_switch(emulation->world.crew.running());
  if (emulation->world.crew.random.one_in(6)) emulation->complete_one();
  emulator::Barrier& barrier = barrier_at(emulation->cta(), address, site);
  if (parity > 1) emulation->stop(site, "waits for a parity that is none");
  if (is_of(barrier, Mutant::kSkipFull, Mutant::kSkipFree, Mutant::kSkipSumsFull,
            Mutant::kSkipSumsFree)) {
    return true;
  }
  if (is_of(barrier, Mutant::kPhaseFull, Mutant::kPhaseFree, Mutant::kPhaseSumsFull,
            Mutant::kPhaseSumsFree)) {
    parity ^= 1u;
  }
  if (!barrier.is_complete(parity)) return false;
  emulation->world.crew.not_waiting(emulation->world.crew.running());
  const int agent = emulation->thread().agent;
  emulation->world.clocks.learn(agent, barrier.complete);
  const bool is_narrow = is_of(barrier, Mutant::kNarrowFull, Mutant::kNone, Mutant::kNone,
                               Mutant::kNarrowSumsFree);
  if (kCtas == 2 && !is_narrow) emulation->world.clocks.learn(agent, barrier.complete_far);
  return true;
}

inline void pair_sync(Site) {
  emulation->step();
  // Twice in a launch.
  const bool is_first = emulation->thread().pair_syncs++ % 2 == 0;
  if (emulation->is(is_first ? Mutant::kNoFirstSync : Mutant::kNoLastSync)) return;
  emulation->meet_pair();
}

inline void fence_proxy_async(Site) {
  emulation->step();
  if (emulation->is(Mutant::kNoProxyFence)) return;
  emulation->thread().proxy = emulation->known_now();
}

inline void tensor_fence_before(Site) {
  emulation->step();
  if (emulation->is(Mutant::kNoFenceBefore)) return;
  emulation->thread().handed_over = true;
}
inline void tensor_fence_after(Site) {
  emulation->step();
  emulator::CtaState& cta = emulation->cta();
  emulator::Thread& self = emulation->thread();
  if (cta.allocate_late && self.thread / kWarpSize == cta.allocating_warp) {
    std::exchange(cta.allocate_late, nullptr)();
  }
  if (emulation->is(Mutant::kNoFenceAfter)) return;
  self.tensor_before = std::exchange(self.tensor, emulation->known_now());
}

template <int kRegisters>
inline void registers_up(Site) {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
}
template <int kRegisters>
inline void registers_down(Site) {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
}

}  // namespace megamoe::ptx
