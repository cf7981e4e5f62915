// The whole layer on Hopper, W4A16: one persistent launch, one CTA on each multiprocessor.
//
// Warpgroup 0 brings things: warp 0 weights, warp 1 tokens to shared memory; warps 2 and 3 route,
// then fetch tokens into the ring. The others compute, then combine. Rounding points, gates and
// barriers are those of the neutral stages.
#pragma once

#include "megamoe/comm/device.cuh"
#include "megamoe/impl/shared_memory.hpp"
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

inline constexpr int kMostShared = 226 * 1024;  // of the 227 KiB that a CTA can have on Hopper

// Shared memory: the stages, a tile for the epilogues, sums to be added, words.
template <class Tiling, class Shape>
struct Sm90Shared {
  static constexpr int kPartials =
      (Tiling::split - 1) * Tiling::groups * Tiling::tiles * kTileRows * Shape::block_rows * 4;
  static constexpr int kTileAt = (Stages<Tiling, Shape>::kBytes + 127) / 128 * 128;
  static constexpr int kPartialsAt = kTileAt + shared_tile_bytes<Bf16>(Shape{});
  static constexpr int kWordsAt = kPartialsAt + kPartials;
  static constexpr int kBytes = kWordsAt + 4 * shared_words(Shape{});
};

// One task; all consumers.
template <class Tiling, Machine M, class Shape>
__device__ __forceinline__ bool sm90_task(M& m, const Group& computers, const Shape& shape,
                                          const Sm90Arguments& arguments, const Block& block,
                                          const Task& task, const Stages<Tiling, Shape>& stages,
                                          const StageCursor<Tiling::stages>& at, int steps,
                                          uint8_t* tile, float* partials) {
  const int thread = computers.thread(m);
  const Fields mine{arguments.buffers, m.rank_idx()};
  const bool is_shared = block.expert == shape.num_local_experts;
  const int expert = is_shared ? 0 : block.expert;
  Sm90Sums<Tiling, Shape::block_rows> sums;
  sums.warpgroup = static_cast<int>(m.shuffle(thread / kWarpgroup, 0));  // the compiler sees: uniform
  sums.thread = thread % kWarpgroup;
  bool ok = sums.accumulate(m, stages, at, steps);
  ok = sums.reduce(m, computers, partials, ok);
  if (!ok) return false;
  if (task.layer == Layer::kL1) {
    const float* alpha = (is_shared ? arguments.shared_w13 : arguments.w13).alpha + 2 * expert;
    l1_epilogue<Bf16>(m, computers, shape, mine, task, block,
                      {mul_rn(alpha[0], kDecodedScale), mul_rn(alpha[1], kDecodedScale), 0.0f,
                       arguments.limit},
                      sums, tile);
  } else {
    const float* alpha = (is_shared ? arguments.shared_w2 : arguments.w2).alpha + expert;
    l2_epilogue<Bf16>(m, computers, shape, arguments.buffers, task, block,
                      mul_rn(alpha[0], kDecodedScale), arguments.output, sums, tile);
  }
  return true;
}

template <class Tiling, Machine M, class Shape>
__device__ __forceinline__ bool sm90_compute(M& m, const Group& computers, const Shape& shape,
                                             const Sm90Arguments& arguments,
                                             const Pool<Shape>& pool,
                                             const Stages<Tiling, Shape>& stages, uint8_t* tile,
                                             float* partials) {
  TaskCursor<Shape> tasks(shape, pool.num_blocks(), m.cta_idx(), m.num_ctas());
  StageCursor<Tiling::stages> at;
  for (Task task; tasks.next(task);) {
    const Block block = pool.block(task.block);
    const int steps = task_steps(shape, task.layer);
    if (!sm90_task<Tiling>(m, computers, shape, arguments, block, task, stages, at, steps, tile,
                           partials)) {
      return false;
    }
    at.advance(steps);
  }
  return true;
}

template <class Tiling, class Shape>
__device__ __forceinline__ void sm90_layer(const Sm90Arguments& arguments) {
  static_assert(problem_error<Bf16>(Shape{}) == nullptr);
  static_assert(Shape::weight_rows == Tiling::weight_rows);
  using Shared = Sm90Shared<Tiling, Shape>;
  static_assert(Shared::kBytes <= kMostShared);
  extern __shared__ __align__(1024) uint8_t shared[];
  constexpr Shape shape{};
  constexpr int kConsumers = Tiling::warpgroups * kWarpgroup;
  Device m(arguments.buffers, arguments.rank_idx, arguments.wait_limit);
  const Fields mine{arguments.buffers, m.rank_idx()};
  const Stages<Tiling, Shape> stages(shared);
  uint32_t* words = reinterpret_cast<uint32_t*>(shared + Shared::kWordsAt);
  const Group fetchers{1, 2 * kWarpSize, 2 * kWarpSize};
  const Group computers{2, kWarpgroup, kConsumers};
  const Group everyone{3, 0, kWarpgroup + kConsumers};
  const uint32_t launch = launch_number(m, mine);

  if (threadIdx.x == 0) stages.init();
  bool ok = !m.given_up();
  if (ok && fetchers.has(m)) {
    ok = route(m, fetchers, shape, arguments.buffers, launch, arguments.num_tokens,
               words + Pool<Shape>::num_words(shape));
  }
  if (!everyone.sync(m, ok)) return;
  Pool<Shape> pool(shape, words);
  pool.build(m, everyone, mine, arguments.num_tokens);

  if (threadIdx.x < kWarpgroup) {
    if constexpr (Tiling::producer_registers > 0) {
      ptx::registers_down<Tiling::producer_registers>();
    }
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
    } else {
      fetch<Bf16, InPlaceOrder>(m, fetchers, shape, arguments.buffers, pool);
    }
  } else {
    if constexpr (Tiling::consumer_registers > 0) {
      ptx::registers_up<Tiling::consumer_registers>();
    }
    ok = sm90_compute(m, computers, shape, arguments, pool, stages, shared + Shared::kTileAt,
                      reinterpret_cast<float*>(shared + Shared::kPartialsAt));
    if (!computers.sync(m, ok)) return;
    if (!rank_barrier(m, computers, arguments.buffers, shape.num_ranks, kCombineSignal, launch)) {
      return;
    }
    count_launch(m, computers, mine, launch);
    combine(m, computers, shape, mine, arguments.num_tokens, arguments.output);
  }
}

}  // namespace megamoe
