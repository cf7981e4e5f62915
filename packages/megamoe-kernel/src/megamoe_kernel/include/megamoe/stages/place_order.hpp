// Tokens in the order of columns that layout_sm90.py wants: in every 64, column 16 t + 4 j + 2 h + e
// at place 16 j + 8 h + 2 t + e. In words of two BF16 that is a 4 x 8 matrix transposed.
#pragma once

#include "megamoe/common/machine.hpp"

namespace megamoe {

// For fetch; see InOrder. Eight lanes hold 64 columns: lane 2 t + j / 2 four words, of two j with
// h = 0, 1. It exchanges them with the lanes of the other t, and stores what has its own t as number
// of the word: four t of one j and h.
struct InPlaceOrder {
  template <Machine M>
  MEGAMOE_FN static void store(M& m, uint8_t* row, int idx, const Chunk& chunk, bool is_there) {
    const int lane = lane_idx(m), t = lane % 8 / 2;
    Chunk held = chunk;
    // A transposed 4 x 4 matrix: words whose number differs from t in a bit change places.
    MEGAMOE_UNROLL
    for (int bit = 1; bit < 4; bit *= 2) {
      Chunk next;
      MEGAMOE_UNROLL
      for (int i = 0; i < 4; ++i) {
        // Of i and i ^ bit one stays and the other goes; lanes send in the same step what is asked.
        const bool stays = (i & bit) == (t & bit);
        const uint32_t theirs = m.shuffle(held.word[i ^ bit], lane ^ 2 * bit);
        next.word[i] = stays ? held.word[i] : theirs;
      }
      held = next;
    }
    const int place = idx % 2 * 4 + t;
    if (is_there) m.store(reinterpret_cast<Chunk*>(row) + (idx / 8 * 8 + place), held);
  }
};

}  // namespace megamoe
