// The end of a task of L1: sums become a tile of the intermediate in the ring.
#pragma once

#include "megamoe/layout/block_scale.hpp"
#include "megamoe/scheduler/gates.hpp"
#include "megamoe/scheduler/tasks.hpp"
#include "megamoe/stages/swiglu.hpp"

namespace megamoe {

// What a mainloop hands over at a time: the sums of one or two outputs for two neighbouring tokens,
// [output][token], in this lane. outputs are counted within the task, the token within the block.
// In NVFP4 there are two, neighbours, and lanes hold a block as requantize_pair says.
template <int kOutputs>
struct L1SumsOf {
  float gate[kOutputs][2];
  float up[kOutputs][2];
  int output[kOutputs];
  int token;
};
using L1Sums = L1SumsOf<2>;

struct L1Factors {
  float alpha_gate;
  float alpha_up;
  float input_scale;  // of the intermediate; NVFP4 only
  float limit;        // infinity: no clamp
};

// Shared memory for a tile, in bytes: values, then in NVFP4 the block scales.
template <class Format, class Shape>
MEGAMOE_FN constexpr int l1_tile_bytes(const Shape& shape) {
  const int outputs = l1_outputs(shape);
  return shape.block_rows *
         (Format::bytes(outputs) + (Format::kHasScales ? outputs / kBlockSize : 0));
}

// Rows of a tile in shared memory to 16-byte pieces of rows elsewhere; all threads of the group.
// target(row): where that row of the tile goes.
template <Machine M, class Target>
MEGAMOE_FN void store_tile(M& m, const Group& group, const uint8_t* tile, int rows, int row_bytes,
                           Target target) {
  const int chunks = row_bytes / kChunkBytes;
  for (int i = group.thread(m); i < rows * chunks; i += group.num_threads) {
    const int row = i / chunks, chunk = i % chunks;
    m.store(reinterpret_cast<Chunk*>(target(row)) + chunk,
            reinterpret_cast<const Chunk*>(tile)[i]);
  }
}

// All threads of the group. sums.for_each(f) calls f(L1SumsOf) for everything of the task, in all
// lanes alike. tile: shared memory, aligned to 16.
template <class Format, Machine M, class Shape, class Sums>
MEGAMOE_FN void l1_epilogue(M& m, const Group& group, const Shape& shape, const Fields& mine,
                            const Task& task, const Block& block, const L1Factors& factors,
                            Sums& sums, uint8_t* tile) {
  const Gates<Format, Shape> gates(shape, mine);
  const int slot = gates.slot(task.block).idx;
  const int first_row = slot * shape.block_rows, row_bytes = Format::bytes(l1_outputs(shape));
  const int row_scales = l1_outputs(shape) / kBlockSize;
  uint8_t* tile_scales = tile + shape.block_rows * row_bytes;

  sums.for_each([&]<int kOutputs>(const L1SumsOf<kOutputs>& part) {
    MEGAMOE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int token = part.token + i;
      float gate_factor = factors.alpha_gate, up_factor = factors.alpha_up;
      if constexpr (Format::kHasScales) {
        // Rows that stay empty have no scale; what becomes of them is not stored.
        const float x_scale =
            token < block.rows ? m.load(&mine.ring_x_scale()[first_row + token]) : 0.0f;
        gate_factor = mul_rn(x_scale, gate_factor);
        up_factor = mul_rn(x_scale, up_factor);
      }
      float h[kOutputs];
      MEGAMOE_UNROLL
      for (int j = 0; j < kOutputs; ++j) {
        h[j] = swiglu(mul_rn(part.gate[j][i], gate_factor), mul_rn(part.up[j][i], up_factor),
                      factors.limit);
      }
      if constexpr (Format::kHasScales) {
        const RequantizedPair pair = requantize_pair(m, h[0], h[1], factors.input_scale);
        tile[token * row_bytes + part.output[0] / 2] = pair.codes;
        if (lane_idx(m) < 4) {
          tile_scales[token * row_scales + part.output[0] / kBlockSize] = pair.scale;
        }
      } else {
        uint16_t* row = reinterpret_cast<uint16_t*>(tile + token * row_bytes);
        MEGAMOE_UNROLL
        for (int j = 0; j < kOutputs; ++j) row[part.output[j]] = bf16_from_fp32(h[j]);
      }
    }
  });
  group.sync(m);

  store_tile(m, group, tile, block.rows, row_bytes, [&](int row) {
    return mine.ring_h() + int64_t{first_row + row} * Format::bytes(shape.intermediate) +
           task.part * row_bytes;
  });
  if constexpr (Format::kHasScales) {
    const int words = l1_outputs(shape) / kValuesPerScaleWord;
    uint32_t* scales = mine.ring_h_sf() + int64_t{slot} * scale_words(shape, shape.intermediate);
    for (int i = group.thread(m); i < block.rows * words; i += group.num_threads) {
      m.store(&scales[scale_word(shape, i / words, task.part * words + i % words)],
              reinterpret_cast<const uint32_t*>(tile_scales)[i]);
    }
  }
  group.sync(m);
  if (group.thread(m) == 0) gates.l1_finished(m, task.block);
}

}  // namespace megamoe
