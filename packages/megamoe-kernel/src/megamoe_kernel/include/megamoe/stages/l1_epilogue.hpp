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

// Rows of a tile in shared memory are 16 bytes longer than what they hold, so that the lanes that
// write one column of several rows meet different banks.
inline constexpr int kTileRowPadding = kChunkBytes;

// Shared memory for a tile, in bytes: values, then in NVFP4 the block scales.
template <class Format, class Shape>
MEGAMOE_FN constexpr int l1_tile_bytes(const Shape& shape) {
  const int outputs = l1_outputs(shape);
  return shape.block_rows * (Format::bytes(outputs) + kTileRowPadding +
                             (Format::kHasScales ? outputs / kBlockSize : 0));
}

// Rows of a tile in shared memory to rows elsewhere, in pieces of 16 bytes; all warps of the group.
// target(row): where that row of the tile goes. A warp asks for 32 rows at once.
template <Machine M, class Target>
MEGAMOE_FN void store_tile(M& m, const Group& group, const uint8_t* tile, int rows, int row_bytes,
                           Target target) {
  const int chunks = row_bytes / kChunkBytes, warp = group.thread(m) / kWarpSize;
  for (int first = 0; first < rows; first += kWarpSize) {
    const int own = first + lane_idx(m);
    const uint64_t address = own < rows ? reinterpret_cast<uint64_t>(target(own)) : 0;
    for (int i = warp; i < kWarpSize && first + i < rows; i += group.num_warps()) {
      const uint64_t low = m.shuffle(static_cast<uint32_t>(address), i);
      const uint64_t high = m.shuffle(static_cast<uint32_t>(address >> 32), i);
      Chunk* to = reinterpret_cast<Chunk*>(high << 32 | low);
      const Chunk* from =
          reinterpret_cast<const Chunk*>(tile + (first + i) * (row_bytes + kTileRowPadding));
      for (int chunk = lane_idx(m); chunk < chunks; chunk += kWarpSize) {
        m.store(&to[chunk], m.load_tile(&from[chunk]));
      }
    }
  }
}

// A task's sums to the tile: all threads of the group that has them, each its own. sums.for_each(f)
// calls f(L1SumsOf) for everything of the task, in all lanes alike. tile: shared memory, aligned to
// 16.
template <class Format, Machine M, class Shape, class Sums>
MEGAMOE_FN void l1_to_tile(M& m, const Shape& shape, const Fields& mine, const Task& task,
                           const Block& block, const L1Factors& factors, Sums& sums,
                           uint8_t* tile) {
  const int first_row = Gates<Format, Shape>(shape, mine).slot(task.block).idx * shape.block_rows;
  const int row_bytes = Format::bytes(l1_outputs(shape)) + kTileRowPadding;
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
        m.store_tile(&tile[token * row_bytes + part.output[0] / 2], pair.codes);
        if (lane_idx(m) < 4) {
          m.store_tile(&tile_scales[token * row_scales + part.output[0] / kBlockSize],
                       pair.scale);
        }
      } else {
        uint16_t* row = reinterpret_cast<uint16_t*>(tile + token * row_bytes);
        MEGAMOE_UNROLL
        for (int j = 0; j < kOutputs; ++j) {
          m.store_tile(&row[part.output[j]], bf16_from_fp32(h[j]));
        }
      }
    }
  });
}

// The tile to the ring: all warps of the group, after all of the tile is written.
template <class Format, Machine M, class Shape>
MEGAMOE_FN void l1_store_tile(M& m, const Group& group, const Shape& shape, const Fields& mine,
                              const Task& task, const Block& block, const uint8_t* tile) {
  const Gates<Format, Shape> gates(shape, mine);
  const int slot = gates.slot(task.block).idx;
  const int first_row = slot * shape.block_rows, row_bytes = Format::bytes(l1_outputs(shape));
  const uint8_t* tile_scales = tile + shape.block_rows * (row_bytes + kTileRowPadding);
  store_tile(m, group, tile, block.rows, row_bytes, [&](int row) {
    return mine.ring_h() + int64_t{first_row + row} * Format::bytes(shape.intermediate) +
           task.part * row_bytes;
  });
  if constexpr (Format::kHasScales) {
    const int words = l1_outputs(shape) / kValuesPerScaleWord;
    uint32_t* scales = mine.ring_h_sf() + int64_t{slot} * scale_words(shape, shape.intermediate);
    for (int i = group.thread(m); i < block.rows * words; i += group.num_threads) {
      m.store(&scales[scale_word(shape, i / words, task.part * words + i % words)],
              m.load_tile(&reinterpret_cast<const uint32_t*>(tile_scales)[i]));
    }
  }
  group.sync(m);
  if (group.thread(m) == 0) gates.l1_finished(m, task.block);
}

// Both, by one group.
template <class Format, Machine M, class Shape, class Sums>
MEGAMOE_FN void l1_epilogue(M& m, const Group& group, const Shape& shape, const Fields& mine,
                            const Task& task, const Block& block, const L1Factors& factors,
                            Sums& sums, uint8_t* tile) {
  l1_to_tile<Format>(m, shape, mine, task, block, factors, sums, tile);
  group.sync(m);
  l1_store_tile<Format>(m, group, shape, mine, task, block, tile);
}

}  // namespace megamoe
