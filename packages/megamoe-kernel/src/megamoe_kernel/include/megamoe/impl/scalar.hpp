// The whole layer from the neutral stages, with the scalar mainloop: how the parts fit together.
//
// One launch: every CTA runs layer() in all its threads. The first warps route, then fetch; the
// others compute. It runs on the host and on any GPU; it is for checking, not for speed.
#pragma once

#include "megamoe/impl/shared_memory.hpp"
#include "megamoe/stages/combine.hpp"
#include "megamoe/stages/fetch.hpp"
#include "megamoe/stages/scalar_mainloop.hpp"

namespace megamoe {

struct ScalarLayer {
  ScalarWeights w13;
  ScalarWeights w2;
  float input_scale;         // of the intermediate; NVFP4 only
  float shared_input_scale;  // the shared expert's
  float limit;               // of SwiGLU; infinity: none
  int num_tokens;
  uint16_t* output;  // BF16 [num_tokens, hidden]
};

// A CTA's threads: these first, then the others.
inline constexpr int kDispatchThreads = 32;
inline constexpr int kComputeThreads = 64;
inline constexpr int kThreads = kDispatchThreads + kComputeThreads;

// The tasks of this CTA; all compute threads. False if a wait was given up.
template <class Format, Machine M, class Shape>
MEGAMOE_FN bool compute(M& m, const Group& group, const Shape& shape, const RankBuffers& buffers,
                        const Pool<Shape>& pool, const ScalarLayer& layer, uint8_t* tile) {
  const Fields mine{buffers, m.rank_idx()};
  const Gates<Format, Shape> gates(shape, mine);
  TaskCursor<Shape> tasks(shape, pool.num_blocks(), m.cta_idx(), m.num_ctas());
  for (Task task; tasks.next(task);) {
    const bool is_l1 = task.layer == Layer::kL1;
    bool ok = true;
    if (group.thread(m) == 0) {
      ok = is_l1 ? gates.wait_tokens(m, task.block) : gates.wait_intermediate(m, task.block);
    }
    if (!group.sync(m, ok)) return false;

    const Block block = pool.block(task.block);
    const int slot = gates.slot(task.block).idx;
    const int64_t first_row = int64_t{slot} * shape.block_rows;
    const bool is_shared = block.expert == shape.num_local_experts;
    const float input_scale = is_shared ? layer.shared_input_scale : layer.input_scale;
    const int columns = is_l1 ? shape.hidden : shape.intermediate;
    const uint8_t* values = is_l1 ? mine.ring_x() : mine.ring_h();
    const uint32_t* scales = is_l1 ? mine.ring_x_sf() : mine.ring_h_sf();
    const RingRows rows{values + first_row * Format::bytes(columns),
                        scales + int64_t{slot} * scale_words(shape, columns), columns};
    const ScalarWeights& weights = is_l1 ? layer.w13 : layer.w2;
    ScalarSums<Format, M, Shape> sums{m, group, shape, weights, rows, task, block};
    if (is_l1) {
      const float* alpha = weights.alpha + 2 * block.expert;
      l1_epilogue<Format>(m, group, shape, mine, task, block,
                          {alpha[0], alpha[1], input_scale, layer.limit}, sums, tile);
    } else {
      float factor = weights.alpha[block.expert];
      if constexpr (Format::kHasScales) factor = mul_rn(input_scale, factor);
      l2_epilogue<Format>(m, group, shape, buffers, task, block, factor, layer.output, sums, tile);
    }
  }
  return true;
}

// All threads of all CTAs of a rank. Where a wait was given up, the field "failure" tells and the
// output is unspecified; the buffer has to be cleared before it is used again.
template <class Format, Machine M, class Shape>
MEGAMOE_FN void run_layer(M& m, const Shape& shape, const RankBuffers& buffers,
                          const ScalarLayer& layer, uint32_t* words, uint8_t* tile) {
  const Fields mine{buffers, m.rank_idx()};
  const Group dispatchers{1, 0, kDispatchThreads};
  const Group computers{2, kDispatchThreads, kComputeThreads};
  const Group everyone{3, 0, kThreads};
  const uint32_t launch = launch_number(m, mine);

  // A rank that once failed does not take part again.
  bool ok = !m.given_up();
  if (ok && dispatchers.has(m)) {
    uint32_t* after_pool = words + Pool<Shape>::num_words(shape);
    ok = route(m, dispatchers, shape, buffers, launch, layer.num_tokens, after_pool);
  }
  if (!everyone.sync(m, ok)) return;

  Pool<Shape> pool(shape, words);
  pool.build(m, everyone, mine, layer.num_tokens);
  const int blocks = pool.num_blocks();
  ok = dispatchers.has(m) ? fetch<Format>(m, dispatchers, shape, buffers, pool, 0, blocks)
                          : compute<Format>(m, computers, shape, buffers, pool, layer, tile);
  if (!everyone.sync(m, ok)) return;

  if (!rank_barrier(m, everyone, buffers, shape.num_ranks, kCombineSignal, launch)) return;
  count_launch(m, everyone, mine, launch);
  combine(m, everyone, shape, mine, layer.num_tokens, layer.output);
}

}  // namespace megamoe
