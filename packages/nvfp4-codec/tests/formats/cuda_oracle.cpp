// NVIDIA's own host conversions, from the headers in the PyPI wheels nvidia-cuda-runtime and
// nvidia-cuda-crt. Compiled by the tests with g++; no CUDA toolkit, driver or GPU.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include <cstdint>

extern "C" {

void encode_e2m1(const float* x, uint8_t* codes, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    codes[i] = __nv_cvt_float_to_fp4(x[i], __NV_E2M1, cudaRoundNearest);
}

void encode_e4m3_saturate(const float* x, uint8_t* codes, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    codes[i] = __nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, __NV_E4M3);
}

void encode_e4m3_nan(const float* x, uint8_t* codes, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    codes[i] = __nv_cvt_float_to_fp8(x[i], __NV_NOSAT, __NV_E4M3);
}

void encode_e8m0_floor(const float* x, uint8_t* codes, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    codes[i] = __nv_cvt_float_to_e8m0(x[i], __NV_SATFINITE, cudaRoundZero);
}

void encode_e8m0_ceil(const float* x, uint8_t* codes, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    codes[i] = __nv_cvt_float_to_e8m0(x[i], __NV_SATFINITE, cudaRoundPosInf);
}

void decode_e2m1(const uint8_t* codes, float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    x[i] = __half2float(__half(__nv_cvt_fp4_to_halfraw(codes[i], __NV_E2M1)));
}

void decode_e4m3(const uint8_t* codes, float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    x[i] = __half2float(__half(__nv_cvt_fp8_to_halfraw(codes[i], __NV_E4M3)));
}

void decode_e8m0(const uint8_t* codes, float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    x[i] = __bfloat162float(__nv_bfloat16(__nv_cvt_e8m0_to_bf16raw(codes[i])));
}

}  // extern "C"
