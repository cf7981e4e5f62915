// E2M1, UE4M3 and BF16 by float and integer operations alone: the same bits everywhere.
//
// Rounding is to nearest, ties to even. Sources: OCP Microscaling Formats (MX) v1.0 for E2M1; OCP
// 8-bit Floating Point Specification v1.0 for E4M3, of which UE4M3 is the half without a sign.
// Where an architecture converts in one instruction, ptx/ may do so: the bits have to be these.
#pragma once

#include "megamoe/common/math.hpp"
#include "megamoe/common/types.hpp"

namespace megamoe {

inline constexpr float kLargestE2M1 = 6.0f;
inline constexpr float kLargestUE4M3 = 448.0f;
inline constexpr float kSmallestUE4M3 = 0x1p-9f;  // above zero

// code: 0 to 15; 8 is -0.
MEGAMOE_FN float fp32_from_e2m1(uint32_t code) {
  const uint32_t magnitude = code & 7u;
  // Two exponent bits and one of the mantissa; below 1.0 there is 0.5 alone.
  const uint32_t normal = (magnitude << 22) + (126u << 23);
  const uint32_t bits = magnitude < 2 ? magnitude * as_bits(0.5f) : normal;
  return as_float(bits | (code & 8u) << 28);
}

// Beyond 6 saturates. The sign stays, of a zero too. A NaN has an unspecified code.
MEGAMOE_FN uint32_t e2m1_from_fp32(float value) {
  const float x = as_float(as_bits(value) & 0x7FFFFFFFu);
  // One more for each threshold that is passed; a tie goes to the even code.
  const uint32_t magnitude = (x > 0.25f) + (x >= 0.75f) + (x > 1.25f) + (x >= 1.75f) +
                             (x > 2.5f) + (x >= 3.5f) + (x > 5.0f);
  return magnitude | (as_bits(value) >> 31) << 3;
}

// byte: 0 (0.0) to 0x7E (448); 0x7F, NaN, is not looked for.
MEGAMOE_FN float fp32_from_ue4m3(uint32_t byte) {
  const float subnormal = mul_rn(static_cast<float>(byte), kSmallestUE4M3);
  return byte < 8 ? subnormal : as_float((byte << 20) + (120u << 23));
}

// value: 0 to 448.
MEGAMOE_FN uint32_t ue4m3_from_fp32(float value) {
  const uint32_t bits = as_bits(value);
  const uint32_t normal = ((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
  // The last place of a float next to 2^14 is 2^-9, so adding 2^14 rounds to whole steps.
  const uint32_t subnormal = as_bits(add_rn(value, 0x1p14f)) - as_bits(0x1p14f);
  return value < 0x1p-6f ? subnormal : normal;
}

MEGAMOE_FN float fp32_from_bf16(uint16_t bits) { return as_float(uint32_t{bits} << 16); }

// Every NaN becomes the quiet one without payload.
MEGAMOE_FN uint16_t bf16_from_fp32(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const uint16_t rounded = convert_to_bf16(value);
#else
  const uint32_t bits = as_bits(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
#endif
  return static_cast<uint16_t>(value != value ? 0x7FC0u : rounded);
}

}  // namespace megamoe
