// Instructions of a GPU that the arithmetic of common/ uses where it is compiled for one.
#pragma once

#include "megamoe/common/types.hpp"

namespace megamoe {

// sm_80 and later. Rounds to the nearest, ties to even; NaN becomes 0x7FFF.
__device__ __forceinline__ uint16_t convert_to_bf16(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Within one unit in the last place; subnormal arguments and results are zero.
__device__ __forceinline__ float approximate_reciprocal(float value) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(value));
  return reciprocal;
}

}  // namespace megamoe
