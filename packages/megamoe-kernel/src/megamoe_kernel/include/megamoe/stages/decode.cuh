// NVFP4 weights in the order of layout_sm90.py to wgmma's operand A in BF16, exactly.
//
// A code's bits in a BF16's place are a number 2^-126 times the code's value, subnormals included.
// Its block scale comes as s * 2^119, so the product is value * s * 2^-7: two significant bits times
// four, hence exact, and far from both ends of BF16. kDecodedScale takes the 2^-7 back, in alpha.
#pragma once

#include "megamoe/common/types.hpp"

namespace megamoe {

inline constexpr float kDecodedScale = 128.0f;

__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// The UE4M3 scales of a thread's two rows, two bytes, times 2^119, each in both halves of a word. A
// byte's exponent and mantissa, four bits up, are those of the BF16 number s * 2^-120.
__device__ __forceinline__ void decode_scales(uint16_t scales, uint32_t (&rows)[2]) {
  constexpr uint32_t kTwoTo120 = 0x7B807B80u, kTwoTo119 = 0x7B007B00u;
  const uint32_t apart = __byte_perm(scales, 0, 0x4140) << 4;
  const uint32_t both = multiply_bf16x2(multiply_bf16x2(apart, kTwoTo120), kTwoTo119);
  rows[0] = __byte_perm(both, 0, 0x1010);
  rows[1] = __byte_perm(both, 0, 0x3232);
}

// A thread's codes of two steps of K, two words, to the four registers of each. scales: of its two
// rows, as decode_scales gives them.
__device__ __forceinline__ void decode_steps(uint32_t first, uint32_t second,
                                             const uint32_t (&scales)[2],
                                             uint32_t (&fragment)[2][4]) {
  constexpr uint32_t kCodes = 0x81C081C0u, kFirst = 0x06030603u;
  const uint32_t words[2] = {first, second};
  uint32_t z;  // kFirst of the first word; in one instruction, where ptxas takes two
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(z) : "r"(first), "r"(second << 2), "n"(kFirst));
  const uint32_t last[2] = {z << 6, __funnelshift_l(z, z, 12)};
  MEGAMOE_UNROLL
  for (int i = 0; i < 2; ++i) {
    const uint32_t w = words[i];
    fragment[i][0] = multiply_bf16x2(w & kCodes, scales[0]);
    fragment[i][1] = multiply_bf16x2(w << 4 & kCodes, scales[1]);
    fragment[i][2] = multiply_bf16x2(__funnelshift_l(w, w, 10) & kCodes, scales[0]);
    fragment[i][3] = multiply_bf16x2(last[i] & kCodes, scales[1]);
  }
}

}  // namespace megamoe
