// The sizes of a layer and the tiling by which a kernel computes it.
//
// Code takes a `Shape`: an object with the members of Problem. A kernel compiled for one layer
// passes a type whose members are static constants, so that every division is by a constant; host
// code passes a Problem.
#pragma once

#include "megamoe/common/types.hpp"
#include "megamoe/layout/buffer.hpp"

namespace megamoe {

struct Problem {
  int num_ranks;
  int num_local_experts;  // routed experts of a rank
  int num_shared;         // 1: one more expert that every token visits on its own rank
  int num_topk;
  int hidden;
  int intermediate;
  int ring_rows;     // of the buffer
  int block_rows;    // tokens of a tile: one block is one expert's
  int wave_blocks;   // blocks whose L1 tasks are handed out together (scheduler/tasks.hpp)
  int weight_rows;   // rows of weights of a task, in L1 gate and up together
};

// A Shape of constants, in the order of Problem.
template <int kNumRanks, int kNumLocalExperts, int kNumShared, int kNumTopk, int kHidden,
          int kIntermediate, int kRingRows, int kBlockRows, int kWaveBlocks, int kWeightRows>
struct StaticShape {
  static constexpr int num_ranks = kNumRanks;
  static constexpr int num_local_experts = kNumLocalExperts;
  static constexpr int num_shared = kNumShared;
  static constexpr int num_topk = kNumTopk;
  static constexpr int hidden = kHidden;
  static constexpr int intermediate = kIntermediate;
  static constexpr int ring_rows = kRingRows;
  static constexpr int block_rows = kBlockRows;
  static constexpr int wave_blocks = kWaveBlocks;
  static constexpr int weight_rows = kWeightRows;
};

// How tokens and intermediates are stored: the two activations of the contract.
struct Nvfp4 {
  static constexpr bool kHasScales = true;
  MEGAMOE_FN static constexpr int bytes(int values) { return values / 2; }
};
struct Bf16 {
  static constexpr bool kHasScales = false;
  MEGAMOE_FN static constexpr int bytes(int values) { return values * 2; }
};

// Routed and shared experts of a rank; the shared one comes last.
template <class Shape>
MEGAMOE_FN constexpr int num_pool_experts(const Shape& shape) {
  return shape.num_local_experts + shape.num_shared;
}

template <class Shape>
MEGAMOE_FN constexpr int num_experts(const Shape& shape) {
  return shape.num_ranks * shape.num_local_experts;
}

// Tasks of a block: each computes weight_rows rows for all tokens of the block.
template <class Shape>
MEGAMOE_FN constexpr int l1_tasks(const Shape& shape) {
  return 2 * shape.intermediate / shape.weight_rows;
}
template <class Shape>
MEGAMOE_FN constexpr int l2_tasks(const Shape& shape) {
  return shape.hidden / shape.weight_rows;
}
// Whether the CTAs of a cluster get equally many tasks of each block.
template <class Shape>
MEGAMOE_FN constexpr bool shares_out(const Shape& shape, int ctas) {
  return l1_tasks(shape) % ctas == 0 && l2_tasks(shape) % ctas == 0;
}
// Values of the intermediate that a task of L1 makes.
template <class Shape>
MEGAMOE_FN constexpr int l1_outputs(const Shape& shape) {
  return shape.weight_rows / 2;
}

// Block scales of tcgen05 come in chunks of 128 rows, so a block has that many rows of them.
template <class Shape>
MEGAMOE_FN constexpr int scale_rows(const Shape& shape) {
  return ceil_div(shape.block_rows, 128) * 128;
}

// Blocks that the ring holds. Block scales take more rows than tokens do, and the buffer has as
// many of both.
template <class Format, class Shape>
MEGAMOE_FN constexpr int ring_blocks(const Shape& shape) {
  return shape.ring_rows / (Format::kHasScales ? scale_rows(shape) : shape.block_rows);
}

// Null if the shape can be run, else what is wrong.
template <class Format, class Shape>
constexpr const char* problem_error(const Shape& s) {
  if (s.num_ranks < 1 || s.num_local_experts < 1 || s.num_topk < 1) return "a size is not positive";
  if (s.num_shared != 0 && s.num_shared != 1) return "there is at most one shared expert";
  if (s.hidden % 128 || s.intermediate % 128) return "hidden and intermediate: multiples of 128";
  if (s.weight_rows % 64 || (2 * s.intermediate) % s.weight_rows || s.hidden % s.weight_rows) {
    return "weight_rows: a multiple of 64 that divides hidden and 2 * intermediate";
  }
  // One task writes whole words of four block scales.
  if (Format::kHasScales && s.weight_rows % 128) return "weight_rows: a multiple of 128 in NVFP4";
  if (s.block_rows < 8 || s.block_rows % 8 || s.block_rows > 256) {
    return "block_rows: a multiple of 8 up to 256";
  }
  if (s.block_rows % static_cast<int>(kRingTile)) return "block_rows: a multiple of kRingTile";
  // Else the ring could wait for a task that comes after the one that waits (scheduler/tasks.hpp).
  if (s.wave_blocks < 1 || ring_blocks<Format>(s) < 2 * s.wave_blocks) {
    return "the ring has to hold two waves of blocks";
  }
  return nullptr;
}

}  // namespace megamoe
