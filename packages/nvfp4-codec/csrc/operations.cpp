#include "operations.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "pool.h"
#include "tables.h"

namespace nvfp4 {
namespace {

constexpr int64_t kChunk = 1 << 16;           // elements handed to a thread at a time
constexpr int64_t kStreamBytes = 8 << 20;     // outputs above this bypass the caches
constexpr int64_t kStripRows = 128;           // FP8 rows handed to a thread at a time:
constexpr int64_t kLeastStripRows = 16;       // at most, and where threads would idle

int64_t item_size(int dtype) { return dtype == kFP32 ? 4 : 2; }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool streams(const uint8_t* out, int64_t bytes) {
  return bytes > kStreamBytes && reinterpret_cast<uintptr_t>(out) % 64 == 0;
}

// body(begin, end) over [0, n) in chunks of kChunk.
template <class Body>
void for_chunks(int threads, int64_t n, Body body) {
  parallel_for(threads, ceil_div(n, kChunk), [&](int64_t chunk) {
    body(chunk * kChunk, std::min(n, (chunk + 1) * kChunk));
  });
}

void raise_to(std::atomic<uint32_t>& best, uint32_t value) {
  uint32_t seen = best.load();
  while (value > seen && !best.compare_exchange_weak(seen, value)) {
  }
}

uint32_t infinity_bits(int dtype) {
  return dtype == kFP32 ? 0x7F800000u : dtype == kBF16 ? 0x7F80u : 0x7C00u;
}

void quantize(const Kernels& isa, int threads, const uint8_t* x, int dtype, int64_t n, int block,
              const CodeTable& table, const ScaleRule& rule, bool saturate, uint8_t* codes,
              uint8_t* scales) {
  const auto kernel = isa.quantize[dtype][block == 32][saturate];
  const bool stream = streams(codes, n / 2);
  const int64_t last = ceil_div(n, kChunk) - 1;
  // Backwards: the end of x is what the amax pass left in the caches.
  parallel_for(threads, last + 1, [&](int64_t chunk) {
    const int64_t begin = (last - chunk) * kChunk, end = std::min(n, begin + kChunk);
    QuantizeArgs args;
    args.x = x + begin * item_size(dtype);
    args.codes = codes + begin / 2;
    args.scales = scales + begin / block;
    args.num_blocks = (end - begin) / block;
    args.table = &table;
    args.rule = &rule;
    args.stream = stream;
    kernel(args);
  });
}

void dequantize(const Kernels& isa, int threads, const uint8_t* codes, const uint8_t* scales,
                int block, const DecodeTable& table, uint8_t* out, int dtype, int64_t n) {
  const bool stream = streams(out, n * item_size(dtype));
  for_chunks(threads, n, [&](int64_t begin, int64_t end) {
    const int64_t num_blocks = (end - begin) / block;
    uint8_t* const to = out + begin * item_size(dtype);
    if (dtype == kFP32) {
      isa.decode32(codes + begin / 2, scales + begin / block, table.row32[0], to, num_blocks,
                   block, stream);
    } else {
      isa.decode16(codes + begin / 2, scales + begin / block, table.row16[0], to, num_blocks,
                   block, stream);
    }
  });
}

}  // namespace

Amax amax(const Kernels& isa, int threads, const uint8_t* x, int dtype, int64_t n) {
  const bool wide = dtype == kFP32;
  const uint32_t infinity = infinity_bits(dtype);
  std::atomic<uint32_t> best{0};
  std::atomic<int64_t> nonfinite{0};
  for_chunks(threads, n, [&](int64_t begin, int64_t end) {
    const uint8_t* in = x + begin * item_size(dtype);
    uint32_t found = (wide ? isa.max32 : isa.max16)(in, end - begin);
    if (found >= infinity) {  // rare: only then look at every element's class
      int64_t count = 0;
      found = (wide ? isa.finite_max32 : isa.finite_max16)(in, end - begin, infinity, &count);
      nonfinite += count;
    }
    raise_to(best, found);
  });
  return {magnitude_value(dtype, best), nonfinite};
}

void quantize_nvfp4(const Kernels& isa, int threads, const uint8_t* x, int dtype, int64_t n,
                    const NVFP4Rules& rules, bool saturate, uint8_t* codes, uint8_t* scales) {
  ScaleRule rule{};
  rule.kind = kNVFP4;
  rule.divisor = 6.0f * rules.global_scale;
  rule.min_scale = rules.min_scale;
  rule.zero_byte = e4m3_byte(std::clamp(rules.zero_block_scale, rules.min_scale, 448.0f));
  float step[128];  // block scales are not negative
  for (int byte = 0; byte < 128; ++byte) step[byte] = e4m3_value(byte) * rules.global_scale;
  const auto table = std::make_unique<CodeTable>();
  build_code_table(step, 128, dtype, rules.keep_negative_zero, *table);
  quantize(isa, threads, x, dtype, n, 16, *table, rule, saturate, codes, scales);
}

void dequantize_nvfp4(const Kernels& isa, int threads, const uint8_t* codes,
                      const uint8_t* scales, float global_scale, bool divide, uint8_t* out,
                      int dtype, int64_t n) {
  float step[256];
  for (int byte = 0; byte < 256; ++byte) {
    step[byte] = divide ? e4m3_value(byte) / global_scale : e4m3_value(byte) * global_scale;
  }
  const auto table = std::make_unique<DecodeTable>();
  build_decode_table(step, dtype, isa.byte_planes, *table);
  dequantize(isa, threads, codes, scales, 16, *table, out, dtype, n);
}

void quantize_mxfp4(const Kernels& isa, int threads, const uint8_t* x, int dtype, int64_t n,
                    int mode, bool saturate, uint8_t* codes, uint8_t* scales) {
  ScaleRule rule{};
  rule.kind = mode;
  float step[256];
  for (int byte = 0; byte < 256; ++byte) step[byte] = e8m0_value(byte);
  const auto table = std::make_unique<CodeTable>();
  build_code_table(step, 256, dtype, true, *table);
  quantize(isa, threads, x, dtype, n, 32, *table, rule, saturate, codes, scales);
}

void dequantize_mxfp4(const Kernels& isa, int threads, const uint8_t* codes,
                      const uint8_t* scales, uint8_t* out, int dtype, int64_t n) {
  float step[256];
  for (int byte = 0; byte < 256; ++byte) step[byte] = e8m0_value(byte);
  const auto table = std::make_unique<DecodeTable>();
  build_decode_table(step, dtype, isa.byte_planes, *table);
  dequantize(isa, threads, codes, scales, 32, *table, out, dtype, n);
}

void quantize_fp8_block(const Kernels& isa, int threads, const uint8_t* x, int dtype,
                        int64_t rows, int64_t columns, int64_t block_rows, int64_t block_columns,
                        bool ue8m0, uint8_t* weight, uint8_t* scales) {
  const int64_t per_row = ceil_div(columns, block_columns);
  parallel_for(threads, ceil_div(rows, block_rows) * per_row, [&](int64_t block) {
    const int64_t row = block / per_row * block_rows, column = block % per_row * block_columns;
    Fp8QuantizeArgs args;
    args.x = x + (row * columns + column) * item_size(dtype);
    args.weight = weight + row * columns + column;
    args.num_rows = std::min(block_rows, rows - row);
    args.num_columns = std::min(block_columns, columns - column);
    args.row_stride = columns;
    args.dtype = dtype;
    float scale = isa.fp8_amax(args) / 448.0f;
    if (scale == 0.0f) scale = 1.0f;
    if (ue8m0) {
      const uint8_t byte = e8m0_ceil(scale);
      scales[block] = byte;
      scale = e8m0_value(byte);
    } else {
      reinterpret_cast<f32_any*>(scales)[block] = scale;
    }
    isa.fp8_encode(args, scale);
  });
}

void dequantize_fp8_block(const Kernels& isa, int threads, const uint8_t* weight,
                          const uint8_t* scales, uint8_t* out, int dtype, int64_t rows,
                          int64_t columns, int64_t block_rows, int64_t block_columns) {
  const int64_t size = item_size(dtype);
  const int64_t per_row = ceil_div(columns, block_columns);
  block_rows = std::min(block_rows, std::max<int64_t>(rows, 1));  // or strips beyond the matrix
  const int64_t even_share = ceil_div(rows, 4 * std::max(threads, 1));
  const int64_t strip =
      std::min(block_rows, std::clamp(even_share, kLeastStripRows, kStripRows));
  const int64_t strips_per_block = ceil_div(block_rows, strip);
  const bool stream = rows * columns * size > kStreamBytes;
  parallel_for(threads, ceil_div(rows, block_rows) * strips_per_block, [&](int64_t item) {
    const int64_t block_row = item / strips_per_block;
    const int64_t row = block_row * block_rows + item % strips_per_block * strip;
    const int64_t end = std::min({row + strip, (block_row + 1) * block_rows, rows});
    if (row >= end) return;
    Fp8Args args;
    args.weight = weight + row * columns;
    args.out = out + row * columns * size;
    args.scales = reinterpret_cast<const f32_any*>(scales) + block_row * per_row;
    args.num_rows = end - row;
    args.num_columns = args.row_stride = columns;
    args.block_columns = block_columns;
    args.dtype = dtype;
    args.stream = stream;
    isa.decode_fp8(args);
  });
}

int64_t mxfp4_to_nvfp4(const Kernels& isa, int threads, const uint8_t* codes,
                       const uint8_t* scales, int shift, int64_t n, uint8_t* codes_out,
                       uint8_t* scales_out, uint8_t* lossless) {
  uint8_t bytes[256], exact[256];
  for (int byte = 0; byte < 256; ++byte) {
    const int exponent = byte - shift, clamped = std::clamp(exponent, -9, 8);
    // 2^-6 and up are normal, exponent field 1 and up; below, one bit of the mantissa.
    bytes[byte] = static_cast<uint8_t>(clamped >= -6 ? (clamped + 7) << 3 : 1 << (clamped + 9));
    exact[byte] = exponent == clamped;
  }
  bytes[255] = 0x7F;  // NaN stays NaN
  exact[255] = 1;
  const bool stream = streams(codes_out, n / 2);
  std::atomic<int64_t> num_lossy{0};
  for_chunks(threads, n, [&](int64_t begin, int64_t end) {
    num_lossy += isa.convert_scales(codes + begin / 2, scales + begin / 32, bytes, exact,
                                    scales_out + begin / 16, lossless + begin / 32,
                                    (end - begin) / 32);
    if (codes_out != codes) {
      isa.copy(codes_out + begin / 2, codes + begin / 2, (end - begin) / 2, stream);
    }
  });
  return num_lossy;
}

uint64_t bench_read(const Kernels& isa, int threads, const uint8_t* in, int64_t n) {
  std::atomic<uint64_t> sum{0};
  for_chunks(threads, n, [&](int64_t begin, int64_t end) {
    sum ^= isa.bench_read(in + begin, end - begin);
  });
  return sum;
}

void bench_write(const Kernels& isa, int threads, uint8_t* out, int64_t n) {
  for_chunks(threads, n,
             [&](int64_t begin, int64_t end) { isa.bench_write(out + begin, end - begin); });
}

}  // namespace nvfp4
