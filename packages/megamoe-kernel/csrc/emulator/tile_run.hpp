// One tile of a product through the mainloop's own steps, for comparisons with other arithmetic.
#pragma once

#include "emulator/sm100_kernel.hpp"

namespace megamoe::emulator {

// 128 rows of weights times up to 144 tokens over up to 512 values of K.
using OneTile = Sm100Tiling<144, 1, 2, 1, 1>;

struct TileRun {
  const uint8_t *weights, *tokens;  // codes [rows, columns / 2]
  const uint32_t *weight_scales,
      *token_scales;   // words [columns / 64][128 or 256], in tcgen05.cp's order
  int32_t num_tokens;  // a multiple of 16
  int32_t columns;     // a multiple of 64
  uint64_t seed;
  float* sums;  // [128, num_tokens]
};

class TileRunner {
 public:
  explicit TileRunner(const TileRun& run)
      : run_(run),
        world_(run.seed, none_, 1, 1, kWarps, 1),
        emulation_(world_, Sm100Kernel<OneTile>::geometry(), Mutant::kNone),
        state_(emulation_.add_cta(Stages::kBytes)) {
    emulation = &emulation_;
    cta_.warps.resize(kWarps);
    Sm100Kernel<OneTile>::make_map(weight_map_, run.weights, ptx::kMmaRows, run.columns,
                                   ptx::kMmaRows);
    Sm100Kernel<OneTile>::make_map(token_map_, run.tokens, run.num_tokens, run.columns,
                                   kTokenBoxRows);
    for (int thread = 0; thread < kWarps * kWarpSize; ++thread) {
      emulation_.add_thread(0, 0, thread);
      world_.crew.add([this, thread] { work(thread); });
    }
  }

  std::optional<std::string> run() {
    return world_.crew.run([this] { return emulation_.complete_one(); });
  }

 private:
  using Stages = Sm100Stages<OneTile>;
  static constexpr int kWarps = 4;

  void wait(HostMachine& m, uint32_t barrier) {
    m.clock();
    while (!ptx::barrier_test<1>(barrier, 0)) m.pause();
  }

  void multiply(HostMachine& m, const Stages& stages, uint32_t tensor) {
    const uint32_t instruction = ptx::nvfp4_instruction(ptx::kMmaRows, run_.num_tokens);
    for (int stage = 0; stage * kStageColumns < run_.columns; ++stage) {
      const int column = stage * kStageColumns, steps = steps_of_stage(run_.columns, column);
      const int token_scale_bytes = steps * OneTile::token_atoms * kScaleAtomBytes;
      const uint32_t full = stages.full(stage);
      ptx::barrier_arrive_expect(full, Stages::kWeightBytes + steps * kScaleAtomBytes);
      ptx::barrier_arrive_expect(full, run_.num_tokens * ptx::kSwizzleBytes + token_scale_bytes);
      ptx::copy_box(stages.weights(stage), &weight_map_, column / 2, 0, full);
      for (int row = 0; row < run_.num_tokens; row += kTokenBoxRows) {
        ptx::copy_box(stages.tokens(stage) + static_cast<uint32_t>(row * ptx::kSwizzleBytes),
                      &token_map_, column / 2, row, full);
      }
      ptx::copy_bulk(stages.weight_scales(stage), run_.weight_scales + column / 64 * 128,
                     steps * kScaleAtomBytes, full);
      ptx::copy_bulk(stages.token_scales(stage),
                     run_.token_scales + column / 64 * 128 * OneTile::token_atoms,
                     token_scale_bytes, full);
      wait(m, full);
      ptx::tensor_fence_after();
      multiply_stage(stages, stage, steps, tensor, tensor, instruction, stage == 0);
    }
    ptx::tensor_commit<1>(stages.sums_full(0));
    wait(m, stages.sums_full(0));
  }

  void work(int thread) {
    HostMachine m(world_, cta_, thread, 0, 0, thread);
    const Stages stages{state_.shared.base()};
    if (thread == 0) stages.init(true);
    if (thread < kWarpSize) stages.allocate();
    m.sync_all(1, kWarps * kWarpSize, true);
    ptx::tensor_fence_after();
    const uint32_t tensor = stages.tensor_base();
    if (thread == 0) multiply(m, stages, tensor);
    m.sync_all(1, kWarps * kWarpSize, true);
    ptx::tensor_fence_after();
    const int quarter = thread / kWarpSize, g = thread % kWarpSize / 4, t = thread % 4;
    for (int column = 0; column < run_.num_tokens; column += 16) {
      float part[16];
      ptx::tensor_load_32x16(ptx::tensor_address(tensor, 32 * quarter, column), part);
      for (int i = 0; i < 16; ++i) {
        const int row = 32 * quarter + i % 8 / 4 * 16 + i % 4 / 2 * 8 + g;
        run_.sums[row * run_.num_tokens + column + i / 8 * 8 + 2 * t + i % 2] = part[i];
      }
    }
    m.sync_all(1, kWarps * kWarpSize, true);
    ptx::tensor_fence_after();
    if (thread < kWarpSize) ptx::tensor_free<1>(tensor, OneTile::columns);
  }

  const TileRun& run_;
  const RankBuffers none_{};
  World world_;
  Emulation emulation_;
  CtaState& state_;
  Cta cta_;
  TensorMap weight_map_, token_map_;
};

}  // namespace megamoe::emulator
