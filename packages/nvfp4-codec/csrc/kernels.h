// The contract between the operations and the instruction-set files: plain data and
// function pointers only. Nothing here may have inline code: every ISA file includes this
// header under its own compiler flags, and the linker would keep one arbitrary copy.
#pragma once
#include <cstdint>

namespace nvfp4 {

// Any alignment is legal for tensors, so 16- and 32-bit data is reached through these.
using u16_any = uint16_t __attribute__((aligned(1), may_alias));
using u32_any = uint32_t __attribute__((aligned(1), may_alias));
using f32_any = float __attribute__((aligned(1), may_alias));

enum Dtype : int { kBF16 = 0, kFP16 = 1, kFP32 = 2 };
constexpr int kNumDtypes = 3;

enum ScaleKind : int { kNVFP4, kMXFloor, kMXCeil, kMXRceil, kMXEven };

// How a block's amax becomes its scale byte.
struct ScaleRule {
  int kind;
  float divisor;       // kNVFP4: float32(6 * global scale); scale = amax / divisor
  float min_scale;     // kNVFP4: clamp to [min_scale, 448]
  uint8_t zero_byte;   // kNVFP4: byte of a block whose scale is zero (or underflows to it)
};

// E2M1 codes as integer thresholds: with u the magnitude bits of x in its own dtype, the
// code is the number of i in 1..7 with u >= row[i], and a negative x gets the sign bit if
// u >= row[0]. One row per scale byte; tables.cpp derives them from the float definition.
//
// If row[0] is the same in every row that a block may use, and 0 or 1, sign_if_above says so
// more simply: the sign bit is set for bit patterns above it (-1: look at the rows).
struct CodeTable {
  int64_t sign_if_above;
  alignas(64) uint16_t row16[256][8];  // bfloat16 and float16
  alignas(64) uint32_t row32[256][8];  // float32
};

struct QuantizeArgs {
  const uint8_t* x;
  uint8_t* codes;
  uint8_t* scales;
  int64_t num_blocks;
  const CodeTable* table;
  const ScaleRule* rule;
  bool stream;  // codes is 64-byte aligned and too large for the caches
};

// A rectangle of an FP8-block tensor: rows of one block row, whole column blocks.
struct Fp8Args {
  const uint8_t* weight;  // first element of the rectangle
  uint8_t* out;
  const f32_any* scales;  // one per column block
  int64_t num_rows, num_columns, row_stride;
  int64_t block_columns;
  int dtype;
  bool stream;
};

struct Fp8QuantizeArgs {
  const uint8_t* x;  // first element of one block
  uint8_t* weight;
  int64_t num_rows, num_columns, row_stride;
  int dtype;
};

struct Kernels {
  const char* name;
  bool byte_planes;  // 16-bit decode rows are 16 low bytes, then 16 high bytes
  // Largest magnitude bits, non-finite ones included.
  uint32_t (*max16)(const uint8_t* x, int64_t n);
  uint32_t (*max32)(const uint8_t* x, int64_t n);
  // Largest magnitude below `infinity`, and how many are not.
  uint32_t (*finite_max16)(const uint8_t* x, int64_t n, uint32_t infinity, int64_t* nonfinite);
  uint32_t (*finite_max32)(const uint8_t* x, int64_t n, uint32_t infinity, int64_t* nonfinite);
  // E2M1 blocks through a table with one row of 16 outputs per scale byte.
  void (*decode16)(const uint8_t* codes, const uint8_t* scales, const uint16_t* table,
                   uint8_t* out, int64_t num_blocks, int block, bool stream);
  void (*decode32)(const uint8_t* codes, const uint8_t* scales, const uint32_t* table,
                   uint8_t* out, int64_t num_blocks, int block, bool stream);
  void (*decode_fp8)(const Fp8Args& args);
  // [dtype][block is 32][input may be non-finite]
  void (*quantize[kNumDtypes][2][2])(const QuantizeArgs& args);
  // Amax of one FP8 block, then its codes.
  float (*fp8_amax)(const Fp8QuantizeArgs& args);
  void (*fp8_encode)(const Fp8QuantizeArgs& args, float scale);
  // Two E4M3 bytes per E8M0 byte; returns how many were not exact.
  int64_t (*convert_scales)(const uint8_t* codes, const uint8_t* scales, const uint8_t* bytes,
                            const uint8_t* exact, uint8_t* out, uint8_t* lossless, int64_t n);
  void (*copy)(uint8_t* out, const uint8_t* in, int64_t n, bool stream);
  // Memory limits for the benchmarks.
  uint64_t (*bench_read)(const uint8_t* in, int64_t n);
  void (*bench_write)(uint8_t* out, int64_t n);
};

const Kernels& scalar_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
#endif

}  // namespace nvfp4
