// Dispatch, first half: each rank sorts its slots by expert and tells the experts' ranks.
//
// A slot is a place in topk_idx: token * num_topk + position. A rank's routes are its slots in the
// order of their experts, so a peer that wants the tokens of one expert reads a contiguous piece.
// Its own ranks get the lengths and beginnings of their pieces; the tokens stay where they are
// until they are fetched (stages/fetch.hpp).
//
// The order within an expert depends on who comes first. No result does: every token is computed by
// itself.
#pragma once

#include "megamoe/comm/rank_barrier.hpp"
#include "megamoe/scheduler/pool.hpp"

namespace megamoe {

// The expert of a slot, or -1. Ids that name no expert are left out like -1: a kernel must not
// write where they would lead.
template <Machine M, class Shape>
MEGAMOE_FN int expert_of_slot(M& m, const Shape& shape, const int64_t* topk_idx, int slot) {
  const int64_t expert = m.load(&topk_idx[slot]);
  return expert >= 0 && expert < num_experts(shape) ? static_cast<int>(expert) : -1;
}

// Shared memory that route needs, in words.
template <class Shape>
MEGAMOE_FN constexpr int route_words(const Shape& shape) {
  return 3 * num_experts(shape);
}

// All threads of the group, in every CTA. Ends with the dispatch barrier: afterwards the counts of
// all ranks are here, and all ranks' tokens may be fetched. False if a wait was given up.
template <Machine M, class Shape>
MEGAMOE_FN bool route(M& m, const Group& group, const Shape& shape, const RankBuffers& buffers,
                      uint32_t launch, int num_tokens, uint32_t* shared) {
  const Fields mine{buffers, m.rank_idx()};
  const int experts = num_experts(shape), num_slots = num_tokens * shape.num_topk;
  const int thread = m.cta_idx() * group.num_threads + group.thread(m);
  const int num_threads = m.num_ctas() * group.num_threads;
  uint32_t* count = shared;            // of this CTA's slots, by expert
  uint32_t* place = shared + experts;  // of its first slot among all slots of the expert
  uint32_t* begin = place + experts;   // of the expert in the routes

  // The ring's counters of the launch before; nobody uses them until the dispatch barrier.
  for (int i = thread; i < shape.ring_rows / static_cast<int>(kRingTile); i += num_threads) {
    m.store(&mine.ring_arrived()[i], 0u);
    m.store(&mine.ring_l1_done()[i], 0u);
    m.store(&mine.ring_l2_done()[i], 0u);
  }
  for (int i = group.thread(m); i < experts; i += group.num_threads) count[i] = 0;
  group.sync(m);
  for (int slot = thread; slot < num_slots; slot += num_threads) {
    const int expert = expert_of_slot(m, shape, mine.topk_idx(), slot);
    if (expert >= 0) m.add(&count[expert], 1);
  }
  group.sync(m);
  for (int i = group.thread(m); i < experts; i += group.num_threads) {
    place[i] = count[i] ? m.add(&mine.expert_count()[i], count[i]) : 0;
    count[i] = 0;
  }
  if (!grid_barrier(m, group, &mine.counters()[kGridBarrierWord])) return false;

  for (int i = group.thread(m); i < experts; i += group.num_threads) {
    begin[i] = m.load(&mine.expert_count()[i]);
  }
  group.sync(m);
  if (group.thread(m) < kWarpSize) exclusive_sums(m, begin, experts);
  group.sync(m);
  for (int slot = thread; slot < num_slots; slot += num_threads) {
    const int expert = expert_of_slot(m, shape, mine.topk_idx(), slot);
    if (expert < 0) continue;
    const uint32_t at = begin[expert] + place[expert] + m.add(&count[expert], 1);
    m.store(&mine.routes()[at], static_cast<uint32_t>(slot));
  }
  for (int i = thread; i < experts; i += num_threads) {
    const Fields owner{buffers, i / shape.num_local_experts};
    const int at = m.rank_idx() * shape.num_local_experts + i % shape.num_local_experts;
    m.store(&owner.route_count()[at], m.load(&mine.expert_count()[i]));
    m.store(&owner.route_begin()[at], begin[i]);
  }
  if (!rank_barrier(m, group, buffers, shape.num_ranks, kDispatchSignal, launch)) return false;

  // For the next launch; everyone on this rank is past reading these.
  for (int i = thread; i < experts; i += num_threads) m.store(&mine.expert_count()[i], 0u);
  return true;
}

}  // namespace megamoe
