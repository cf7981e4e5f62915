// One deliberate mistake in a run, made in the machine so that the kernel's source has no trace of
// it: a signal that gets lost, a wait that does not wait, a store that never arrives.
#pragma once

#include <cstdint>

namespace megamoe::host {

struct Fault {
  enum Kind : int {
    kNone = 0,
    kDropSignal = 1,    // a release does not change its counter
    kDoubleSignal = 2,  // an addition counts twice
    kStaleSignal = 3,   // a stored signal is the one of the launch before: wrong phase
    kSkipWait = 4,      // no wait on the field waits, as if it had been forgotten
    kDropStore = 5,     // a plain store does not reach memory: the old content stays
    kWeakSignal = 6,    // a release for the system is one for the device only
  };
  int kind = kNone;
  int field = -1;  // of the buffer
  int rank = -1;   // the rank that makes the mistake
  int nth = 0;     // at its how many-th such access of the field, from 0; kSkipWait: at each
  int seen = 0;

  bool hits(int wanted, int accessed_field, int accessing_rank) {
    if (kind != wanted || field != accessed_field || rank != accessing_rank) return false;
    return seen++ == nth || kind == kSkipWait;
  }
};

}  // namespace megamoe::host
