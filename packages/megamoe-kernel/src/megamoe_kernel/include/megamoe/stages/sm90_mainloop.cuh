// sm_90a: the sums of a task. A consumer warpgroup takes its tiles of weights from a stage to
// registers, decodes them, and multiplies: operand A never goes back to shared memory.
#pragma once

#include "megamoe/ptx/wgmma.cuh"
#include "megamoe/stages/decode.cuh"
#include "megamoe/stages/l2_epilogue.hpp"
#include "megamoe/stages/sm90_pipeline.cuh"

namespace megamoe {

// Where a choice among multiples of 8 from least to most is halved: the most of the lower half.
MEGAMOE_FN constexpr int middle_of(int least, int most) { return least + (most - least) / 16 * 8; }

// Blocks up to so many rows, of `least` to `most`, have a loop of their own: their sums take fewer
// registers, and a loop for fewer widths has fewer branches. 0: there is one loop. Each loop's sums
// have registers of their own; where they do not fit, ptxas serializes wgmma (C7512).
template <class Tiling>
MEGAMOE_FN constexpr int short_rows(int least, int most) {
  constexpr int kMostRegisters = 40;  // for the sums of both loops
  const int middle = middle_of(least, most);
  const int registers = Tiling::tiles * (middle + most) / 2;
  return middle < most && registers <= kMostRegisters ? middle : 0;
}

// The sums of a task in a warpgroup's registers, and what the epilogues ask of them. A block has
// kLeast to kTokens rows, or fewer, but is multiplied as kLeast.
template <class Tiling, int kLeast, int kTokens>
struct Sm90Sums {
  static constexpr int kValues = kTokens / 2;  // of a tile, in a thread

  float d[Tiling::tiles][kValues];
  int warpgroup, thread;  // among the consumers, in the warpgroup
  int rows;               // tokens of the block
  int first = 0, end;     // those that for_each is for

  __device__ __forceinline__ int group() const { return warpgroup / Tiling::split; }
  __device__ __forceinline__ int phase() const { return warpgroup % Tiling::split; }

  // The task's stages; at: the first one. Goes on after a wait that was given up, so that the
  // warpgroup stays together, and returns false.
  template <Machine M, class Shape>
  __device__ __forceinline__ bool accumulate(M& m, const Stages<Tiling, Shape>& stages,
                                             StageCursor<Tiling::stages> at, int steps) {
    constexpr int kHalfTokens = Shape::block_rows * kBoxColumns * 2;  // of half a tile of K
    MEGAMOE_UNROLL
    for (int tile = 0; tile < Tiling::tiles; ++tile) {
      MEGAMOE_UNROLL
      for (int i = 0; i < kValues; ++i) d[tile][i] = 0.0f;
    }
    // Two warpgroups alone multiply half a tile while they decode the next one, and fetch from shared
    // memory before they need it. Four do that for each other: whole tiles, one at a time.
    constexpr bool kAhead = Tiling::warpgroups < 4;
    constexpr int kSets = kAhead ? 2 : 1, kHalves = kAhead ? 1 : 2;  // of a batch
    static_assert(kHalves == 1 || Tiling::tiles == 1);
    constexpr int kBatches = 2 / kHalves * Tiling::tiles * Tiling::depth;  // of a stage
    const int lane = thread % kWarpSize;
    uint32_t held = 0;  // the barrier of a stage that is read until the next batch's wait
    bool ok = wait_phase(m, stages.full(at.stage), at.round);
    Half half[2];
    uint32_t fragment[kSets][4 * kHalves][4];
    if (kAhead) load(stages, at.stage, 0, half[0]);
    for (int step = 0; step < steps; ++step) {
      const uint64_t tokens = ptx::descriptor_k_major(stages.tokens(at.stage, phase()));
      const uint32_t free = stages.free(at.stage);
      MEGAMOE_UNROLL
      for (int i = 0; i < kBatches; ++i) {
        const int first = i * kHalves;
        if (kAhead && i + 1 < kBatches) load(stages, at.stage, i + 1, half[(i + 1) % 2]);
        MEGAMOE_UNROLL
        for (int h = 0; h < kHalves; ++h) {
          if (!kAhead) load(stages, at.stage, first + h, half[h]);
        }
        MEGAMOE_UNROLL
        for (int h = 0; h < kHalves; ++h) {
          decode(half[(first + h) % 2],
                 reinterpret_cast<uint32_t(&)[4][4]>(fragment[i % kSets][4 * h]));
        }
        multiply<kLeast, kTokens, 4 * kHalves, kHalfTokens>(
            d[i % Tiling::tiles], fragment[i % kSets],
            ptx::descriptor_plus(tokens, (k_tile(first) * 2 + half_of(first)) * kHalfTokens));
        if (kAhead && i + 1 == kBatches && step + 1 < steps) {
          at.advance();
          if (!wait_phase(m, stages.full(at.stage), at.round)) ok = false;
          load(stages, at.stage, 0, half[0]);
        }
        ptx::wgmma_wait<kSets - 1>();
        if (i == 0 && held != 0) stages.release(lane, held);
      }
      if (kAhead) {
        held = free;
      } else {
        stages.release(lane, free);
        if (step + 1 < steps) {
          at.advance();
          if (!wait_phase(m, stages.full(at.stage), at.round)) ok = false;
        }
      }
    }
    ptx::wgmma_wait<0>();
    if (held != 0) stages.release(lane, held);
    return ok;
  }

  // Warpgroups that took turns: the first of each group gets the sum, in a fixed order. partial:
  // shared memory. False if ok is not everywhere among those that share a tile.
  template <Machine M>
  __device__ __forceinline__ bool reduce(M& m, const Group& all, float* partial, bool ok) {
    if constexpr (Tiling::split == 1) {
      return m.sync_all(kWarpgroupBarrier + warpgroup, kWarpgroup, ok);
    }
    float* mine = partial + thread;
    constexpr int kAll = Tiling::tiles * kValues * kWarpgroup;
    if (phase() > 0) each(mine + (group() * (Tiling::split - 1) + phase() - 1) * kAll,
                          [](float& sum, float& part) { part = sum; });
    ok = all.sync(m, ok);
    if (phase() == 0) {
      for (int p = 0; p < Tiling::split - 1; ++p) {
        each(mine + (group() * (Tiling::split - 1) + p) * kAll,
             [](float& sum, float& part) { sum += part; });
      }
    }
    return ok;
  }

  // Calls f for all that this thread has. d's pairs of rows are gate and up of one output in L1.
  template <class F>
  __device__ __forceinline__ void for_each(F f) {
    if (phase() > 0) return;
    const int g = thread % kWarpSize / 4, t = thread % 4, w = thread / kWarpSize;
    MEGAMOE_UNROLL
    for (int tile = 0; tile < Tiling::tiles; ++tile) {
      const int task_tile = group() * Tiling::tiles + tile;
      MEGAMOE_UNROLL
      for (int j = 0; j < kTokens / 8; ++j) {
        if (8 * j < first || 8 * j >= end) continue;  // not a break: d stays in registers
        const float* sum = &d[tile][4 * j];
        if constexpr (requires { f(L1SumsOf<1>{}); }) {
          f(L1SumsOf<1>{{{sum[0], sum[1]}}, {{sum[2], sum[3]}}, {task_tile * 32 + 8 * w + g},
                        8 * j + 2 * t});
        } else {
          const int row = task_tile * kTileRows + 16 * w + g;
          f(L2Sums{{{sum[0], sum[1]}, {sum[2], sum[3]}}, {row, row + 8}, 8 * j + 2 * t});
        }
      }
    }
  }

 private:
  // A batch, kSteps steps of K, four of each half, for as many tokens as the block has rows: multiples
  // of 8 from kFrom to kMost. Only this is there for every width, with its fence and commit: with
  // loops of several widths ptxas serializes wgmma (C7512), and with the commit outside it waits for
  // every batch.
  template <int kFrom, int kMost, int kSteps, int kHalfTokens>
  __device__ __forceinline__ void multiply(float (&sums)[kValues], const uint32_t (&a)[kSteps][4],
                                           uint64_t tokens) const {
    if constexpr (kFrom < kMost) {
      constexpr int kMiddle = middle_of(kFrom, kMost);
      if (rows <= kMiddle) return multiply<kFrom, kMiddle, kSteps, kHalfTokens>(sums, a, tokens);
      return multiply<kMiddle + 8, kMost, kSteps, kHalfTokens>(sums, a, tokens);
    } else {
      ptx::wgmma_fence();
      MEGAMOE_UNROLL
      for (int j = 0; j < kSteps; ++j) {
        ptx::wgmma(reinterpret_cast<float(&)[kMost / 2]>(sums), a[j],
                   ptx::descriptor_plus(tokens, j / 4 * kHalfTokens + j % 4 * 32));
      }
      ptx::wgmma_commit();
    }
  }

  // Of a batch: tile of K among the stage's, less phase(), and half.
  __device__ __forceinline__ static constexpr int k_tile(int batch) {
    return batch / (2 * Tiling::tiles) * Tiling::split;
  }
  __device__ __forceinline__ static constexpr int half_of(int batch) {
    return batch / Tiling::tiles % 2;
  }

  // What a thread has of half a tile, four steps, as it lies in memory.
  struct Half {
    Chunk codes;
    uint16_t scales;
  };
  template <class Shape>
  __device__ __forceinline__ void load(const Stages<Tiling, Shape>& stages, int stage, int batch,
                                       Half& to) const {
    const int tile = batch % Tiling::tiles, half = half_of(batch);
    const uint8_t* from =
        stages.weights(stage, group() * Tiling::tiles + tile, k_tile(batch) + phase());
    to.codes = reinterpret_cast<const Chunk*>(from + half * (kTileCodeBytes / 2))[thread];
    to.scales = reinterpret_cast<const uint16_t*>(from + kTileCodeBytes +
                                                  half * (kTileScaleBytes / 2))[thread];
  }
  __device__ __forceinline__ static void decode(const Half& half, uint32_t (&fragment)[4][4]) {
    uint32_t scales[2];
    decode_scales(half.scales, scales);
    MEGAMOE_UNROLL
    for (int i = 0; i < 4; i += 2) {
      decode_steps(half.codes.word[i], half.codes.word[i + 1], scales,
                   reinterpret_cast<uint32_t(&)[2][4]>(fragment[i]));
    }
  }

  template <class F>
  __device__ __forceinline__ void each(float* parts, F f) {
    MEGAMOE_UNROLL
    for (int tile = 0; tile < Tiling::tiles; ++tile) {
      MEGAMOE_UNROLL
      for (int i = 0; i < kValues; ++i) f(d[tile][i], parts[(tile * kValues + i) * kWarpgroup]);
    }
  }
};

}  // namespace megamoe
