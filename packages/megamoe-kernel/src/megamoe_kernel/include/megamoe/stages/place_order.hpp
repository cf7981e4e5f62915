// Tokens in the order of columns that layout_sm90.py wants: in every 64, column 16 t + 4 j + 2 h + e
// at place 16 j + 8 h + 2 t + e. In words of two BF16 that is a 4 x 8 matrix transposed.
#pragma once

#include "megamoe/common/machine.hpp"

namespace megamoe {

// For fetch; see InOrder.
struct InPlaceOrder {
  template <Machine M>
  MEGAMOE_FN static void store(M& m, uint8_t* row, int idx, const Chunk& chunk) {
    const int group = idx / 8, t = idx % 8 / 2, j_and_h = idx % 2 * 4;
    uint32_t* words = reinterpret_cast<uint32_t*>(row) + group * 32 + t;
    MEGAMOE_UNROLL
    for (int i = 0; i < 4; ++i) m.store(&words[(j_and_h + i) * 4], chunk.word[i]);
  }
};

}  // namespace megamoe
