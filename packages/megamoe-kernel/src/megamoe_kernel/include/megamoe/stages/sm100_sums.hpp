// sm_100a: a task's sums in tensor memory, as the epilogues ask for them.
#pragma once

#include "megamoe/stages/l2_epilogue.hpp"
#include "megamoe/stages/sm100_pipeline.hpp"

namespace megamoe {

// for_each(f): f gets every sum of the task, 16 tokens at a time; warps with the same lanes take
// turns. Afterwards the accumulator is free. All threads of the epilogue.
template <class Tiling, Machine M>
struct Sm100Sums {
  M& m;
  uint32_t accumulator;  // its address in tensor memory
  uint32_t free;         // its barrier
  int warp;              // of the epilogue
  int rows;              // tokens that were multiplied

  template <class F>
  MEGAMOE_GPU_FN void for_each(F f) {
    const int quarter = warp % 4, pieces = rows / kTokenBoxRows;
    for (int i = warp / 4; i < Tiling::tiles * pieces; i += Tiling::epilogue_groups) {
      const int tile = i / pieces, token = i % pieces * kTokenBoxRows;
      float sums[16];
      ptx::tensor_load_32x16(
          ptx::tensor_address(accumulator, quarter * kWarpSize, tile * Tiling::block_rows + token),
          sums);
      MEGAMOE_UNROLL
      for (int half = 0; half < 2; ++half) {
        piece(f, tile, quarter, token + 8 * half + lane_idx(m) % 4 * 2, &sums[8 * half]);
      }
    }
    ptx::tensor_fence_before();
    m.sync_warp();
    if (lane_idx(m) == 0) {
      if constexpr (Tiling::ctas == 1) {
        ptx::barrier_arrive(free);
      } else {
        ptx::barrier_arrive_at_leader(free);
      }
    }
  }

 private:
  // sum: of rows g, g + 8, g + 16 and g + 24 of the warp's lanes, two tokens each; g = lane / 4.
  // In L1 these are gate and up of an even output, then of the odd one after it.
  template <class F>
    requires requires(F f, L1Sums part) { f(part); }
  MEGAMOE_GPU_FN void piece(F f, int tile, int quarter, int token, const float* sum) {
    const int output = tile * (ptx::kMmaRows / 2) + quarter * kBlockSize + lane_idx(m) / 4 * 2;
    f(L1Sums{{{sum[0], sum[1]}, {sum[4], sum[5]}},
             {{sum[2], sum[3]}, {sum[6], sum[7]}},
             {output, output + 1},
             token});
  }

  template <class F>
    requires requires(F f, L2Sums part) { f(part); }
  MEGAMOE_GPU_FN void piece(F f, int tile, int quarter, int token, const float* sum) {
    const int row = tile * ptx::kMmaRows + quarter * kWarpSize + lane_idx(m) / 4;
    f(L2Sums{{{sum[0], sum[1]}, {sum[2], sum[3]}}, {row, row + 8}, token});
    f(L2Sums{{{sum[4], sum[5]}, {sum[6], sum[7]}}, {row + 16, row + 24}, token});
  }
};

}  // namespace megamoe
