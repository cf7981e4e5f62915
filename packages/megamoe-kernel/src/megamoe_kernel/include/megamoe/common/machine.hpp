// What the neutral code asks of the machine it runs on.
//
// A Machine is one thread's access to memory, to its warp and to its CTA. comm/device.cuh is a GPU;
// csrc/host has threads, warps, CTAs and ranks emulated on one CPU thread, with stores that become
// visible late and in random order. Scheduler and stages take it as a template parameter, so both
// compile the same source.
//
// Memory model, the one of PTX: what a thread stored before a release, or another thread of its CTA
// before a barrier that both passed, is seen by whoever acquires the released value. Scope::kDevice
// reaches this rank's GPU, Scope::kSystem also the others. Plain loads and stores promise nothing
// else.
#pragma once

#include "megamoe/common/failure.hpp"
#include "megamoe/common/types.hpp"

namespace megamoe {

enum class Scope { kDevice, kSystem };

template <class T, class Expected>
inline constexpr bool kSame = false;
template <class T>
inline constexpr bool kSame<T, T> = true;
template <class T, class Expected>
concept Is = kSame<T, Expected>;

template <class M>
concept Machine = requires(M m, const M c, uint32_t* word, uint32_t value, Chunk* chunk, int number,
                           bool flag, Scope scope) {
  // Where this thread is. thread_idx counts within the CTA; a warp is 32 threads in a row.
  { c.rank_idx() } -> Is<int>;
  { c.cta_idx() } -> Is<int>;
  { c.num_ctas() } -> Is<int>;
  { c.thread_idx() } -> Is<int>;

  // Plain accesses, naturally aligned, of this rank's memory or a peer's.
  { m.load(word) } -> Is<uint32_t>;
  { m.load(chunk) } -> Is<Chunk>;
  m.store(word, value);
  m.store(chunk, Chunk{});
  // The same of the epilogues' tile in shared memory. Other shared memory is dereferenced directly.
  { m.load_tile(word) } -> Is<uint32_t>;
  { m.load_tile(chunk) } -> Is<Chunk>;
  m.store_tile(word, value);

  // Atomic accesses. The two that add return the value before; `add` orders nothing and also takes
  // shared memory.
  { m.add(word, value) } -> Is<uint32_t>;
  { m.add_release(word, value, scope) } -> Is<uint32_t>;
  m.store_release(word, value, scope);
  { m.load_acquire(word, scope) } -> Is<uint32_t>;

  // All 32 lanes take part in each of these.
  { m.shuffle(value, number) } -> Is<uint32_t>;  // the value of lane `number`
  { m.ballot(flag) } -> Is<uint32_t>;
  m.sync_warp();

  // Named barrier `number` (0 to 15) of `number` threads, whole warps: true if every flag is.
  { m.sync_all(number, number, flag) } -> Is<bool>;

  // For bounded waits (comm/wait.hpp). clock and wait_limit have the same unit. pause is called
  // between polls. give_up keeps the record if it is the rank's first; given_up tells whether
  // there is one.
  { m.clock() } -> Is<uint64_t>;
  { m.wait_limit() } -> Is<uint64_t>;
  m.pause();
  m.give_up(Place{}, value, value);
  { m.given_up() } -> Is<bool>;
};

// Whole warps that work together: threads first_thread to first_thread + num_threads - 1 of a CTA,
// with a named barrier of their own.
struct Group {
  int barrier;
  int first_thread;
  int num_threads;

  template <Machine M>
  MEGAMOE_FN int thread(const M& m) const {
    return m.thread_idx() - first_thread;
  }
  template <Machine M>
  MEGAMOE_FN bool has(const M& m) const {
    return m.thread_idx() >= first_thread && m.thread_idx() < first_thread + num_threads;
  }
  MEGAMOE_FN int num_warps() const { return num_threads / kWarpSize; }

  // Waits for all of the group; true if `ok` is everywhere. What one thread found out, that a wait
  // failed, is known to all at the point where they meet anyway.
  template <Machine M>
  MEGAMOE_FN bool sync(M& m, bool ok = true) const {
    return m.sync_all(barrier, num_threads, ok);
  }
};

template <Machine M>
MEGAMOE_FN int lane_idx(const M& m) {
  return m.thread_idx() % kWarpSize;
}

// Of a value in each lane: lane `lane` gets the sum of lanes 0 to `lane`.
template <Machine M>
MEGAMOE_FN uint32_t inclusive_sum(M& m, uint32_t value) {
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int from = lane_idx(m) - step;
    const uint32_t below = m.shuffle(value, from < 0 ? 0 : from);
    if (from >= 0) value += below;
  }
  return value;
}

}  // namespace megamoe
