// sm_100a: sizes that a tiling implies, for kernels and for the host code that chooses the tiling.
#pragma once

#include "megamoe/layout/problem.hpp"
#include "megamoe/ptx/descriptors.hpp"

namespace megamoe {

inline constexpr int kStageColumns = 2 * ptx::kSwizzleBytes;  // codes of a row of a stage
inline constexpr int kStageSteps = kStageColumns / ptx::kMmaK;
inline constexpr int kScaleAtomBytes = 512;  // scale words of 128 rows for one MMA
inline constexpr int kScaleAtomColumns = 4;  // the same in tensor memory
inline constexpr int kTokenBoxRows = 16;     // tokens come, and are multiplied, in these steps

// Bytes of a stage in shared memory. block_rows, tiles, ctas: those of Sm100Tiling.
struct Sm100StageBytes {
  int weights, tokens, weight_scales, token_scales;

  MEGAMOE_FN constexpr int all() const { return weights + tokens + weight_scales + token_scales; }
};
MEGAMOE_FN constexpr Sm100StageBytes sm100_stage_bytes(int block_rows, int tiles, int ctas) {
  return {tiles * ptx::kMmaRows * ptx::kSwizzleBytes, block_rows / ctas * ptx::kSwizzleBytes,
          kStageSteps * tiles * kScaleAtomBytes,
          kStageSteps * ceil_div(block_rows, 128) * kScaleAtomBytes};
}

// Behind the stages: two barriers of each, and of each accumulator; where tensor memory begins.
MEGAMOE_FN constexpr int sm100_barriers(int stages) { return 2 * stages + 2 * 2; }
MEGAMOE_FN constexpr int sm100_ring_bytes(int stages, const Sm100StageBytes& stage) {
  return ceil_div(stages * stage.all() + 8 * sm100_barriers(stages) + 4, 128) * 128;
}

}  // namespace megamoe
