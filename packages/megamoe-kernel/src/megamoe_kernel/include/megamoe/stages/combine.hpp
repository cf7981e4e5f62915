// Combine: each rank sums its tokens' slots by their weights. Rounding points COMBINE and OUTPUT.
#pragma once

#include "megamoe/common/formats.hpp"
#include "megamoe/stages/route.hpp"

namespace megamoe {

// All warps of the group, in every CTA, after the combine barrier. output: BF16 [tokens, hidden],
// aligned to 16; with a shared expert it holds that expert's results and is added to. Slots are
// added in their order, so the result does not depend on who is fast.
template <Machine M, class Shape>
MEGAMOE_FN void combine(M& m, const Group& group, const Shape& shape, const Fields& mine,
                        int num_tokens, uint16_t* output) {
  constexpr int kValues = kChunkBytes / 2;  // of one lane
  constexpr int kTogether = 6;              // slots
  const int chunks = shape.hidden / kValues;
  const int thread = m.cta_idx() * group.num_threads + group.thread(m);
  const int num_threads = m.num_ctas() * group.num_threads;
  for (int64_t i = thread; i < int64_t{num_tokens} * chunks; i += num_threads) {
    const int token = static_cast<int>(i / chunks), chunk = static_cast<int>(i % chunks);
    Chunk* result = reinterpret_cast<Chunk*>(output) + i;
    float total[kValues] = {};
    if (shape.num_shared) {
      const Chunk shared = m.load(result);
      MEGAMOE_UNROLL
      for (int j = 0; j < kValues; ++j) {
        total[j] = fp32_from_bf16(static_cast<uint16_t>(shared.word[j / 2] >> j % 2 * 16));
      }
    }
    for (int first = 0; first < shape.num_topk; first += kTogether) {
      // All on their way before the first is used.
      bool is_there[kTogether];
      float weight[kTogether] = {};
      Chunk part[kTogether] = {};
      MEGAMOE_UNROLL
      for (int k = 0; k < kTogether; ++k) {
        const int slot = token * shape.num_topk + first + k;
        is_there[k] = first + k < shape.num_topk &&
                      expert_of_slot(m, shape, mine.topk_idx(), slot) >= 0;
      }
      MEGAMOE_UNROLL
      for (int k = 0; k < kTogether; ++k) {
        if (!is_there[k]) continue;
        const int slot = token * shape.num_topk + first + k;
        weight[k] = m.load(&mine.topk_weights()[slot]);
        part[k] =
            m.load(reinterpret_cast<const Chunk*>(mine.slots()) + int64_t{slot} * chunks + chunk);
      }
      MEGAMOE_UNROLL
      for (int k = 0; k < kTogether; ++k) {
        if (!is_there[k]) continue;
        MEGAMOE_UNROLL
        for (int j = 0; j < kValues; ++j) {
          const uint16_t value = static_cast<uint16_t>(part[k].word[j / 2] >> j % 2 * 16);
          total[j] = add_rn(total[j], mul_rn(weight[k], fp32_from_bf16(value)));
        }
      }
    }
    Chunk rounded;
    MEGAMOE_UNROLL
    for (int j = 0; j < kValues; j += 2) {
      rounded.word[j / 2] = bf16_from_fp32(total[j]) | uint32_t{bf16_from_fp32(total[j + 1])} << 16;
    }
    m.store(result, rounded);
  }
}

}  // namespace megamoe
