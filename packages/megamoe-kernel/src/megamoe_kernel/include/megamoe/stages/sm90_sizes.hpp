// sm_90a: sizes that a tiling implies, for kernels and for the host code that chooses the tiling.
#pragma once

#include "megamoe/layout/problem.hpp"

namespace megamoe {

inline constexpr int kTileRows = 64, kTileColumns = 128;  // of layout_sm90.py
inline constexpr int kTileBytes = 4608, kTileCodeBytes = 4096, kTileScaleBytes = 512;

// Bytes of a stage in shared memory: `split` tiles of K of all tokens, and of all rows of weights.
MEGAMOE_FN constexpr int sm90_token_bytes(int block_rows, int split) {
  return block_rows * split * kTileColumns * 2;
}
MEGAMOE_FN constexpr int sm90_weight_bytes(int weight_rows, int split) {
  return weight_rows / kTileRows * split * kTileBytes;
}
// Stages, with the two barriers of each.
MEGAMOE_FN constexpr int sm90_ring_bytes(int stages, int block_rows, int weight_rows, int split) {
  return stages *
         (sm90_token_bytes(block_rows, split) + sm90_weight_bytes(weight_rows, split) + 2 * 8);
}

}  // namespace megamoe
