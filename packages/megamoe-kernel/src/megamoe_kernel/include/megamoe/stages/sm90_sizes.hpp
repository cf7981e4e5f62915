// sm_90a: sizes that a tiling implies, for kernels and for the host code that chooses the tiling.
#pragma once

#include "megamoe/layout/problem.hpp"

namespace megamoe {

inline constexpr int kTileRows = 64, kTileColumns = 128;  // of layout_sm90.py
inline constexpr int kTileBytes = 4608, kTileCodeBytes = 4096, kTileScaleBytes = 512;

// Bytes of a stage in shared memory: k_tiles tiles of K of all tokens, and of all rows of weights.
MEGAMOE_FN constexpr int sm90_token_bytes(int block_rows, int k_tiles) {
  return block_rows * k_tiles * kTileColumns * 2;
}
MEGAMOE_FN constexpr int sm90_weight_bytes(int weight_rows, int k_tiles) {
  return weight_rows / kTileRows * k_tiles * kTileBytes;
}
// Stages, with the two barriers of each.
MEGAMOE_FN constexpr int sm90_ring_bytes(int stages, int block_rows, int weight_rows, int k_tiles) {
  return stages *
         (sm90_token_bytes(block_rows, k_tiles) + sm90_weight_bytes(weight_rows, k_tiles) + 2 * 8);
}

}  // namespace megamoe
