// sm_90a: what a CTA has in shared memory.
#pragma once

#include "megamoe/impl/shared_memory.hpp"
#include "megamoe/stages/sm90_sizes.hpp"

namespace megamoe {

// Tokens of a block that the epilogues' tile has room for in L2, whose rows are twice as long as
// L1's: half of a large block, so that there is memory for one more stage.
template <class Shape>
MEGAMOE_FN constexpr int sm90_tile_tokens(const Shape& shape) {
  return shape.block_rows > 64 ? shape.block_rows / 2 : shape.block_rows;
}

// The stages, a tile for the epilogues, sums to be added, words, the tile's barriers, the plan:
// where each begins.
struct Sm90Shared {
  int tile_at, partials_at, words_at, handoff_at, plan_at, bytes;
};
template <class Shape>
MEGAMOE_FN constexpr Sm90Shared sm90_shared(const Shape& shape, int split, int depth, int stages) {
  const int rows = shape.block_rows, weight_rows = shape.weight_rows;
  Sm90Shared at{};
  at.tile_at = ceil_div(sm90_ring_bytes(stages, rows, weight_rows, split * depth), 128) * 128;
  at.partials_at = at.tile_at + shared_tile_bytes<Bf16>(shape, sm90_tile_tokens(shape));
  at.words_at = at.partials_at + (split - 1) * weight_rows * rows * 4;
  at.handoff_at = at.words_at + 4 * shared_words(shape);
  at.plan_at = at.handoff_at + 2 * 8;
  at.bytes = at.plan_at + kPlanBytes;
  return at;
}

}  // namespace megamoe
