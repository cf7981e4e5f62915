// sm_90a: how weights and tokens come to a CTA's shared memory, and how its results leave it.
//
// A stage is some tiles of K, 128 columns each: the task's tiles of weights as they lie in memory,
// and the block's tokens as boxes in the swizzle of 128 bytes. One warp copies weights, another
// tokens, so weights run ahead while tokens are waited for.
#pragma once

#include "megamoe/ptx/sm90.cuh"
#include "megamoe/scheduler/gates.hpp"
#include "megamoe/stages/sm90_sizes.hpp"

namespace megamoe {

inline constexpr int kWarpgroup = 128;
inline constexpr int kWarpgroupBarrier = 8;  // named barriers: one for each consumer warpgroup
inline constexpr int kBoxColumns = 64;  // BF16: the 128 bytes of the swizzle
inline constexpr int kMaxBoxRows = 16;

// How the consumer warpgroups share a task. groups x split warpgroups; each group has `tiles` tiles
// of rows of its own, and each of its warpgroups `depth` of a stage's split x depth tiles of K. These
// sum up at the end. least: tokens that a block is multiplied as at least; more, in eights. ctas: of
// a cluster, 1 or 2; two work on the same block, and each brings half of its tokens to both.
template <int kGroups, int kSplit, int kDepth, int kTiles, int kLeast, int kStages,
          int kProducerRegisters, int kConsumerRegisters, int kCtas>
struct Sm90Tiling {
  static_assert(kCtas == 1 || kCtas == 2);
  static constexpr int ctas = kCtas;
  static constexpr int groups = kGroups, split = kSplit, depth = kDepth, tiles = kTiles;
  static constexpr int stages = kStages;
  static constexpr int least = kLeast;
  static constexpr int producer_registers = kProducerRegisters;
  static constexpr int consumer_registers = kConsumerRegisters;
  static constexpr int warpgroups = groups * split;
  static constexpr int task_tiles = groups * tiles;
  static constexpr int weight_rows = task_tiles * kTileRows;
  // Of a stage:
  static constexpr int k_tiles = split * depth;
  static constexpr int columns = k_tiles * kTileColumns;
  static constexpr int weight_bytes = sm90_weight_bytes(weight_rows, k_tiles);
};

template <class Shape>
MEGAMOE_FN constexpr int box_rows(const Shape& shape) {
  return shape.block_rows % kMaxBoxRows == 0 ? kMaxBoxRows : 8;
}

// Stages of a task.
template <class Tiling, class Shape>
MEGAMOE_FN constexpr int task_steps(const Shape& shape, Layer layer) {
  return (layer == Layer::kL1 ? shape.hidden : shape.intermediate) / Tiling::columns;
}

// The ring of stages, in shared memory. Tokens first: boxes want 1024-byte addresses.
template <class Tiling, class Shape>
struct Stages {
  static constexpr int kTokenBytes = sm90_token_bytes(Shape::block_rows, Tiling::k_tiles);
  static constexpr int kTokensAt = 0;
  static constexpr int kWeightsAt = kTokensAt + Tiling::stages * kTokenBytes;
  static constexpr int kBarriersAt = kWeightsAt + Tiling::stages * Tiling::weight_bytes;

  uint8_t* base;
  uint32_t base_address;

  explicit __device__ __forceinline__ Stages(uint8_t* shared)
      : base(shared), base_address(ptx::shared_address(shared)) {}

  __device__ __forceinline__ uint32_t address(int at) const {
    return base_address + static_cast<uint32_t>(at);
  }
  // k: which tile of K.
  __device__ __forceinline__ uint32_t tokens(int stage, int k) const {
    return address(kTokensAt + stage * kTokenBytes + k * (kTokenBytes / Tiling::k_tiles));
  }
  __device__ __forceinline__ const uint8_t* weights(int stage, int tile, int k) const {
    return base + kWeightsAt + stage * Tiling::weight_bytes +
           (tile * Tiling::k_tiles + k) * kTileBytes;
  }
  __device__ __forceinline__ uint32_t full(int stage) const {
    return address(kBarriersAt + stage * 16);
  }
  __device__ __forceinline__ uint32_t free(int stage) const { return full(stage) + 8; }

  // One warp of consumers has read a stage: tells all who copy to it. barrier: free(stage).
  __device__ __forceinline__ static void release(int lane, uint32_t barrier) {
    if constexpr (Tiling::ctas == 1) {
      if (lane == 0) ptx::barrier_arrive(barrier);
    } else if (lane < Tiling::ctas) {
      ptx::barrier_arrive_at(barrier, lane);
    }
  }

  // One thread, before a barrier of all.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < Tiling::stages; ++stage) {
      ptx::barrier_init(full(stage), 2);  // who copies weights, who copies tokens
      ptx::barrier_init(free(stage),
                        Tiling::ctas * Tiling::warpgroups * kWarpgroup / kWarpSize);
    }
    ptx::fence_barrier_init();
  }
};

// Where a walk over the stages is: the n-th use of the ring.
template <int kStages>
struct StageCursor {
  int stage = 0;
  uint32_t round = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, ++round;
  }
  __device__ __forceinline__ void advance(int count) {
    stage += count;
    round += static_cast<uint32_t>(stage / kStages);
    stage %= kStages;
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

// One layer's weights: tiles [experts, rows / 64, columns / 128, 4608] and alphas.
struct Sm90Weights {
  const uint8_t* tiles;
  const float* alpha;  // L1 [experts, 2], L2 [experts]
};
// Both layers', of the routed experts and of the shared one.
struct Sm90LayerWeights {
  Sm90Weights w13, w2, shared_w13, shared_w2;

  // Of one expert; num_local_experts is the shared one.
  template <class Shape>
  __device__ __forceinline__ Sm90Weights of(const Shape& shape, Layer layer, int expert) const {
    const bool is_l1 = layer == Layer::kL1;
    if (expert == shape.num_local_experts) return is_l1 ? shared_w13 : shared_w2;
    const Sm90Weights& all = is_l1 ? w13 : w2;
    const int64_t tiles =
        int64_t{shape.hidden / kTileColumns} * (shape.intermediate / kTileRows) * (is_l1 ? 2 : 1);
    return {all.tiles + expert * tiles * kTileBytes, all.alpha + expert * (is_l1 ? 2 : 1)};
  }
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
  // Tile number `count` of this CTA may be written; all tiles before it are stored.
  template <Machine M>
  __device__ __forceinline__ bool wait_free(M& m, uint32_t count) const {
    return wait_phase(m, free, count + 1);
  }
  template <Machine M>
  __device__ __forceinline__ bool wait_full(M& m, uint32_t count) const {
    return wait_phase(m, full, count);
  }
};

// The tasks of a CTA one after the other, in shared memory (kPlanBytes): who plans tells all others.
class Plan {
 public:
  explicit __device__ __forceinline__ Plan(uint8_t* shared)
      : tasks_(reinterpret_cast<PlannedTask*>(shared)),
        told_(reinterpret_cast<uint32_t*>(shared + kToldAt)),
        barriers_(ptx::shared_address(shared + kBarriersAt)) {}

  // One thread, before a barrier of all.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < 2 * kPlanned; ++i) ptx::barrier_init(barriers_ + 8 * i, 1);
    ptx::fence_barrier_init();
  }

  // Number `count` of the CTA's tasks. wait: until it is there; false if the wait was given up.
  __device__ __forceinline__ void put(uint32_t count, const PlannedTask& task) const {
    tasks_[count % kPlanned] = task;
    ptx::barrier_arrive(planned(count));
  }
  template <Machine M>
  __device__ __forceinline__ bool wait(M& m, uint32_t count) const {
    return wait_phase(m, planned(count), count / kPlanned);
  }
  __device__ __forceinline__ PlannedTask get(uint32_t count) const {
    return tasks_[count % kPlanned];
  }

  // Draw number `draw`, from CTA 0 of the cluster to the others, who expect it.
  __device__ __forceinline__ void tell(uint32_t draw, uint32_t drawn, int cta) const {
    ptx::store_at(ptx::shared_address(&told_[draw % kPlanned]), drawn, drawing(draw), cta);
  }
  __device__ __forceinline__ void expect(uint32_t draw) const {
    ptx::barrier_arrive_expect(drawing(draw), 4);
  }
  template <Machine M>
  __device__ __forceinline__ bool wait_told(M& m, uint32_t draw) const {
    return wait_phase(m, drawing(draw), draw / kPlanned);
  }
  __device__ __forceinline__ uint32_t told(uint32_t draw) const { return told_[draw % kPlanned]; }

 private:
  static constexpr int kBarriersAt = kPlanned * static_cast<int>(sizeof(PlannedTask));
  static constexpr int kToldAt = kBarriersAt + 2 * kPlanned * 8;
  static_assert(kToldAt + kPlanned * 4 == kPlanBytes && kBarriersAt % 8 == 0);

  __device__ __forceinline__ uint32_t planned(uint32_t count) const {
    return barriers_ + 8 * (count % kPlanned);
  }
  __device__ __forceinline__ uint32_t drawing(uint32_t draw) const {
    return barriers_ + 8 * (kPlanned + draw % kPlanned);
  }

  PlannedTask* tasks_;
  uint32_t* told_;
  uint32_t barriers_;
};

// Bytes of a task's weights.
template <class Tiling, class Shape>
MEGAMOE_FN constexpr int64_t task_bytes(const Shape& shape, Layer layer) {
  return int64_t{task_steps<Tiling>(shape, layer)} * Tiling::weight_bytes;
}

// One warp: the weights of this CTA's tasks.
template <class Tiling, Machine M, class Shape>
__device__ __forceinline__ void copy_weights(M& m, const Shape& shape, const Plan& plan,
                                             const Stages<Tiling, Shape>& stages) {
  StageCursor<Tiling::stages> at;
  for (uint32_t count = 0; plan.wait(m, count); ++count) {
    const PlannedTask planned = plan.get(count);
    if (planned.block.rows == 0) return;
    const int steps = task_steps<Tiling>(shape, planned.task.layer);
    const int64_t row_bytes = int64_t{steps} * Tiling::k_tiles * kTileBytes;  // of a tile of rows
    for (int step = 0; step < steps; ++step, at.advance()) {
      if (!wait_phase(m, stages.free(at.stage), at.round + 1)) return;
      if (lane_idx(m) == 0) {
        ptx::barrier_arrive_expect(stages.full(at.stage), Tiling::weight_bytes);
      }
      m.sync_warp();
      if (const int tile = lane_idx(m); tile < Tiling::task_tiles) {
        constexpr int kPiece = Tiling::k_tiles * kTileBytes;
        ptx::copy_bulk(ptx::shared_address(stages.weights(at.stage, tile, 0)),
                       planned.weights + tile * row_bytes + step * kPiece, kPiece,
                       stages.full(at.stage));
      }
    }
  }
}

// One warp: the tokens of this CTA's tasks, as soon as they are there. maps: of the fields ring_x
// and ring_h, in boxes of box_rows by kBoxColumns.
template <class Tiling, Machine M, class Shape>
__device__ __forceinline__ void copy_tokens(M& m, const Shape& shape, const Fields& mine,
                                            const Plan& plan, const Stages<Tiling, Shape>& stages,
                                            const void* const (&maps)[2]) {
  constexpr int kBoxRows = box_rows(Shape{}), kBoxBytes = kBoxRows * kBoxColumns * 2;
  constexpr int kPanels = Tiling::columns / kBoxColumns, kPanelBytes = Shape::block_rows * 128;
  const Gates<Bf16, Shape> gates(shape, mine);
  StageCursor<Tiling::stages> at;
  for (uint32_t count = 0; plan.wait(m, count); ++count) {
    const PlannedTask planned = plan.get(count);
    if (planned.block.rows == 0) return;
    const Task task = planned.task;
    const bool is_l1 = task.layer == Layer::kL1;
    bool ok = true;
    if (lane_idx(m) == 0) {
      ok = is_l1 ? gates.wait_tokens(m, task.block) : gates.wait_intermediate(m, task.block);
      ptx::fence_proxy_async();
    }
    if (m.ballot(ok) != kAllLanes) return;
    ptx::fence_proxy_async();  // in each lane that copies
    const int steps = task_steps<Tiling>(shape, task.layer);
    const int row = gates.slot(task.block).idx * shape.block_rows;
    // What lies in the other rows is multiplied too, and stored nowhere.
    const int boxes = ceil_div(planned.block.rows, kBoxRows);
    for (int step = 0; step < steps; ++step, at.advance()) {
      if (!wait_phase(m, stages.free(at.stage), at.round + 1)) return;
      if (lane_idx(m) == 0) {
        ptx::barrier_arrive_expect(stages.full(at.stage), kPanels * boxes * kBoxBytes);
      }
      m.sync_warp();
      constexpr int kOwnPanels = kPanels / Tiling::ctas;
      for (int i = lane_idx(m); i < kOwnPanels * boxes; i += kWarpSize) {
        const int panel = i % kOwnPanels * Tiling::ctas + m.cta_idx() % Tiling::ctas;
        const int box = i / kOwnPanels;
        const uint32_t to =
            stages.tokens(at.stage, 0) + panel * kPanelBytes + box * kBoxBytes;
        const int x = step * Tiling::columns + panel * kBoxColumns, y = row + box * kBoxRows;
        if constexpr (Tiling::ctas == 1) {
          ptx::copy_box(to, maps[!is_l1], x, y, stages.full(at.stage));
        } else {
          ptx::copy_box_to_both(to, maps[!is_l1], x, y, stages.full(at.stage));
        }
      }
    }
  }
}

}  // namespace megamoe
