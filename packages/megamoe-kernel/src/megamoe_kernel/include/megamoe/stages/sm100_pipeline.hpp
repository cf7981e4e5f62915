// sm_100a: what a CTA has in shared and in tensor memory, and its barriers.
//
// A stage of shared memory is 256 columns of K (one swizzled row of packed codes): the task's
// weights and the block's tokens, with their scale words. Tensor memory holds two accumulators, so
// that one is read while the other is computed, and the scales of one stage. All sizes are
// constants of the tiling, and what does not fit does not compile.
//
// Two CTAs of a cluster can work as a pair: a task has then the rows of both, each CTA copies its
// own rows of weights and half of the tokens; its leader copies the tokens' scales to both, and
// begins the products of both. Outside the mainloop each has a task of its own, with its own rows.
#pragma once

#include "megamoe/common/machine.hpp"
#include "megamoe/layout/block_scale.hpp"
#include "megamoe/ptx/sm100.hpp"
#include "megamoe/stages/sm100_sizes.hpp"

namespace megamoe {

// block_rows: a block's tokens, operand B. tiles: of 128 rows of weights in a task, operand A.
// fetch_warps and epilogue_groups (of four warps): of a CTA. ctas: 1, or 2 for pairs. Registers 0:
// as compiled.
template <int kBlockRows, int kTiles, int kStages, int kFetchWarps, int kEpilogueGroups,
          int kCtas = 1, int kOtherRegisters = 0, int kEpilogueRegisters = 0>
struct Sm100Tiling {
  static constexpr int block_rows = kBlockRows, tiles = kTiles, stages = kStages, ctas = kCtas;
  static constexpr int fetch_warps = kFetchWarps, epilogue_groups = kEpilogueGroups;
  static constexpr int other_registers = kOtherRegisters;
  static constexpr int epilogue_registers = kEpilogueRegisters;
  static constexpr int weight_rows = kTiles * ptx::kMmaRows;
  static constexpr int token_atoms = ceil_div(kBlockRows, 128);

  // Tensor memory, in columns.
  static constexpr int step_scale_columns = (kTiles + token_atoms) * kScaleAtomColumns;
  static constexpr int scale_columns = kStageSteps * step_scale_columns;
  static constexpr int accumulator_columns = kTiles * kBlockRows;
  static constexpr int scales_at = 2 * accumulator_columns;
  static constexpr int used_columns = scales_at + scale_columns;
  static constexpr int columns = ptx::allocated_columns(used_columns);

  static_assert(kCtas == 1 || kCtas == 2);
  static_assert(kBlockRows % (kCtas * kTokenBoxRows) == 0 && kBlockRows <= ptx::kMostMmaColumns);
  static_assert(used_columns <= ptx::kTensorColumns, "two accumulators and the scales do not fit");
  static_assert(kStages >= 2);
};

// Roles of a CTA's warps: three that bring and multiply, those that fetch, those of the epilogue.
// An epilogue's warp reads the lanes of its number modulo 4, so the epilogue begins at a fourth
// warp.
template <class Tiling>
struct Sm100Warps {
  static constexpr int weights = 0, tokens = 1, products = 2, fetch = 3;
  static constexpr int epilogue = fetch + Tiling::fetch_warps;
  static constexpr int count = epilogue + 4 * Tiling::epilogue_groups;
  static constexpr int threads = count * kWarpSize;
  static_assert(epilogue % 4 == 0, "1, 5, ... warps fetch");
};

// Shared memory; everything that TMA writes in the swizzle begins at a multiple of 1024.
template <class Tiling>
struct Sm100Stages {
  static constexpr Sm100StageBytes kStage =
      sm100_stage_bytes(Tiling::block_rows, Tiling::tiles, Tiling::ctas);
  static constexpr int kWeightBytes = kStage.weights, kTokenBytes = kStage.tokens;
  static constexpr int kWeightScaleBytes = kStage.weight_scales;
  static constexpr int kStageBytes = kStage.all();
  static_assert(kStageBytes % ptx::kRowGroupBytes == 0);
  static constexpr int kBarriersAt = Tiling::stages * kStageBytes;
  // The word that says where tensor memory begins.
  static constexpr int kTensorAt = kBarriersAt + 8 * sm100_barriers(Tiling::stages);
  static constexpr int kBytes = sm100_ring_bytes(Tiling::stages, kStage);
  static_assert(kBarriersAt + 16 * (Tiling::stages + 2) <= kTensorAt && kTensorAt + 4 <= kBytes);

  uint8_t* base;

  MEGAMOE_GPU_FN uint32_t address(int at) const {
    return ptx::shared_address(base) + static_cast<uint32_t>(at);
  }
  MEGAMOE_GPU_FN uint32_t weights(int stage) const { return address(stage * kStageBytes); }
  MEGAMOE_GPU_FN uint32_t tokens(int stage) const { return weights(stage) + kWeightBytes; }
  MEGAMOE_GPU_FN uint32_t weight_scales(int stage) const { return tokens(stage) + kTokenBytes; }
  MEGAMOE_GPU_FN uint32_t token_scales(int stage) const {
    return weight_scales(stage) + kWeightScaleBytes;
  }

  // A stage is full: weights and tokens are there. Free: the products have read it.
  MEGAMOE_GPU_FN uint32_t full(int stage) const { return address(kBarriersAt + 16 * stage); }
  MEGAMOE_GPU_FN uint32_t free(int stage) const { return full(stage) + 8; }
  // An accumulator is full: the task's sums are complete. Free: the epilogue has read it.
  MEGAMOE_GPU_FN uint32_t sums_full(int accumulator) const {
    return full(Tiling::stages) + static_cast<uint32_t>(16 * accumulator);
  }
  MEGAMOE_GPU_FN uint32_t sums_free(int accumulator) const { return sums_full(accumulator) + 8; }

  // One thread, before a barrier of all. A pair's leader also waits for the other CTA, at the two
  // barriers that it waits at before it begins products.
  MEGAMOE_GPU_FN void init(bool leads) const {
    const bool waits_for_two = Tiling::ctas == 2 && leads;
    for (int stage = 0; stage < Tiling::stages; ++stage) {
      // Who copies weights, who copies tokens.
      ptx::barrier_init(full(stage), waits_for_two ? 3 : 2);
      ptx::barrier_init(free(stage), 1);  // a commit
    }
    for (int accumulator = 0; accumulator < 2; ++accumulator) {
      const int warps = 4 * Tiling::epilogue_groups;
      ptx::barrier_init(sums_full(accumulator), 1);
      ptx::barrier_init(sums_free(accumulator), waits_for_two ? 2 * warps : warps);
    }
    ptx::fence_barrier_init();
  }

  // One whole warp, before a barrier of all: tensor memory's address goes to the word behind.
  MEGAMOE_GPU_FN void allocate() const {
    ptx::tensor_alloc<Tiling::ctas>(address(kTensorAt), Tiling::columns);
    ptx::tensor_no_more_allocs<Tiling::ctas>();
    ptx::tensor_fence_before();
  }
  MEGAMOE_GPU_FN uint32_t tensor_base() const {
    return ptx::tensor_allocated(address(kTensorAt));
  }
};

// Which CTA of its group this is; the leader is number 0.
template <class Tiling, Machine M>
MEGAMOE_GPU_FN int cta_of_group(const M& m) {
  return Tiling::ctas == 1 ? 0 : m.cta_idx() % Tiling::ctas;
}

// Where a walk over a ring is: the n-th use of its places.
template <int kPlaces>
struct RingCursor {
  int at = 0;
  uint32_t round = 0;

  MEGAMOE_GPU_FN void advance() {
    if (++at == kPlaces) at = 0, ++round;
  }
};

// Waits until a barrier's phase number `phase` is complete; of the phases' numbers the parity
// matters. False if that took too long, or if another thread of the rank gave up. kCtas: 2 where
// the other CTA of a pair may have arrived.
template <int kCtas, Machine M>
MEGAMOE_GPU_FN bool wait_phase(M& m, uint32_t barrier, uint32_t phase MEGAMOE_SITE) {
  const uint32_t parity = phase & 1u;
  if (ptx::barrier_test<kCtas>(barrier, parity MEGAMOE_PASS_SITE)) return true;
  const uint64_t start = m.clock();
  for (uint32_t polls = 1; !ptx::barrier_test<kCtas>(barrier, parity MEGAMOE_PASS_SITE); ++polls) {
    if (polls % M::kPollsPerLook == 0) {
      if (m.given_up()) return false;
      if (m.clock() - start > m.wait_limit()) {
        m.give_up({Wait::kPipeline}, parity, parity ^ 1u);
        return false;
      }
    }
    m.pause();
  }
  return true;
}

}  // namespace megamoe
