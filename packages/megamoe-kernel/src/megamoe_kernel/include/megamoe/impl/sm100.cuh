// The layer for sm_100a as a kernel: impl/sm100.hpp with the instructions as PTX.
//
// Launch it cooperatively, one CTA on each multiprocessor.
#pragma once

#include "megamoe/comm/device.cuh"
#include "megamoe/impl/sm100.hpp"
#include "megamoe/ptx/sm100.cuh"

namespace megamoe {

template <class Tiling, class Shape>
__device__ __forceinline__ void sm100_layer(const Sm100Arguments& arguments) {
  static_assert(problem_error<Nvfp4>(Shape{}) == nullptr);
  static_assert(Shape::block_rows == Tiling::block_rows);
  static_assert(Shape::weight_rows == Tiling::weight_rows);
  static_assert(Sm100Shared<Tiling, Shape>::bytes(Shape{}) <= kMostShared);
  static_assert(shares_out(Shape{}, Tiling::ctas));
  // What some warps give up is what the others wait for, without a limit. Here every kernel has half
  // of its 512 threads on each side.
  static_assert(Sm100Warps<Tiling>::threads == 512 && Sm100Warps<Tiling>::epilogue == 8);
  static_assert(256 * (Tiling::other_registers + Tiling::epilogue_registers) <= 65536);
  extern __shared__ __align__(1024) uint8_t shared[];
  Device m(arguments.buffers, arguments.rank_idx, arguments.wait_limit);
  sm100_run<Tiling>(m, Shape{}, arguments, shared);
}

}  // namespace megamoe
