// The ring of token blocks: which slot a block has, and which counts its counters reach.
//
// The blocks of a launch are numbered from 0; block b lies in slot b mod R and is the slot's
// generation b / R. Counters start at zero in every launch and only grow, so a count means one
// generation: whoever waits for a count can neither take an older block for its own nor miss one.
#pragma once

#include "megamoe/layout/problem.hpp"

namespace megamoe {

// Words of the field "counters".
inline constexpr int kGridBarrierWord = 0;
inline constexpr int kLaunchWord = 1;  // launches that this rank has completed
inline constexpr int kDrawnWord = 2;   // tasks that were not taken by turns

// Rows of the field "barrier".
inline constexpr int kDispatchSignal = 0;
inline constexpr int kCombineSignal = 1;

struct RingSlot {
  int idx;
  uint32_t generation;
};

template <class Format, class Shape>
MEGAMOE_FN constexpr RingSlot ring_slot(const Shape& shape, int block) {
  const int blocks = ring_blocks<Format>(shape);
  return {block % blocks, static_cast<uint32_t>(block / blocks)};
}

// ring_arrived once all tokens of the generation are there. Whoever brings the last token of a
// block that is not full also counts the rows that stay empty.
template <class Shape>
MEGAMOE_FN constexpr uint32_t arrived_count(const Shape& shape, uint32_t generation) {
  return (generation + 1) * static_cast<uint32_t>(shape.block_rows);
}

// ring_l1_done once the generation's intermediates are complete.
template <class Shape>
MEGAMOE_FN constexpr uint32_t l1_done_count(const Shape& shape, uint32_t generation) {
  return (generation + 1) * static_cast<uint32_t>(l1_tasks(shape));
}

// ring_l2_done once the generation before is no longer read: the slot is free.
template <class Shape>
MEGAMOE_FN constexpr uint32_t free_count(const Shape& shape, uint32_t generation) {
  return generation * static_cast<uint32_t>(l2_tasks(shape));
}

// A row of the field "ring_source": the rank that a token came from, and where its result goes
// there: row `slot` of "slots", or with kToOutput the token's row of the output itself.
struct alignas(8) Source {
  uint32_t rank;
  uint32_t slot;
};
inline constexpr uint32_t kToOutput = 1u << 31;

}  // namespace megamoe
