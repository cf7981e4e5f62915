// The whole layer on Blackwell (sm_100a), W4A4: one persistent launch, one CTA on each
// multiprocessor.
//
// Of a CTA's warps three copy weights, copy tokens and begin products, one thread each; some route,
// then fetch tokens into the ring; the others are the epilogue, and combine at the end. Rounding
// points, gates and barriers are those of the neutral stages. With pairs, CTAs 2 i and 2 i + 1 are
// a cluster. The same text is the kernel (impl/sm100.cuh) and runs under the emulator.
#pragma once

#include "megamoe/impl/shared_memory.hpp"
#include "megamoe/stages/combine.hpp"
#include "megamoe/stages/fetch.hpp"
#include "megamoe/stages/sm100_mainloop.hpp"
#include "megamoe/stages/sm100_sums.hpp"

namespace megamoe {

// A CUtensorMap, which the driver or the emulator fills in.
struct alignas(64) TensorMap {
  uint8_t bytes[128];
};

struct Sm100Arguments {
  TensorMap token_map;        // of ring_x, and of ring_h: boxes of kTokenBoxRows rows
  TensorMap hidden_map;       // by kSwizzleBytes bytes
  TensorMap w13_map, w2_map;  // of the codes: boxes of kMmaRows rows
  TensorMap shared_w13_map, shared_w2_map;
  RankBuffers buffers;
  const uint32_t *w13_scales, *w2_scales, *shared_w13_scales, *shared_w2_scales;
  const float *w13_alpha, *w2_alpha, *shared_w13_alpha, *shared_w2_alpha;
  const float* input_scale;         // of the intermediate
  const float* shared_input_scale;  // the shared expert's
  float limit;                      // of SwiGLU; infinity: none
  int num_tokens;
  uint16_t* output;  // BF16 [num_tokens, hidden]
  int rank_idx;
  uint64_t wait_limit;  // nanoseconds
};

// Shared memory: the stages, a tile for the epilogues, words.
template <class Tiling, class Shape>
struct Sm100Shared {
  MEGAMOE_FN static constexpr int tile_at() { return Sm100Stages<Tiling>::kBytes; }
  MEGAMOE_FN static constexpr int words_at(const Shape& shape) {
    return tile_at() + shared_tile_bytes<Nvfp4>(shape);
  }
  MEGAMOE_FN static constexpr int bytes(const Shape& shape) {
    return shared_bytes<Nvfp4>(shape, tile_at());
  }
};

template <class Shape>
MEGAMOE_GPU_FN Sm100Operands sm100_operands(const Shape& shape, const Sm100Arguments& a,
                                            const Task& task, const Block& block) {
  const bool is_l1 = task.layer == Layer::kL1, is_shared = block.expert == shape.num_local_experts;
  const int expert = is_shared ? 0 : block.expert;
  if (is_l1) {
    return {is_shared ? Sm100Weights{&a.shared_w13_map, a.shared_w13_scales, a.shared_w13_alpha}
                      : Sm100Weights{&a.w13_map, a.w13_scales, a.w13_alpha},
            expert, 2 * shape.intermediate, shape.hidden};
  }
  return {is_shared ? Sm100Weights{&a.shared_w2_map, a.shared_w2_scales, a.shared_w2_alpha}
                    : Sm100Weights{&a.w2_map, a.w2_scales, a.w2_alpha},
          expert, shape.hidden, shape.intermediate};
}

// The epilogues of this CTA's tasks; all threads of `group`. False if a wait was given up.
template <class Tiling, Machine M, class Shape>
MEGAMOE_GPU_FN bool sm100_epilogues(M& m, const Group& group, const Shape& shape,
                                    const Sm100Arguments& arguments, const Pool<Shape>& pool,
                                    const Sm100Stages<Tiling>& stages, uint32_t tensor,
                                    uint8_t* tile) {
  const Fields mine{arguments.buffers, m.rank_idx()};
  const Gates<Nvfp4, Shape> gates(shape, mine);
  TaskCursor<Shape, Tiling::ctas> tasks(shape, pool.num_blocks(), m.cta_idx(), m.num_ctas());
  RingCursor<2> accumulator;
  for (Task task; tasks.next(task); accumulator.advance()) {
    // The tokens' scales and sources are read here, so their arrival is acquired here too: a commit
    // of the tensor cores is not known to hand on what its thread had acquired.
    bool ok = true;
    if (group.thread(m) == 0) {
      ok = wait_inputs(m, gates, task) &&
           wait_phase<1>(m, stages.sums_full(accumulator.at), accumulator.round);
    }
    if (!group.sync(m, ok)) return false;
    ptx::tensor_fence_after();

    const Block block = pool.block(task.block);
    const Sm100Operands of = sm100_operands(shape, arguments, task, block);
    const bool is_shared = block.expert == shape.num_local_experts;
    const float input_scale = *(is_shared ? arguments.shared_input_scale : arguments.input_scale);
    Sm100Sums<Tiling, M> sums{
        m, ptx::tensor_address(tensor, 0, accumulator.at * Tiling::accumulator_columns),
        stages.sums_free(accumulator.at), group.thread(m) / kWarpSize,
        multiplied_rows<Tiling>(block)};
    if (task.layer == Layer::kL1) {
      const float* alpha = of.weights.alpha + 2 * of.expert;
      l1_epilogue<Nvfp4>(m, group, shape, mine, task, block,
                         {alpha[0], alpha[1], input_scale, arguments.limit}, sums, tile);
    } else {
      l2_epilogue<Nvfp4>(m, group, shape, arguments.buffers, task, block,
                         mul_rn(input_scale, of.weights.alpha[of.expert]), arguments.output, sums,
                         tile);
    }
  }
  return true;
}

// What the warps before the epilogue's do, each its own. False if a wait was given up.
template <class Tiling, Machine M, class Shape>
MEGAMOE_GPU_FN bool sm100_bring(M& m, const Group& fetchers, const Shape& shape,
                                const Sm100Arguments& arguments, const Pool<Shape>& pool,
                                const Sm100Stages<Tiling>& stages, uint32_t tensor) {
  using Warps = Sm100Warps<Tiling>;
  if (fetchers.has(m)) {
    return fetch<Nvfp4>(m, fetchers, shape, arguments.buffers, pool, 0, pool.num_blocks());
  }
  if (!ptx::elect()) return true;
  const int warp = m.thread_idx() / kWarpSize;
  if (warp == Warps::weights) {
    return copy_weights(m, shape, pool, stages, [&](const Task& task, const Block& block) {
      return sm100_operands(shape, arguments, task, block);
    });
  }
  if (warp == Warps::tokens) {
    const void* const maps[2] = {&arguments.token_map, &arguments.hidden_map};
    return copy_tokens(m, shape, Fields{arguments.buffers, m.rank_idx()}, pool, stages, maps);
  }
  if (cta_of_group<Tiling>(m) != 0) return report_stages(m, shape, pool, stages);
  return multiply(m, shape, pool, stages, tensor);
}

// All threads of all CTAs of a rank. shared: aligned to 1024. Where a wait was given up, the field
// "failure" tells and the output is unspecified; the buffer has to be cleared before it is used
// again.
template <class Tiling, Machine M, class Shape>
MEGAMOE_GPU_FN void sm100_run(M& m, const Shape& shape, const Sm100Arguments& arguments,
                              uint8_t* shared) {
  using Warps = Sm100Warps<Tiling>;
  using Shared = Sm100Shared<Tiling, Shape>;
  const Fields mine{arguments.buffers, m.rank_idx()};
  const Sm100Stages<Tiling> stages{shared};
  uint8_t* tile = shared + Shared::tile_at();
  uint32_t* words = reinterpret_cast<uint32_t*>(shared + Shared::words_at(shape));
  const Group fetchers{1, Warps::fetch * kWarpSize, Tiling::fetch_warps * kWarpSize};
  const Group epilogue{2, Warps::epilogue * kWarpSize, Tiling::epilogue_groups * 4 * kWarpSize};
  const Group everyone{3, 0, Warps::threads};
  const bool allocates = m.thread_idx() / kWarpSize == Warps::epilogue;
  const uint32_t launch = launch_number(m, mine);

  if (m.thread_idx() == 0) stages.init(cta_of_group<Tiling>(m) == 0);
  if (allocates) stages.allocate();
  if constexpr (Tiling::ctas == 2) ptx::pair_sync();  // before one arrives at the other's barriers
  bool ok = !m.given_up();
  if (ok && fetchers.has(m)) {
    ok = route(m, fetchers, shape, arguments.buffers, launch, arguments.num_tokens,
               words + Pool<Shape>::num_words(shape));
  }
  ok = everyone.sync(m, ok);
  ptx::tensor_fence_after();
  const uint32_t tensor = stages.tensor_base();
  if (ok) {
    Pool<Shape> pool(shape, words);
    pool.build(m, everyone, mine, arguments.num_tokens);
    if (epilogue.has(m)) {
      if constexpr (Tiling::epilogue_registers > 0) {
        ptx::registers_up<Tiling::epilogue_registers>();
      }
      ok = sm100_epilogues(m, epilogue, shape, arguments, pool, stages, tensor, tile);
    } else {
      if constexpr (Tiling::other_registers > 0) {
        ptx::registers_down<Tiling::other_registers>();
      }
      ok = sm100_bring(m, fetchers, shape, arguments, pool, stages, tensor);
    }
    // After this nobody uses tensor memory.
    ok = everyone.sync(m, ok);
  }
  if constexpr (Tiling::ctas == 2) ptx::pair_sync();  // nor do products of the other CTA
  if (allocates) {
    if (!ok) let_settle(m);
    ptx::tensor_fence_after();
    ptx::tensor_free<Tiling::ctas>(tensor, Tiling::columns);
  }
  if (!ok || !epilogue.has(m)) return;
  if (!rank_barrier(m, epilogue, arguments.buffers, shape.num_ranks, kCombineSignal, launch)) {
    return;
  }
  count_launch(m, epilogue, mine, launch);
  combine(m, epilogue, shape, mine, arguments.num_tokens, arguments.output);
}

}  // namespace megamoe
