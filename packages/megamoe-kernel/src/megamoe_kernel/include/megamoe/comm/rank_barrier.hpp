// A barrier of all ranks: what any CTA of any rank stored before it, all see after it.
//
// Each rank signals by storing the number of its launch into a word of its own at every peer, so a
// rank that stays away is known by name, and a signal of an earlier launch is never taken for this
// one's. Peers' memory is only written: polling stays local.
#pragma once

#include "megamoe/comm/grid_barrier.hpp"
#include "megamoe/layout/rank_buffers.hpp"

namespace megamoe {

// The number by which this launch signals: one more than the launches before.
template <Machine M>
MEGAMOE_FN uint32_t launch_number(M& m, const Fields& mine) {
  return m.load(&mine.counters()[kLaunchWord]) + 1;
}

// Any thread group, after a barrier of all CTAs that lies behind all uses of the number: a thread
// that asked later would signal for the next launch.
template <Machine M>
MEGAMOE_FN void count_launch(M& m, const Group& group, const Fields& mine, uint32_t launch) {
  if (m.cta_idx() == 0 && group.thread(m) == 0) m.store(&mine.counters()[kLaunchWord], launch);
}

// All threads of the group, in every CTA. signal: a row of the field "barrier", one for each use in
// a launch. False if a wait was given up.
template <Machine M>
MEGAMOE_FN bool rank_barrier(M& m, const Group& group, const RankBuffers& buffers, int num_ranks,
                             int signal, uint32_t launch) {
  const Fields mine{buffers, m.rank_idx()};
  const Wait wait = signal == kDispatchSignal ? Wait::kDispatchBarrier : Wait::kCombineBarrier;
  group.sync(m);
  bool ok = true;
  if (group.thread(m) == 0) {
    uint32_t* word = &mine.counters()[kGridBarrierWord];
    const uint32_t before = arrive_at_grid(m, word);
    // The other CTAs need not wait for each other: this rank's own signal tells them.
    if (m.cta_idx() == 0) ok = wait_for_grid(m, word, before);
  }
  if (m.cta_idx() == 0) {
    if (!group.sync(m, ok)) return false;
    for (int peer = group.thread(m); peer < num_ranks; peer += group.num_threads) {
      const Fields theirs{buffers, peer};
      m.store_release(&theirs.barrier()[signal * num_ranks + m.rank_idx()], launch,
                      Scope::kSystem);
    }
  }
  for (int peer = group.thread(m); ok && peer < num_ranks; peer += group.num_threads) {
    ok = wait_at_least(m, &mine.barrier()[signal * num_ranks + peer], Scope::kSystem,
                       {wait, -1, peer}, launch);
  }
  return group.sync(m, ok);
}

}  // namespace megamoe
