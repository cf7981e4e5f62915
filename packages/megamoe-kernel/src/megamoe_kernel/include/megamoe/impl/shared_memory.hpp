// What every layer's CTA has in shared memory, besides its mainloop's.
#pragma once

#include "megamoe/stages/l2_epilogue.hpp"
#include "megamoe/stages/route.hpp"

namespace megamoe {

inline constexpr int kMostShared = 226 * 1024;  // of the 227 KiB that a CTA can have

// Words for routing and the pool; bytes for the epilogues' tile (aligned to 16).
template <class Shape>
MEGAMOE_FN constexpr int shared_words(const Shape& shape) {
  const int words = Pool<Shape>::num_words(shape) + route_words(shape);
  return ceil_div(words, 4) * 4;
}
// l2_tokens: as many of a block as L2's results are stored at a time.
template <class Format, class Shape>
MEGAMOE_FN constexpr int shared_tile_bytes(const Shape& shape, int l2_tokens) {
  const int l1 = l1_tile_bytes<Format>(shape), l2 = l2_tile_bytes(shape, l2_tokens);
  return l1 > l2 ? l1 : l2;
}
template <class Format, class Shape>
MEGAMOE_FN constexpr int shared_tile_bytes(const Shape& shape) {
  return shared_tile_bytes<Format>(shape, shape.block_rows);
}

// All of it, behind a mainloop's part.
template <class Format, class Shape>
MEGAMOE_FN constexpr int shared_bytes(const Shape& shape, int mainloop_bytes) {
  return mainloop_bytes + shared_tile_bytes<Format>(shape) + 4 * shared_words(shape);
}

}  // namespace megamoe
