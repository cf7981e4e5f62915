// The whole layer on Hopper, W4A16: one persistent launch, one CTA on each multiprocessor, alone or in
// clusters of two that bring each other's tokens.
//
// Warpgroup 0 brings and takes away: warp 0 weights, warp 1 tokens to shared memory, warp 2 tokens
// into the ring; warp 3 plans tasks and stores results from the epilogues' tile. The others compute,
// then combine. At the start all warps but the two copiers bring the first blocks' tokens. Rounding
// points, gates and barriers are those of the neutral stages.
#pragma once

#include "megamoe/comm/device.cuh"
#include "megamoe/impl/sm90_shared.hpp"
#include "megamoe/stages/combine.hpp"
#include "megamoe/stages/fetch.hpp"
#include "megamoe/stages/place_order.hpp"
#include "megamoe/stages/sm90_mainloop.cuh"
#include "megamoe/stages/sm90_plan.cuh"

namespace megamoe {

struct Sm90Arguments {
  alignas(64) uint8_t token_map[128];  // CUtensorMap of ring_x, boxes of box_rows x kBoxColumns
  uint8_t hidden_map[128];             // of ring_h
  RankBuffers buffers;
  Sm90LayerWeights weights;
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
  const Stages<Tiling, Shape>& stages;
  const TileHandoff& handoff;
  const Plan& plan;
  uint8_t* tile;
  float* partials;
};

// Consumers: sums of one task to the tile, in L2 perhaps in two pieces. tiles: how many this CTA has
// handed over. False if a wait was given up.
template <int kLeast, int kMost, class Tiling, Machine M, class Shape>
__device__ __forceinline__ bool sm90_task(M& m, const Group& computers,
                                          const Sm90Cta<Tiling, Shape>& cta,
                                          const PlannedTask& planned,
                                          const StageCursor<Tiling::stages>& at, int steps,
                                          uint32_t& tiles) {
  const int thread = computers.thread(m);
  Sm90Sums<Tiling, kLeast, kMost> sums;
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

// Consumers: all tasks. Afterwards all their results are stored. They need not wait for a task's
// plan: the first ones are there, and who begins a task has seen the tile of the task before the last
// one free, when the storing warp had planned this one. (With a wait here ptxas no longer sees that
// stages are uniform, and wgmma's descriptors cost twice as much.)
template <class Tiling, Machine M, class Shape>
__device__ __forceinline__ bool sm90_compute(M& m, const Group& computers,
                                             const Sm90Cta<Tiling, Shape>& cta) {
  StageCursor<Tiling::stages> at;
  uint32_t tiles = 0;
  for (uint32_t count = 0;; ++count) {
    const PlannedTask planned = cta.plan.get(count);
    if (planned.block.rows == 0) return cta.handoff.wait_free(m, tiles);
    const int steps = task_steps<Tiling>(cta.shape, planned.task.layer);
    bool ok;
    constexpr int kLeast = Tiling::least, kMost = Shape::block_rows;
    constexpr int kShort = short_rows<Tiling>(kLeast, kMost);
    if constexpr (kShort == 0) {
      ok = sm90_task<kLeast, kMost>(m, computers, cta, planned, at, steps, tiles);
    } else if (static_cast<int>(m.shuffle(planned.block.rows, 0)) <= kShort) {
      ok = sm90_task<kLeast, kShort>(m, computers, cta, planned, at, steps, tiles);
    } else {
      ok = sm90_task<kShort + 8, kMost>(m, computers, cta, planned, at, steps, tiles);
    }
    if (!ok) return false;
    at.advance(steps);
  }
}

// One warp: what consumers leave in the tile goes to the ring or home. planner: has planned the first
// task.
template <class Tiling, Machine M, class Shape>
__device__ __forceinline__ void sm90_store(M& m, const Group& storer, const Group& readers,
                                           const Sm90Cta<Tiling, Shape>& cta,
                                           Planner<Tiling, M, Shape> planner) {
  for (int i = 1; i < kPlanned - 1; ++i) planner.plan_next();  // by turns: waits for nothing
  readers.sync(m);
  uint32_t tiles = 0;
  for (uint32_t count = 0;; ++count) {
    if (!planner.plan_next() || m.ballot(cta.plan.wait(m, count)) != kAllLanes) return;
    const PlannedTask planned = cta.plan.get(count);
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

// Of a cluster, no CTA may be gone while the other one copies or sends numbers to it, or arrives at its
// barriers: they meet once in here and once after it, whatever fails.
template <class Tiling, class Shape>
__device__ __forceinline__ void sm90_cta(const Sm90Arguments& arguments) {
  static_assert(problem_error<Bf16>(Shape{}) == nullptr);
  static_assert(Shape::weight_rows == Tiling::weight_rows);
  static_assert(shares_out(Shape{}, Tiling::ctas));
  static_assert(Shape::hidden % Tiling::columns == 0 && Shape::intermediate % Tiling::columns == 0);
  constexpr Sm90Shared kAt = sm90_shared(Shape{}, Tiling::split, Tiling::depth, Tiling::stages);
  static_assert(kAt.bytes <= kMostShared && kAt.tile_at % 128 == 0);
  static_assert(Stages<Tiling, Shape>::kBarriersAt + 16 * Tiling::stages <= kAt.tile_at);
  static_assert(kAt.handoff_at + 2 * 8 <= kAt.plan_at && kAt.plan_at % 8 == 0);
  // Only a group's first warpgroup fills a tile; another one could miss that a second one was full.
  static_assert(Tiling::split == 1 || sm90_tile_tokens(Shape{}) == Shape::block_rows);
  static_assert(sm90_tile_tokens(Shape{}) % 8 == 0);
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
  const Plan plan(shared + kAt.plan_at);

  if (threadIdx.x == 0) {
    stages.init();
    handoff.init(Tiling::groups * kWarpgroup / kWarpSize);
    plan.init();
  }
  bool ok = !m.given_up();
  if (ok && dispatchers.has(m)) {
    // Nobody draws until the dispatch barrier.
    if (m.cta_idx() == 0 && dispatchers.thread(m) == 0) m.store(&mine.counters()[kDrawnWord], 0u);
    ok = route(m, dispatchers, shape, arguments.buffers, launch, arguments.num_tokens,
               words + Pool<Shape>::num_words(shape));
  }
  ok = everyone.sync(m, ok);
  if constexpr (Tiling::ctas > 1) ptx::cluster_sync();
  if (!ok) return;
  Pool<Shape> pool(shape, words);
  pool.build(m, everyone, mine, arguments.num_tokens);
  const Sm90Cta<Tiling, Shape> cta{
      shape, arguments, mine, stages, handoff, plan, shared + kAt.tile_at,
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
      copy_weights(m, shape, plan, stages);
    } else if (warp == 1) {
      const void* const maps[2] = {arguments.token_map, arguments.hidden_map};
      copy_tokens(m, shape, mine, plan, stages, maps);
    } else if (warp == 2) {
      if (fetch_blocks.template operator()<8>(first_fetchers, 0, first)) {
        fetch_blocks.template operator()<8>(fetcher, first, blocks);
      }
    } else {
      const auto planner = [&](uint32_t count) {
        return Planner<Tiling, Device, Shape>(m, shape, mine, pool, plan, arguments.weights, count);
      };
      // The first task before tokens are fetched, so that its weights are copied meanwhile.
      if (planner(0).plan_next() && fetch_blocks.template operator()<8>(first_fetchers, 0, first)) {
        sm90_store(m, storer, planners, cta, planner(1));
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
