// What every header needs: integer types, the function annotation, 16 bytes at once.
#pragma once

#include <cstdint>

// Functions of the neutral code run in kernels and, compiled by any C++20 compiler, on the host.
#if defined(__CUDACC__)
#define MEGAMOE_FN __host__ __device__ __forceinline__
#define MEGAMOE_UNROLL _Pragma("unroll")  // where an array has to stay in registers
#else
#define MEGAMOE_FN inline
#define MEGAMOE_UNROLL
#endif

namespace megamoe {

inline constexpr int kWarpSize = 32;
inline constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
inline constexpr int kBlockSize = 16;  // values that share a block scale

// The most that one thread moves with one instruction.
struct alignas(16) Chunk {
  uint32_t word[4];
};
inline constexpr int kChunkBytes = sizeof(Chunk);

MEGAMOE_FN uint32_t as_bits(float value) { return __builtin_bit_cast(uint32_t, value); }
MEGAMOE_FN float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }

template <class T>
MEGAMOE_FN constexpr T ceil_div(T value, T divisor) {
  return (value + divisor - 1) / divisor;
}

}  // namespace megamoe
