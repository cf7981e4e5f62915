// sm_90a: sizes that a tiling implies, and what is planned of a task: for kernels and for the host code
// that chooses the tiling.
#pragma once

#include "megamoe/scheduler/pool.hpp"
#include "megamoe/scheduler/tasks.hpp"

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

// What all roles of a CTA have to know of a task. Finding it out takes a microsecond or two, so one
// warp does it ahead of them.
struct PlannedTask {
  Task task;
  Block block;  // without rows: there is no further task
  float alpha, alpha_up;
  const uint8_t* weights;  // tiles of its rows
};
inline constexpr int kPlanned = 4;  // places in shared memory: for the one that is stored, and three
// The places, a barrier for each, and as many numbers drawn for the cluster, each with a barrier.
inline constexpr int kPlanBytes = kPlanned * static_cast<int>(sizeof(PlannedTask) + 8 + 8 + 4);

}  // namespace megamoe
