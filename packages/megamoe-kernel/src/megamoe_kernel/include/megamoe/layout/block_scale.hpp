// Where the block scales of tokens lie in the ring: the order in which tcgen05.cp reads them.
//
// A word holds the four UE4M3 scales of 64 consecutive values of a row, lowest k in the low byte:
// those of one MMA. A block of tokens has its words as [K / 64][scale_rows]; within 128 rows the
// word of row m is at (m % 32) * 4 + m / 32, so that one copy (32x128b.warpx4) of 512 bytes spreads
// a chunk over the lanes of tensor memory. Tokens in the caller's buffer have theirs in reading
// order, [M][K / 16] bytes: the same words, not permuted.
//
// Source: PTX ISA, "tcgen05: scale factor A layout"; tests hold it against nvfp4_codec's "utccp".
#pragma once

#include "megamoe/layout/problem.hpp"

namespace megamoe {

inline constexpr int kValuesPerScaleWord = 4 * kBlockSize;

MEGAMOE_FN constexpr int scale_row_position(int row) {
  return row / 128 * 128 + row % 32 * 4 + row % 128 / 32;
}

// Words of one block of tokens whose rows have `values` values.
template <class Shape>
MEGAMOE_FN constexpr int scale_words(const Shape& shape, int values) {
  return values / kValuesPerScaleWord * scale_rows(shape);
}

// The word of values 64 * word_idx to 64 * word_idx + 63 of a row, within its block's words.
template <class Shape>
MEGAMOE_FN constexpr int scale_word(const Shape& shape, int row, int word_idx) {
  return word_idx * scale_rows(shape) + scale_row_position(row);
}

}  // namespace megamoe
