// Waits that end: when the counter has come far enough, or with a record of what was missing.
#pragma once

#include "megamoe/common/machine.hpp"

namespace megamoe {

// Polls a counter in this rank's memory until reached(value). False if that took longer than the
// machine's limit, or if another thread of the rank gave up meanwhile; then the caller's stage
// returns. `expected` is for the record. One thread calls it and tells its group the answer.
template <Machine M, class Reached>
MEGAMOE_FN bool wait_until(M& m, const uint32_t* counter, Scope scope, Place place,
                           uint32_t expected, Reached reached) {
  const uint64_t start = m.clock();
  for (uint32_t polls = 1;; ++polls) {
    const uint32_t value = m.load_acquire(counter, scope);
    if (reached(value)) return true;
    // The clock and the record cost a poll's latency, so they are looked at now and then.
    if (polls % M::kPollsPerLook == 0) {
      if (m.given_up()) return false;
      if (m.clock() - start > m.wait_limit()) {
        m.give_up(place, expected, value);
        return false;
      }
    }
    m.pause();
  }
}

// For counters that only grow: waits for `expected` or more. They may wrap at 2^32.
template <Machine M>
MEGAMOE_FN bool wait_at_least(M& m, const uint32_t* counter, Scope scope, Place place,
                              uint32_t expected) {
  return wait_until(m, counter, scope, place, expected, [expected](uint32_t value) {
    return static_cast<int32_t>(value - expected) >= 0;
  });
}

// After a wait that was given up, copies and products may be on their way to memory that is about to
// have another owner. What was begun comes to its end in microseconds.
template <Machine M>
MEGAMOE_FN void let_settle(M& m) {
  constexpr uint64_t kSettled = 100'000;  // nanoseconds
  const uint64_t start = m.clock();
  while (m.clock() - start < kSettled) m.pause();
}

}  // namespace megamoe
