// NVFP4 quantization by the rules of the contract: codec profile "ieee", every operation rounded
// to float32. Source: nvfp4_codec/scales.py, class Profile.
#pragma once

#include "megamoe/common/formats.hpp"

namespace megamoe {

// A token's amax to its scale; without any magnitude it is one.
MEGAMOE_FN float token_scale(float amax) {
  const float scale = div_rn(amax, kLargestE2M1 * kLargestUE4M3);
  return scale == 0.0f ? 1.0f : scale;
}

// The UE4M3 byte of a block: its amax over 6 times the global scale, from 2^-9 to 448.
MEGAMOE_FN uint32_t block_scale(float amax, float global_scale) {
  const float scale = div_rn(amax, mul_rn(kLargestE2M1, global_scale));
  return ue4m3_from_fp32(at_least(at_most(scale, kLargestUE4M3), kSmallestUE4M3));
}

// What a block's values are divided by.
MEGAMOE_FN float block_divisor(uint32_t scale_byte, float global_scale) {
  return mul_rn(fp32_from_ue4m3(scale_byte), global_scale);
}

// The code of a value. 0 / 0, which a divisor below float32's range makes, is 6 as in the codec.
MEGAMOE_FN uint32_t quantized(float value, float divisor) {
  const float quotient = div_rn(value, divisor);
  return quotient == quotient ? e2m1_from_fp32(quotient) : 7u;
}

}  // namespace megamoe
