// sm_90a: weights and tokens through a ring of stages in shared memory, weights decoded in registers.
//
// A stage is 128 columns of K: the task's tiles of weights as they lie in memory, and the block's
// tokens as boxes in the swizzle of 128 bytes. One warp copies weights, another tokens, so weights
// run ahead while tokens are waited for. A consumer warpgroup takes its tiles from shared memory to
// registers, decodes them, and multiplies: operand A never goes back to shared memory.
#pragma once

#include "megamoe/ptx/sm90.cuh"
#include "megamoe/ptx/wgmma.cuh"
#include "megamoe/scheduler/gates.hpp"
#include "megamoe/scheduler/tasks.hpp"
#include "megamoe/stages/decode.cuh"
#include "megamoe/stages/l2_epilogue.hpp"

namespace megamoe {

inline constexpr int kWarpgroup = 128;
inline constexpr int kWarpgroupBarrier = 8;  // named barriers: one for each consumer warpgroup
inline constexpr int kTileRows = 64, kTileColumns = 128;  // of layout_sm90.py
inline constexpr int kTileBytes = 4608, kTileCodeBytes = 4096, kTileScaleBytes = 512;
inline constexpr int kBoxColumns = 64;  // BF16: the 128 bytes of the swizzle
inline constexpr int kMaxBoxRows = 16;

// How the consumer warpgroups share a task. groups x split warpgroups; each group has `tiles` tiles
// of rows of its own, and the warpgroups of a group take turns with the stages and sum up at the end.
// narrow: tokens up to which a block is multiplied as one of so many; block_rows: there are none.
template <int kGroups, int kSplit, int kTiles, int kNarrow, int kStages, int kProducerRegisters,
          int kConsumerRegisters>
struct Sm90Tiling {
  static constexpr int narrow = kNarrow;
  static constexpr int groups = kGroups, split = kSplit, tiles = kTiles, stages = kStages;
  static constexpr int producer_registers = kProducerRegisters;  // 0: as compiled
  static constexpr int consumer_registers = kConsumerRegisters;
  static constexpr int warpgroups = groups * split;
  static constexpr int task_tiles = groups * tiles;
  static constexpr int weight_rows = task_tiles * kTileRows;
  static constexpr int weight_bytes = task_tiles * kTileBytes;  // of a stage
};

template <class Shape>
MEGAMOE_FN constexpr int box_rows(const Shape& shape) {
  return shape.block_rows < kMaxBoxRows ? shape.block_rows : kMaxBoxRows;
}

// Stages of a task.
template <class Shape>
MEGAMOE_FN constexpr int task_steps(const Shape& shape, Layer layer) {
  return (layer == Layer::kL1 ? shape.hidden : shape.intermediate) / kTileColumns;
}

// The ring of stages, in shared memory. Tokens first: boxes want 1024-byte addresses.
template <class Tiling, class Shape>
struct Stages {
  static constexpr int kTokenBytes = Shape::block_rows * kTileColumns * 2;
  static constexpr int kTokensAt = 0;
  static constexpr int kWeightsAt = kTokensAt + Tiling::stages * kTokenBytes;
  static constexpr int kBarriersAt = kWeightsAt + Tiling::stages * Tiling::weight_bytes;
  static constexpr int kBytes = kBarriersAt + Tiling::stages * 16;

  uint8_t* base;
  uint32_t base_address;

  explicit __device__ __forceinline__ Stages(uint8_t* shared)
      : base(shared), base_address(ptx::shared_address(shared)) {}

  __device__ __forceinline__ uint32_t address(int at) const {
    return base_address + static_cast<uint32_t>(at);
  }
  __device__ __forceinline__ uint32_t tokens(int stage) const {
    return address(kTokensAt + stage * kTokenBytes);
  }
  __device__ __forceinline__ const uint8_t* weights(int stage, int tile) const {
    return base + kWeightsAt + stage * Tiling::weight_bytes + tile * kTileBytes;
  }
  __device__ __forceinline__ uint32_t full(int stage) const {
    return address(kBarriersAt + stage * 16);
  }
  __device__ __forceinline__ uint32_t free(int stage) const { return full(stage) + 8; }

  // One thread, before a barrier of all.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < Tiling::stages; ++stage) {
      ptx::barrier_init(full(stage), 2);  // who copies weights, who copies tokens
      ptx::barrier_init(free(stage), Tiling::groups * kWarpgroup / kWarpSize);
    }
    ptx::fence_barrier_init();
  }
};

// Where a walk over the stages is: the n-th use of the ring.
template <int kStages>
struct StageCursor {
  int stage = 0;
  uint32_t round = 0;

  template <int kCount>
  __device__ __forceinline__ void advance() {
    static_assert(kCount <= kStages);
    stage += kCount;
    if (stage >= kStages) stage -= kStages, ++round;
  }
  __device__ __forceinline__ void advance(int count) {
    stage += count;
    while (stage >= kStages) stage -= kStages, ++round;
  }
};

// Waits for a phase of a barrier in shared memory. False if that took too long, or if another thread
// of the rank gave up.
template <Machine M>
__device__ __forceinline__ bool wait_phase(M& m, uint32_t barrier, uint32_t parity) {
  parity &= 1u;
  if (ptx::barrier_test(barrier, parity)) return true;
  const uint64_t start = m.clock();
  for (uint32_t polls = 1; !ptx::barrier_test(barrier, parity); ++polls) {
    if (polls % M::kPollsPerLook == 0) {
      if (m.given_up()) return false;
      if (m.clock() - start > m.wait_limit()) {
        m.give_up({Wait::kPipeline}, parity, parity ^ 1u);
        return false;
      }
    }
  }
  return true;
}

// Both layers' weights: tiles [experts, rows / 64, columns / 128, 4608] and alphas.
struct Sm90Weights {
  const uint8_t* tiles;
  const float* alpha;  // L1 [experts, 2], L2 [experts]
};

// The epilogues' tile in shared memory: consumers fill it task by task, one warp stores it, and the
// next task's products run meanwhile.
struct TileHandoff {
  uint32_t full, free;  // barriers

  // One thread, before a barrier of all. warps: those that fill a tile.
  __device__ __forceinline__ void init(int warps) const {
    ptx::barrier_init(full, warps);
    ptx::barrier_init(free, 1);
    ptx::fence_barrier_init();
  }
  // The tile of task number `count` of this CTA may be written; all tiles before it are stored.
  template <Machine M>
  __device__ __forceinline__ bool wait_free(M& m, uint32_t count) const {
    return wait_phase(m, free, count + 1);
  }
  template <Machine M>
  __device__ __forceinline__ bool wait_full(M& m, uint32_t count) const {
    return wait_phase(m, full, count);
  }
};

// One warp: the weights of this CTA's tasks. weights(layer, expert): where an expert's tiles begin.
template <class Tiling, Machine M, class Shape, class Weights>
__device__ __forceinline__ void copy_weights(M& m, const Shape& shape, const Pool<Shape>& pool,
                                             const Stages<Tiling, Shape>& stages,
                                             Weights weights) {
  TaskCursor<Shape> tasks(shape, pool.num_blocks(), m.cta_idx(), m.num_ctas());
  StageCursor<Tiling::stages> at;
  for (Task task; tasks.next(task);) {
    const int steps = task_steps(shape, task.layer);
    const uint8_t* from = weights(task.layer, pool.block(task.block).expert) +
                          int64_t{task.part} * Tiling::task_tiles * steps * kTileBytes;
    for (int step = 0; step < steps; ++step, at.template advance<1>()) {
      if (!wait_phase(m, stages.free(at.stage), at.round + 1)) return;
      if (lane_idx(m) == 0) {
        ptx::barrier_arrive_expect(stages.full(at.stage), Tiling::weight_bytes);
      }
      m.sync_warp();
      if (const int tile = lane_idx(m); tile < Tiling::task_tiles) {
        ptx::copy_bulk(ptx::shared_address(stages.weights(at.stage, tile)),
                       from + (tile * steps + step) * kTileBytes, kTileBytes,
                       stages.full(at.stage));
      }
    }
  }
}

// One warp: the tokens of this CTA's tasks, as soon as they are there. maps: of the fields ring_x
// and ring_h, in boxes of box_rows by kBoxColumns.
template <class Tiling, Machine M, class Shape>
__device__ __forceinline__ void copy_tokens(M& m, const Shape& shape, const Fields& mine,
                                            const Pool<Shape>& pool,
                                            const Stages<Tiling, Shape>& stages,
                                            const void* const (&maps)[2]) {
  constexpr int kBoxRows = box_rows(Shape{}), kBoxBytes = kBoxRows * kBoxColumns * 2;
  const Gates<Bf16, Shape> gates(shape, mine);
  TaskCursor<Shape> tasks(shape, pool.num_blocks(), m.cta_idx(), m.num_ctas());
  StageCursor<Tiling::stages> at;
  for (Task task; tasks.next(task);) {
    const bool is_l1 = task.layer == Layer::kL1;
    bool ok = true;
    if (lane_idx(m) == 0) {
      ok = is_l1 ? gates.wait_tokens(m, task.block) : gates.wait_intermediate(m, task.block);
      ptx::fence_proxy_async();
    }
    if (m.ballot(ok) != kAllLanes) return;
    ptx::fence_proxy_async();  // in each lane that copies
    const int steps = task_steps(shape, task.layer);
    const int row = gates.slot(task.block).idx * shape.block_rows;
    // What lies in the other rows is multiplied too, and stored nowhere.
    const int boxes = ceil_div(pool.block(task.block).rows, kBoxRows);
    for (int step = 0; step < steps; ++step, at.template advance<1>()) {
      if (!wait_phase(m, stages.free(at.stage), at.round + 1)) return;
      if (lane_idx(m) == 0) {
        ptx::barrier_arrive_expect(stages.full(at.stage), 2 * boxes * kBoxBytes);
      }
      m.sync_warp();
      if (const int half = lane_idx(m) / 16, box = lane_idx(m) % 16; box < boxes) {
        ptx::copy_box(stages.tokens(at.stage) + half * shape.block_rows * 128 + box * kBoxBytes,
                      maps[!is_l1], step * kTileColumns + half * kBoxColumns, row + box * kBoxRows,
                      stages.full(at.stage));
      }
    }
  }
}

// The sums of a task in a warpgroup's registers, and what the epilogues ask of them.
template <class Tiling, int kTokens>
struct Sm90Sums {
  static constexpr int kValues = kTokens / 2;  // of a tile, in a thread

  float d[Tiling::tiles][kValues];
  int warpgroup, thread;  // among the consumers, in the warpgroup
  int rows;               // tokens of the block

  __device__ __forceinline__ int group() const { return warpgroup / Tiling::split; }
  __device__ __forceinline__ int phase() const { return warpgroup % Tiling::split; }

  // The task's stages; at: the first one. Multiplies kWidth tokens. Goes on after a wait that was
  // given up, so that the warpgroup stays together, and returns false.
  template <int kWidth, Machine M, class Shape>
  __device__ __forceinline__ bool accumulate(M& m, const Stages<Tiling, Shape>& stages,
                                             StageCursor<Tiling::stages> at, int steps) {
    constexpr int kHalfTokens = Shape::block_rows * kBoxColumns * 2;  // bytes of half a stage
    MEGAMOE_UNROLL
    for (int tile = 0; tile < Tiling::tiles; ++tile) {
      MEGAMOE_UNROLL
      for (int i = 0; i < kValues; ++i) d[tile][i] = 0.0f;
    }
    bool ok = true;
    const bool leads = thread % kWarpSize == 0;
    uint32_t held = 0;  // the barrier of a stage that is read until the next batch's wait
    at.advance(phase());
    for (int step = phase(); step < steps; step += Tiling::split, at.template advance<Tiling::split>()) {
      if (!wait_phase(m, stages.full(at.stage), at.round)) ok = false;
      const uint64_t tokens = ptx::descriptor_k_major(stages.tokens(at.stage));
      // Two batches in a row, each with registers of its own for A: what ptxas follows. More of
      // them in one body, and it would wait after each wgmma.
      _Pragma("unroll 1")
      for (int pair = 0; pair < Tiling::tiles; ++pair) {
        uint32_t fragment[2][4][4];
        MEGAMOE_UNROLL
        for (int b = 0; b < 2; ++b) {
          const int tile = Tiling::tiles == 1 ? 0 : b, half = Tiling::tiles == 1 ? b : pair;
          decode(stages.weights(at.stage, group() * Tiling::tiles + tile), half, fragment[b]);
          ptx::wgmma_fence();
          MEGAMOE_UNROLL
          for (int i = 0; i < 4; ++i) {
            ptx::wgmma(reinterpret_cast<float(&)[kWidth / 2]>(d[tile]), fragment[b][i],
                       ptx::descriptor_plus(tokens, half * kHalfTokens + i * 32));
          }
          ptx::wgmma_commit();
          ptx::wgmma_wait<1>();
          if (b == 0 && pair == 0 && leads && held != 0) ptx::barrier_arrive(held);
        }
      }
      held = stages.free(at.stage);
    }
    ptx::wgmma_wait<0>();
    if (leads && held != 0) ptx::barrier_arrive(held);
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
        if (8 * j >= rows) continue;  // not a break: d stays in registers
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
  // Half of a tile of weights: four steps.
  __device__ __forceinline__ void decode(const uint8_t* tile, int half, uint32_t (&fragment)[4][4]) {
    const Chunk codes = reinterpret_cast<const Chunk*>(tile + half * (kTileCodeBytes / 2))[thread];
    uint32_t scales[2];
    decode_scales(reinterpret_cast<const uint16_t*>(tile + kTileCodeBytes +
                                                    half * (kTileScaleBytes / 2))[thread],
                  scales);
    MEGAMOE_UNROLL
    for (int i = 0; i < 4; i += 2) {
      decode_steps(codes.word[i], codes.word[i + 1], scales,
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
