// The scalar layer as a kernel: the neutral stages on a GPU, any from sm_70 on.
//
// Launch it with as many CTAs as are resident at once on all ranks' GPUs; CTAs wait for each other.
#pragma once

#include "megamoe/comm/device.cuh"
#include "megamoe/impl/scalar.hpp"

namespace megamoe {

struct ScalarArguments {
  RankBuffers buffers;
  ScalarLayer layer;
  int rank_idx;
  uint64_t wait_limit;  // nanoseconds
};

template <class Format, class Shape>
__device__ void scalar_layer(const ScalarArguments& arguments) {
  static_assert(problem_error<Format>(Shape{}) == nullptr);
  __shared__ uint32_t words[shared_words(Shape{})];
  __shared__ Chunk tile[shared_tile_bytes<Format>(Shape{}) / kChunkBytes];
  Device m(arguments.buffers, arguments.rank_idx, arguments.wait_limit);
  run_layer<Format>(m, Shape{}, arguments.buffers, arguments.layer, words,
                    reinterpret_cast<uint8_t*>(tile));
}

}  // namespace megamoe
