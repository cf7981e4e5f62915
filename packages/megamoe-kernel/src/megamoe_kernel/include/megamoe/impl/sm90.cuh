// The whole layer on Hopper, W4A16: one persistent launch, one CTA on each multiprocessor, alone or in
// clusters of two that bring each other's tokens.
//
// Warpgroup 0 brings and takes away: warp 0 weights, warp 1 tokens to shared memory, warp 2 tokens
// into the ring, warp 3 results from the epilogues' tile. The others compute, then combine. At the
// start all warps but the two copiers bring the first blocks' tokens. Rounding points, gates and
// barriers are those of the neutral stages.
#pragma once

#include "megamoe/comm/device.cuh"
#include "megamoe/impl/sm90_shared.hpp"
#include "megamoe/stages/combine.hpp"
#include "megamoe/stages/fetch.hpp"
#include "megamoe/stages/place_order.hpp"
#include "megamoe/stages/sm90_mainloop.cuh"

namespace megamoe {

struct Sm90Arguments {
  alignas(64) uint8_t token_map[128];  // CUtensorMap of ring_x, boxes of box_rows x kBoxColumns
  uint8_t hidden_map[128];             // of ring_h
  RankBuffers buffers;
  Sm90Weights w13, w2;
  Sm90Weights shared_w13, shared_w2;
  float limit;  // of SwiGLU; infinity: none
  int num_tokens;
  uint16_t* output;  // BF16 [num_tokens, hidden]
  int rank_idx;
  uint64_t wait_limit;  // nanoseconds
};

// What all roles of a CTA know.
template <class Tiling, class Shape>
struct Sm90Cta {
  const Shape& shape;
  const Sm90Arguments& arguments;
  const Fields& mine;
  const Pool<Shape>& pool;
  const Stages<Tiling, Shape>& stages;
  const TileHandoff& handoff;
  PlannedTask* plan;
  uint8_t* tile;
  float* partials;
};

// Plans this CTA's tasks one by one; one warp.
template <class Tiling, Machine M, class Shape>
class Planner {
 public:
  __device__ __forceinline__ Planner(M& m, const Sm90Cta<Tiling, Shape>& cta)
      : m_(m), cta_(cta),
        tasks_(cta.shape, cta.pool.num_blocks(), m.cta_idx(), m.num_ctas()) {}

  __device__ __forceinline__ void plan_next() {
    PlannedTask next{};
    if (tasks_.next(next.task)) {
      next.block = cta_.pool.block(next.task.block);
      const bool is_l1 = next.task.layer == Layer::kL1;
      const bool is_shared = next.block.expert == cta_.shape.num_local_experts;
      const Sm90Arguments& arguments = cta_.arguments;
      const Sm90Weights& weights = is_l1 ? is_shared ? arguments.shared_w13 : arguments.w13
                                   : is_shared ? arguments.shared_w2 : arguments.w2;
      const float* alpha = weights.alpha + (is_shared ? 0 : next.block.expert) * (is_l1 ? 2 : 1);
      next.alpha = mul_rn(alpha[0], kDecodedScale);
      next.alpha_up = is_l1 ? mul_rn(alpha[1], kDecodedScale) : 0.0f;
    }
    if (lane_idx(m_) == 0) cta_.plan[count_ % kPlanned] = next;
    ++count_;
  }

 private:
  M& m_;
  const Sm90Cta<Tiling, Shape>& cta_;
  TaskCursor<Shape, Tiling::ctas> tasks_;
  uint32_t count_ = 0;
};

// Consumers: sums of one task to the tile, in L2 perhaps in two pieces. tiles: how many this CTA has
// handed over. False if a wait was given up.
template <class Tiling, Machine M, class Shape>
__device__ __forceinline__ bool sm90_task(M& m, const Group& computers,
                                          const Sm90Cta<Tiling, Shape>& cta,
                                          const PlannedTask& planned,
                                          const StageCursor<Tiling::stages>& at, int steps,
                                          uint32_t& tiles) {
  const int thread = computers.thread(m);
  Sm90Sums<Tiling, Shape::block_rows> sums;
  // By a shuffle, so that the compiler sees that it is uniform.
  sums.warpgroup = static_cast<int>(m.shuffle(thread / kWarpgroup, 0));
  sums.thread = thread % kWarpgroup;
  sums.rows = sums.end = static_cast<int>(m.shuffle(planned.block.rows, 0));
  bool ok = sums.accumulate(m, cta.stages, at, steps);
  if (!cta.handoff.wait_free(m, tiles)) ok = false;
  if (!sums.reduce(m, computers, cta.partials, ok)) return false;
  const auto hand_over = [&] {
    m.sync_warp();
    if (sums.phase() == 0 && lane_idx(m) == 0) ptx::barrier_arrive(cta.handoff.full);
    ++tiles;
  };
  if (planned.task.layer == Layer::kL1) {
    l1_to_tile<Bf16>(m, cta.shape, cta.mine, planned.task, planned.block,
                     {planned.alpha, planned.alpha_up, 0.0f, cta.arguments.limit}, sums, cta.tile);
    hand_over();
    return true;
  }
  constexpr int kTokens = sm90_tile_tokens(Shape{});
  MEGAMOE_UNROLL
  for (int first = 0; first < Shape::block_rows; first += kTokens) {
    if (first >= sums.rows) break;
    if (first > 0) {
      ok = cta.handoff.wait_free(m, tiles);
      if (!m.sync_all(kWarpgroupBarrier + sums.warpgroup, kWarpgroup, ok)) return false;
    }
    sums.first = first;
    sums.end = sums.rows < first + kTokens ? sums.rows : first + kTokens;
    l2_to_tile(m, cta.shape, planned.alpha, sums, cta.tile, first);
    hand_over();
  }
  return true;
}

// Consumers: all tasks. Afterwards all their results are stored.
template <class Tiling, Machine M, class Shape>
__device__ __forceinline__ bool sm90_compute(M& m, const Group& computers,
                                             const Sm90Cta<Tiling, Shape>& cta) {
  StageCursor<Tiling::stages> at;
  uint32_t tiles = 0;
  for (uint32_t count = 0;; ++count) {
    const PlannedTask planned = cta.plan[count % kPlanned];
    if (planned.block.rows == 0) return cta.handoff.wait_free(m, tiles);
    const int steps = task_steps<Tiling>(cta.shape, planned.task.layer);
    if (!sm90_task(m, computers, cta, planned, at, steps, tiles)) return false;
    at.advance(steps);
  }
}

// One warp: what consumers leave in the tile goes to the ring or home. The plan is three tasks ahead
// of it: a task's place is written again after its tile is full, when nobody reads it any more, and
// consumers that begin a task have seen the tile of the task before the last one free, when the
// task's plan was there.
template <class Tiling, Machine M, class Shape>
__device__ __forceinline__ void sm90_store(M& m, const Group& storer, const Group& readers,
                                           const Sm90Cta<Tiling, Shape>& cta) {
  Planner<Tiling, M, Shape> planner(m, cta);
  for (int i = 0; i < kPlanned - 1; ++i) planner.plan_next();
  readers.sync(m);
  uint32_t tiles = 0;
  for (uint32_t count = 0;; ++count) {
    planner.plan_next();
    m.sync_warp();
    const PlannedTask planned = cta.plan[count % kPlanned];
    const int rows = planned.block.rows;
    const bool is_l1 = planned.task.layer == Layer::kL1;
    for (int first = 0, end; first < rows; first = end) {
      if (!cta.handoff.wait_full(m, tiles++)) return;
      const int room = is_l1 ? rows : sm90_tile_tokens(cta.shape);
      end = rows - first < room ? rows : first + room;
      if (is_l1) {
        l1_store_tile<Bf16>(m, storer, cta.shape, cta.mine, planned.task, planned.block,
                            cta.tile);
      } else {
        l2_store_tile<Bf16>(m, storer, cta.shape, cta.arguments.buffers, planned.task,
                            planned.block, cta.arguments.output, cta.tile, first, end);
      }
      if (lane_idx(m) == 0) ptx::barrier_arrive(cta.handoff.free);
    }
    if (rows == 0) return;
  }
}

// Blocks whose tokens all warps bring at the start: a row or two for each, and no wait for the ring.
template <class Shape>
__device__ __forceinline__ int first_blocks(const Shape& shape, int num_blocks, int num_warps) {
  int most = ceil_div(2 * num_warps, shape.block_rows);
  if (most > ring_blocks<Bf16>(shape)) most = ring_blocks<Bf16>(shape);
  return num_blocks < most ? num_blocks : most;
}

// Of a cluster, no CTA may be gone while the other one copies to it or arrives at its barriers: they
// meet once in here and once after it, whatever fails.
template <class Tiling, class Shape>
__device__ __forceinline__ void sm90_cta(const Sm90Arguments& arguments) {
  static_assert(problem_error<Bf16>(Shape{}) == nullptr);
  static_assert(Shape::weight_rows == Tiling::weight_rows);
  static_assert(shares_out(Shape{}, Tiling::ctas));
  static_assert(Shape::hidden % Tiling::columns == 0 && Shape::intermediate % Tiling::columns == 0);
  constexpr Sm90Shared kAt = sm90_shared(Shape{}, Tiling::split, Tiling::depth, Tiling::stages);
  static_assert(kAt.bytes <= kMostShared && kAt.tile_at % 128 == 0);
  static_assert(Stages<Tiling, Shape>::kBarriersAt + 16 * Tiling::stages <= kAt.tile_at);
  static_assert(kAt.handoff_at + 2 * 8 <= kAt.plan_at);
  // setmaxnreg waits without a limit for what others do not give up.
  constexpr int kThreads = kWarpgroup * (1 + Tiling::warpgroups);
  static_assert(kWarpgroup * (Tiling::producer_registers +
                              Tiling::warpgroups * Tiling::consumer_registers) <=
                kThreads * (65536 / kThreads / 8 * 8));
  extern __shared__ __align__(1024) uint8_t shared[];
  constexpr Shape shape{};
  constexpr int kConsumers = Tiling::warpgroups * kWarpgroup;
  Device m(arguments.buffers, arguments.rank_idx, arguments.wait_limit);
  const Fields mine{arguments.buffers, m.rank_idx()};
  const Stages<Tiling, Shape> stages(shared);
  uint32_t* words = reinterpret_cast<uint32_t*>(shared + kAt.words_at);
  const Group dispatchers{1, 2 * kWarpSize, 2 * kWarpSize};
  const Group computers{2, kWarpgroup, kConsumers};
  const Group everyone{3, 0, kWarpgroup + kConsumers};
  const Group fetcher{4, 2 * kWarpSize, kWarpSize}, storer{5, 3 * kWarpSize, kWarpSize};
  const Group first_fetchers{6, 2 * kWarpSize, 2 * kWarpSize + kConsumers};
  const Group planners{7, 3 * kWarpSize, kWarpSize + kConsumers};
  const uint32_t launch = launch_number(m, mine);
  const uint32_t handoff_at = ptx::shared_address(shared + kAt.handoff_at);
  const TileHandoff handoff{handoff_at, handoff_at + 8};

  if (threadIdx.x == 0) {
    stages.init();
    handoff.init(Tiling::groups * kWarpgroup / kWarpSize);
  }
  bool ok = !m.given_up();
  if (ok && dispatchers.has(m)) {
    ok = route(m, dispatchers, shape, arguments.buffers, launch, arguments.num_tokens,
               words + Pool<Shape>::num_words(shape));
  }
  ok = everyone.sync(m, ok);
  if constexpr (Tiling::ctas > 1) ptx::cluster_sync();
  if (!ok) return;
  Pool<Shape> pool(shape, words);
  pool.build(m, everyone, mine, arguments.num_tokens);
  const Sm90Cta<Tiling, Shape> cta{
      shape, arguments, mine, pool, stages, handoff,
      reinterpret_cast<PlannedTask*>(shared + kAt.plan_at), shared + kAt.tile_at,
      reinterpret_cast<float*>(shared + kAt.partials_at)};
  const int blocks = pool.num_blocks();
  const int first = first_blocks(shape, blocks, m.num_ctas() * first_fetchers.num_warps());
  const auto fetch_blocks = [&]<int kInFlight>(const Group& group, int begin, int end) {
    return fetch<Bf16, InPlaceOrder, kInFlight>(m, group, shape, arguments.buffers, pool, begin,
                                                end);
  };

  if (threadIdx.x < kWarpgroup) {
    ptx::registers_down<Tiling::producer_registers>();
    const int warp = threadIdx.x / kWarpSize;
    if (warp == 0) {
      copy_weights(m, shape, pool, stages, [&](Layer layer, int expert) -> const uint8_t* {
        const bool is_l1 = layer == Layer::kL1;
        if (expert == shape.num_local_experts) {
          return (is_l1 ? arguments.shared_w13 : arguments.shared_w2).tiles;
        }
        constexpr int64_t kTiles =
            int64_t{Shape::hidden / kTileColumns} * (Shape::intermediate / kTileRows);
        return (is_l1 ? arguments.w13 : arguments.w2).tiles +
               expert * (is_l1 ? 2 * kTiles : kTiles) * kTileBytes;
      });
    } else if (warp == 1) {
      const void* const maps[2] = {arguments.token_map, arguments.hidden_map};
      copy_tokens(m, shape, mine, pool, stages, maps);
    } else if (fetch_blocks.template operator()<8>(first_fetchers, 0, first)) {
      if (warp == 2) {
        fetch_blocks.template operator()<8>(fetcher, first, blocks);
      } else {
        sm90_store(m, storer, planners, cta);
      }
    }
  } else {
    fetch_blocks.template operator()<14>(first_fetchers, 0, first);  // waits for nothing
    planners.sync(m);
    ptx::registers_up<Tiling::consumer_registers>();
    ok = sm90_compute(m, computers, cta);
    if (!computers.sync(m, ok)) return let_settle(m);
    if (!rank_barrier(m, computers, arguments.buffers, shape.num_ranks, kCombineSignal, launch)) {
      return;
    }
    count_launch(m, computers, mine, launch);
    combine(m, computers, shape, mine, arguments.num_tokens, arguments.output);
  }
}

template <class Tiling, class Shape>
__device__ __forceinline__ void sm90_layer(const Sm90Arguments& arguments) {
  sm90_cta<Tiling, Shape>(arguments);
  if constexpr (Tiling::ctas > 1) ptx::cluster_sync();
}

}  // namespace megamoe
