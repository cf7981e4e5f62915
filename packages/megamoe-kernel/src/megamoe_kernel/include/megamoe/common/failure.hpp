// The record of a wait that was given up.
//
// No wait is without end: a peer that died, a lost arrival or a wrong expectation becomes a record
// in the field "failure" and an orderly end of the kernel, not a hang. The first failure of a rank
// is kept. Nothing here traps: a trap loses the context and with it the record.
#pragma once

#include "megamoe/common/types.hpp"

namespace megamoe {

// What was waited for. megamoe_kernel/failure.py knows the same numbers.
enum class Wait : uint32_t {
  kNothing = 0,
  kGridBarrier = 1,      // the other CTAs of this rank
  kDispatchBarrier = 2,  // the other ranks' routes
  kRingSlot = 3,         // fetch: L2 of the block that had the ring slot before
  kTokens = 4,           // L1: the block's tokens
  kIntermediate = 5,     // L2: the block's tasks of L1
  kCombineBarrier = 6,   // combine: the other ranks' results
  kPipeline = 7,         // shared memory: a stage, a tile or a plan, to be filled or free again
};

// What a wait is about, beside the thread that waits. -1: does not apply.
struct Place {
  Wait wait;
  int tile = -1;  // the block of tokens, counted over the whole launch
  int peer = -1;  // the rank that should have signalled
};

// The words of the field "failure".
enum FailureWord : int {
  kFailureWait = 0,  // a Wait; kNothing while all is well
  kFailureRank,
  kFailureCta,
  kFailureThread,
  kFailureTile,
  kFailurePeer,
  kFailureExpected,  // the counter's value that would have ended the wait
  kFailureFound,     // and the last one seen
  kFailureComplete,  // 1 once all the words above are written
  kNumFailureWords,
};
static_assert(kNumFailureWords <= 16);

}  // namespace megamoe
