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

// Four UE4M3 scales, times 2^119, each in both halves of a word. A byte's exponent and mantissa,
// four bits up, are those of the BF16 number s * 2^-120.
__device__ __forceinline__ void decode_scales(uint32_t scales, uint32_t (&twice)[4]) {
  constexpr uint32_t kByte = 0x0FF00FF0u, kTwoTo120 = 0x7B807B80u, kTwoTo119 = 0x7B007B00u;
  const uint32_t even = multiply_bf16x2(multiply_bf16x2(scales << 4 & kByte, kTwoTo120), kTwoTo119);
  const uint32_t odd = multiply_bf16x2(multiply_bf16x2(scales >> 4 & kByte, kTwoTo120), kTwoTo119);
  twice[0] = __byte_perm(even, 0, 0x1010);
  twice[1] = __byte_perm(odd, 0, 0x1010);
  twice[2] = __byte_perm(even, 0, 0x3232);
  twice[3] = __byte_perm(odd, 0, 0x3232);
}

// A thread's eight codes of one step of K to its four registers; low and high are the scales of its
// two rows, as decode_scales gives them.
__device__ __forceinline__ void decode_step(uint32_t codes, uint32_t low, uint32_t high,
                                            uint32_t (&fragment)[4]) {
  constexpr uint32_t kMagnitude = 0x01C001C0u, kSign = 0x80008000u, kBoth = kMagnitude | kSign;
  fragment[0] = multiply_bf16x2((codes << 6 & kMagnitude) | (codes << 2 & kSign), low);
  fragment[1] = multiply_bf16x2(codes << 3 & kBoth, high);
  fragment[2] = multiply_bf16x2(codes & kBoth, low);
  fragment[3] = multiply_bf16x2((codes >> 3 & kMagnitude) | (codes << 1 & kSign), high);
}

}  // namespace megamoe
