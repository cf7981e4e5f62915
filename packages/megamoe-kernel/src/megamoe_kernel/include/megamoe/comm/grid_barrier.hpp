// A barrier of all CTAs of one rank.
//
// One word, never reset: CTA 0 adds 2^31 less one for each other CTA, the others add one, so bit 31
// flips when all have arrived and the bits below are zero again. Any number of CTAs, any number of
// launches; all CTAs have to be resident.
#pragma once

#include "megamoe/common/wait.hpp"

namespace megamoe {

// One thread of each CTA: arrive, releasing what its group stored. Returns the word before.
template <Machine M>
MEGAMOE_FN uint32_t arrive_at_grid(M& m, uint32_t* word) {
  const uint32_t others = static_cast<uint32_t>(m.num_ctas()) - 1;
  const uint32_t share = m.cta_idx() == 0 ? 0x80000000u - others : 1u;
  return m.add_release(word, share, Scope::kDevice);
}

template <Machine M>
MEGAMOE_FN bool wait_for_grid(M& m, const uint32_t* word, uint32_t before) {
  return wait_until(m, word, Scope::kDevice, {Wait::kGridBarrier}, (before ^ 0x80000000u) >> 31 << 31,
                    [before](uint32_t value) { return ((value ^ before) >> 31) != 0; });
}

// All threads of the group, in every CTA. False if the wait was given up.
template <Machine M>
MEGAMOE_FN bool grid_barrier(M& m, const Group& group, uint32_t* word) {
  group.sync(m);
  bool ok = true;
  if (group.thread(m) == 0) ok = wait_for_grid(m, word, arrive_at_grid(m, word));
  return group.sync(m, ok);
}

}  // namespace megamoe
