// The codec's operations on raw memory: tables, chunks and threads around the kernels.
//
// Tensors are dense and row-major, at any address; sizes are in elements. Nothing is checked
// here (native.py does). Every function may be called from several threads at once.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace nvfp4 {

struct Amax {
  float value;        // largest finite magnitude, 0 if there is none
  int64_t nonfinite;  // how many NaN and Inf
};

Amax amax(const Kernels& isa, int threads, const uint8_t* x, int dtype, int64_t n);

struct NVFP4Rules {
  float global_scale;
  float zero_block_scale, min_scale;
  bool keep_negative_zero;
};

void quantize_nvfp4(const Kernels& isa, int threads, const uint8_t* x, int dtype, int64_t n,
                    const NVFP4Rules& rules, bool saturate, uint8_t* codes, uint8_t* scales);

void dequantize_nvfp4(const Kernels& isa, int threads, const uint8_t* codes,
                      const uint8_t* scales, float global_scale, bool divide, uint8_t* out,
                      int dtype, int64_t n);

// mode: one of ScaleKind's kMX...
void quantize_mxfp4(const Kernels& isa, int threads, const uint8_t* x, int dtype, int64_t n,
                    int mode, bool saturate, uint8_t* codes, uint8_t* scales);

void dequantize_mxfp4(const Kernels& isa, int threads, const uint8_t* codes,
                      const uint8_t* scales, uint8_t* out, int dtype, int64_t n);

// scales: float32, or E8M0 bytes with ue8m0. Non-finite input is always treated as with
// saturate, which costs nothing here.
void quantize_fp8_block(const Kernels& isa, int threads, const uint8_t* x, int dtype,
                        int64_t rows, int64_t columns, int64_t block_rows, int64_t block_columns,
                        bool ue8m0, uint8_t* weight, uint8_t* scales);

void dequantize_fp8_block(const Kernels& isa, int threads, const uint8_t* weight,
                          const uint8_t* scales, uint8_t* out, int dtype, int64_t rows,
                          int64_t columns, int64_t block_rows, int64_t block_columns);

// weight_scale = 2^(e8m0 byte - shift), clamped to E4M3's powers of two 2^-9..2^8; returns
// how many blocks of 32 that clamping changed. codes_out may be codes itself.
int64_t mxfp4_to_nvfp4(const Kernels& isa, int threads, const uint8_t* codes,
                       const uint8_t* scales, int shift, int64_t n, uint8_t* codes_out,
                       uint8_t* scales_out, uint8_t* lossless);

// Memory limits for the benchmarks: read n bytes (returns a checksum), write n bytes past the
// caches (out 64-byte aligned).
uint64_t bench_read(const Kernels& isa, int threads, const uint8_t* in, int64_t n);
void bench_write(const Kernels& isa, int threads, uint8_t* out, int64_t n);

}  // namespace nvfp4
