// The end of a task of L2: results go home, to their tokens' ranks. Rounding points L2_SCALE, SLOT.
#pragma once

#include "megamoe/stages/l1_epilogue.hpp"

namespace megamoe {

// As L1Sums: two rows of the output, counted within the task, for two neighbouring tokens.
struct L2Sums {
  float sum[2][2];
  int row[2];
  int token;
};

template <class Shape>
MEGAMOE_FN constexpr int l2_tile_bytes(const Shape& shape, int tokens) {
  return tokens * (shape.weight_rows * 2 + kTileRowPadding);
}

// As l1_to_tile. factor: alpha, in NVFP4 times the intermediate's input_scale. first: the token of the
// block that the tile begins with.
template <Machine M, class Shape, class Sums>
MEGAMOE_FN void l2_to_tile(M& m, const Shape& shape, float factor, Sums& sums, uint8_t* tile,
                           int first = 0) {
  sums.for_each([&](const L2Sums& part) {
    MEGAMOE_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint16_t* row = reinterpret_cast<uint16_t*>(
          tile + (part.token - first + i) * (shape.weight_rows * 2 + kTileRowPadding));
      MEGAMOE_UNROLL
      for (int j = 0; j < 2; ++j) {
        m.store_tile(&row[part.row[j]], bf16_from_fp32(mul_rn(part.sum[j][i], factor)));
      }
    }
  });
}

// The tile to the tokens' ranks: all warps of the group, after all of the tile is written. output:
// this rank's result, BF16 [tokens, hidden]; the shared expert's slot is there. Peers see the
// results after the combine barrier. first, end: the block's tokens that are in the tile.
template <class Format, Machine M, class Shape>
MEGAMOE_FN void l2_store_tile(M& m, const Group& group, const Shape& shape,
                              const RankBuffers& buffers, const Task& task, const Block& block,
                              uint16_t* output, const uint8_t* tile, int first, int end) {
  const Fields mine{buffers, m.rank_idx()};
  const Gates<Format, Shape> gates(shape, mine);
  const int first_row = gates.slot(task.block).idx * shape.block_rows + first;
  store_tile(m, group, tile, end - first, 2 * shape.weight_rows, [&](int row) {
    const Source source = m.load(&mine.ring_source()[first_row + row]);
    uint16_t* home = source.slot & kToOutput
                         ? output
                         : Fields{buffers, static_cast<int>(source.rank)}.slots();
    return home + int64_t{source.slot & ~kToOutput} * shape.hidden + task.part * shape.weight_rows;
  });
  group.sync(m);
  if (group.thread(m) == 0 && end == block.rows) gates.l2_finished(m, task.block);
}

// Both, by one group.
template <class Format, Machine M, class Shape, class Sums>
MEGAMOE_FN void l2_epilogue(M& m, const Group& group, const Shape& shape,
                            const RankBuffers& buffers, const Task& task, const Block& block,
                            float factor, uint16_t* output, Sums& sums, uint8_t* tile) {
  l2_to_tile(m, shape, factor, sums, tile);
  group.sync(m);
  l2_store_tile<Format>(m, group, shape, buffers, task, block, output, tile, 0, block.rows);
}

}  // namespace megamoe
