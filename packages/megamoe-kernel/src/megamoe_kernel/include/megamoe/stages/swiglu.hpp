// From L1's sums to the intermediate: the rounding points L1_SCALE, SWIGLU and HIDDEN.
#pragma once

#include "megamoe/common/machine.hpp"
#include "megamoe/common/quantize.hpp"

namespace megamoe {

// gate / (1 + exp(-gate)) * up after the clamp. limit: infinity for no clamp.
MEGAMOE_FN float swiglu(float gate, float up, float limit) {
  gate = at_most(gate, limit);
  up = at_most(at_least(up, -limit), limit);
  const float sigmoid_divisor = add_rn(1.0f, exp_above_minus_86(-gate));
  return mul_rn(div_by_at_least_1(gate, sigmoid_divisor), up);
}

struct RequantizedPair {
  uint8_t codes;  // the even value's in the low half
  uint8_t scale;  // the block's
};

// Two neighbouring values of a block to NVFP4. The eight lanes with the same lane % 4 hold one
// block, lane / 4 its pair: what tcgen05.ld 16x256b and the accumulators of mma give a thread, rows
// being outputs and columns tokens. All lanes take part.
template <Machine M>
MEGAMOE_FN RequantizedPair requantize_pair(M& m, float even, float odd, float input_scale) {
  // Without their signs, floats are ordered like integers.
  const uint32_t a = as_bits(even) & 0x7FFFFFFFu, b = as_bits(odd) & 0x7FFFFFFFu;
  uint32_t amax = a > b ? a : b;
  for (int other = 4; other < kWarpSize; other *= 2) {
    const uint32_t theirs = m.shuffle(amax, lane_idx(m) ^ other);
    amax = theirs > amax ? theirs : amax;
  }
  const uint32_t scale = block_scale(as_float(amax), input_scale);
  const float divisor = block_divisor(scale, input_scale);
  const uint32_t codes = quantized(even, divisor) | quantized(odd, divisor) << 4;
  return {static_cast<uint8_t>(codes), static_cast<uint8_t>(scale)};
}

}  // namespace megamoe
