// Who waits for whom around a ring slot, and the counters that tell.
//
//   fetch --ring_arrived--> L1 --ring_l1_done--> L2 --ring_l2_done--> fetch of the next generation
//
// Waiting functions are called by one thread, which tells its group; so are the releasing ones,
// after a barrier of the group whose stores or loads they release.
#pragma once

#include "megamoe/common/wait.hpp"
#include "megamoe/layout/rank_buffers.hpp"
#include "megamoe/layout/ring.hpp"
#include "megamoe/scheduler/pool.hpp"

namespace megamoe {

template <class Format, class Shape>
class Gates {
 public:
  MEGAMOE_FN Gates(const Shape& shape, const Fields& mine) : shape_(shape), mine_(mine) {}

  MEGAMOE_FN RingSlot slot(int block) const { return ring_slot<Format>(shape_, block); }

  // fetch: nobody reads the block that had the slot before.
  template <Machine M>
  MEGAMOE_FN bool wait_free(M& m, int block) const {
    const RingSlot at = slot(block);
    return wait_at_least(m, &mine_.ring_l2_done()[at.idx], Scope::kDevice,
                         {Wait::kRingSlot, block}, free_count(shape_, at.generation));
  }

  // fetch: one more token is there. Who brings the last one also counts the rows that stay empty.
  template <Machine M>
  MEGAMOE_FN void token_arrived(M& m, int block, bool last, int rows) const {
    const int more = last ? shape_.block_rows - rows : 0;
    m.add_release(&mine_.ring_arrived()[slot(block).idx], 1u + static_cast<uint32_t>(more),
                  Scope::kDevice);
  }

  template <Machine M>
  MEGAMOE_FN bool wait_tokens(M& m, int block) const {
    const RingSlot at = slot(block);
    return wait_at_least(m, &mine_.ring_arrived()[at.idx], Scope::kDevice, {Wait::kTokens, block},
                         arrived_count(shape_, at.generation));
  }

  template <Machine M>
  MEGAMOE_FN void l1_finished(M& m, int block) const {
    m.add_release(&mine_.ring_l1_done()[slot(block).idx], 1, Scope::kDevice);
  }

  template <Machine M>
  MEGAMOE_FN bool wait_intermediate(M& m, int block) const {
    const RingSlot at = slot(block);
    return wait_at_least(m, &mine_.ring_l1_done()[at.idx], Scope::kDevice,
                         {Wait::kIntermediate, block}, l1_done_count(shape_, at.generation));
  }

  template <Machine M>
  MEGAMOE_FN void l2_finished(M& m, int block) const {
    m.add_release(&mine_.ring_l2_done()[slot(block).idx], 1, Scope::kDevice);
  }

 private:
  const Shape& shape_;
  const Fields& mine_;
};

}  // namespace megamoe
