// float32 arithmetic that gives the same bits in a kernel and on the host.
//
// The contract rounds each product and each sum, so nothing may be contracted to a fused
// multiply-add: device code goes through the intrinsics that a compiler leaves alone, host code is
// built with -ffp-contract=off.
#pragma once

#include "megamoe/common/types.hpp"
#if defined(__CUDA_ARCH__)
#include "megamoe/common/instructions.cuh"
#endif

namespace megamoe {

MEGAMOE_FN float mul_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

MEGAMOE_FN float add_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

MEGAMOE_FN float div_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

MEGAMOE_FN float fma_rn(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

// A NaN in `value` stays, so that it is seen in the result.
MEGAMOE_FN float at_most(float value, float limit) { return value > limit ? limit : value; }
MEGAMOE_FN float at_least(float value, float limit) { return value < limit ? limit : value; }

// a / b rounded once, for b from 1 to infinity. On a GPU without the branch that a division has for
// operands near the ends of the exponent: several of them can then be under way at once.
MEGAMOE_FN float div_by_at_least_1(float a, float b) {
#if defined(__CUDA_ARCH__)
  const float scale = b > 0x1p64f ? 0x1p-64f : 1.0f;  // else the reciprocal may be subnormal
  const float divisor = mul_rn(b, scale);
  float reciprocal = approximate_reciprocal(divisor);
  reciprocal = fma_rn(fma_rn(-divisor, reciprocal, 1.0f), reciprocal, reciprocal);
  float quotient = mul_rn(a, reciprocal);
  quotient = fma_rn(fma_rn(-divisor, quotient, a), reciprocal, quotient);
  quotient = fma_rn(fma_rn(-divisor, quotient, a), reciprocal, quotient);
  return as_bits(b) == 0x7F800000u ? mul_rn(a, 0.0f) : mul_rn(quotient, scale);
#else
  return a / b;
#endif
}

// e^x within a relative error of 2^-22 for x from -86; below, e^-86. From 89 on, infinity.
//
// Built from exactly rounded operations, unlike a device's ex2.approx or a host's expf, so that an
// emulated kernel and the compiled one agree in every bit. With n = round(x / ln 2) the rest
// r = x - n ln 2 is at most ln(2) / 2, where the seventh Taylor polynomial is good to 2^-27. ln 2
// is taken off in two parts, the first of 9 bits, so that n times it is exact.
MEGAMOE_FN float exp_above_minus_86(float x) {
  constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  x = at_least(at_most(x, 89.0f), -86.0f);
  const float shifted = fma_rn(x, 1.44269504f, kToInteger);
  const float n = add_rn(shifted, -kToInteger);
  const float r = fma_rn(n, 2.12194440e-4f, fma_rn(n, -0.693359375f, x));
  float p = 1.0f / 5040;
  p = fma_rn(p, r, 1.0f / 720);
  p = fma_rn(p, r, 1.0f / 120);
  p = fma_rn(p, r, 1.0f / 24);
  p = fma_rn(p, r, 1.0f / 6);
  p = fma_rn(p, r, 0.5f);
  p = fma_rn(p, r, 1.0f);
  p = fma_rn(p, r, 1.0f);
  // The low bits of `shifted` are n. 2^n has no exponent field for n = 128, so half of it.
  const uint32_t exponent = as_bits(shifted) - as_bits(kToInteger) + 126u;
  return mul_rn(mul_rn(p, as_float(exponent << 23)), 2.0f);
}

}  // namespace megamoe
