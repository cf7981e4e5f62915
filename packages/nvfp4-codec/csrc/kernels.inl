// The portable kernels, included once by every instruction-set file inside its own
// anonymous namespace and compiled there with that file's flags.
//
// Two rules keep the files apart: nothing from the C++ standard library is used here (its
// inline functions are shared symbols, and the linker might keep the copy that needs
// AVX-512), and every float operation is written out in the reference's order. The loops
// have no branches on data, so that compilers vectorize them.

#include "formats.inl"

// ---------------------------------------------------------------- amax

template <class Any, uint32_t kMagnitude>
uint32_t max_magnitude(const uint8_t* x, int64_t n) {
  const Any* in = reinterpret_cast<const Any*>(x);
  Any best = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Any magnitude = static_cast<Any>(in[i] & kMagnitude);
    best = magnitude > best ? magnitude : best;
  }
  return best;
}

template <class Any, uint32_t kMagnitude>
uint32_t finite_max_magnitude(const uint8_t* x, int64_t n, uint32_t infinity, int64_t* nonfinite) {
  const Any* in = reinterpret_cast<const Any*>(x);
  uint32_t best = 0;
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = in[i] & kMagnitude;
    const bool finite = magnitude < infinity;
    best = finite && magnitude > best ? magnitude : best;
    count += !finite;
  }
  *nonfinite = count;
  return best;
}

// ---------------------------------------------------------------- E2M1 decode

template <class Out, class OutAny, bool kBytePlanes>
void decode_rows(const uint8_t* codes, const uint8_t* scales, const Out* table, uint8_t* out,
                 int64_t num_blocks, int block) {
  OutAny* values = reinterpret_cast<OutAny*>(out);
  for (int64_t b = 0; b < num_blocks; ++b) {
    const Out* row = table + 16 * scales[b];
    const uint8_t* planes = reinterpret_cast<const uint8_t*>(row);
    for (int j = 0; j < block / 2; ++j) {
      const int low = codes[j] & 15, high = codes[j] >> 4;
      if (kBytePlanes) {
        values[2 * j] = static_cast<OutAny>(planes[low] | planes[16 + low] << 8);
        values[2 * j + 1] = static_cast<OutAny>(planes[high] | planes[16 + high] << 8);
      } else {
        values[2 * j] = row[low];
        values[2 * j + 1] = row[high];
      }
    }
    codes += block / 2;
    values += block;
  }
}

void decode16_portable(const uint8_t* codes, const uint8_t* scales, const uint16_t* table,
                       uint8_t* out, int64_t num_blocks, int block, bool) {
  decode_rows<uint16_t, u16_any, false>(codes, scales, table, out, num_blocks, block);
}

void decode32_portable(const uint8_t* codes, const uint8_t* scales, const uint32_t* table,
                       uint8_t* out, int64_t num_blocks, int block, bool) {
  decode_rows<uint32_t, u32_any, false>(codes, scales, table, out, num_blocks, block);
}

// ---------------------------------------------------------------- quantize to E2M1

template <int D, int kBlock, bool kSaturate>
void block_amax_portable(const uint8_t* x, int64_t num_blocks, float* amax) {
  using In = Input<D>;
  const typename In::Any* in = reinterpret_cast<const typename In::Any*>(x);
  for (int64_t b = 0; b < num_blocks; ++b, in += kBlock) {
    using Bits = typename In::Bits;
    Bits best = 0;
    for (int j = 0; j < kBlock; ++j) {
      Bits magnitude = in[j] & static_cast<Bits>(In::kMagnitude);
      if (kSaturate) magnitude = magnitude < In::kInfinity ? magnitude : 0;
      best = magnitude > best ? magnitude : best;
    }
    amax[b] = In::decode(best);
  }
}

inline uint8_t nvfp4_scale(float amax, const ScaleRule& rule) {
  float scale = amax / rule.divisor;
  const bool zero = scale == 0.0f;
  scale = scale < rule.min_scale ? rule.min_scale : scale;
  scale = scale > 448.0f ? 448.0f : scale;
  return zero ? rule.zero_byte : static_cast<uint8_t>(e4m3_from_fp32(scale));
}

// With amax = m * 2^e the scale is 2^(e - 2) (E2M1's largest power of two is 4), or twice
// that from a mantissa that depends on the mode; see scales.mx_block_scale.
template <int kKind>
inline uint8_t mx_scale(float amax) {
  constexpr uint32_t kFirstUp = kKind == kMXCeil    ? 1u
                                : kKind == kMXRceil ? 0x400001u
                                : kKind == kMXEven  ? 0x600000u
                                                    : 0x800000u;
  const uint32_t bits = as_bits(amax);
  const uint32_t exponent = (bits >> 23) + ((bits & 0x7FFFFFu) >= kFirstUp);
  return static_cast<uint8_t>(exponent > 2u ? exponent - 2u : 0u);
}

void scale_bytes(const ScaleRule& rule, const float* amax, int64_t n, uint8_t* out) {
  switch (rule.kind) {
    case kNVFP4: for (int64_t i = 0; i < n; ++i) out[i] = nvfp4_scale(amax[i], rule); break;
    case kMXFloor: for (int64_t i = 0; i < n; ++i) out[i] = mx_scale<kMXFloor>(amax[i]); break;
    case kMXCeil: for (int64_t i = 0; i < n; ++i) out[i] = mx_scale<kMXCeil>(amax[i]); break;
    case kMXRceil: for (int64_t i = 0; i < n; ++i) out[i] = mx_scale<kMXRceil>(amax[i]); break;
    case kMXEven: for (int64_t i = 0; i < n; ++i) out[i] = mx_scale<kMXEven>(amax[i]); break;
  }
}

template <int D, int kBlock, bool kSaturate>
void encode_portable(const uint8_t* x, const uint8_t* scales, const CodeTable& table,
                     uint8_t* codes, int64_t num_blocks) {
  using In = Input<D>;
  const typename In::Any* in = reinterpret_cast<const typename In::Any*>(x);
  using Bits = typename In::Bits;
  for (int64_t b = 0; b < num_blocks; ++b, in += kBlock, codes += kBlock / 2) {
    const Bits* row = In::row(table, scales[b]);
    const Bits sign = row[0], t1 = row[1], t2 = row[2], t3 = row[3], t4 = row[4], t5 = row[5],
               t6 = row[6], t7 = row[7];
    Bits code[kBlock];
    for (int j = 0; j < kBlock; ++j) {
      const Bits bits = in[j];
      const Bits u = bits & static_cast<Bits>(In::kMagnitude);
      // The sum is written out so that the loop over elements is the one vectorized.
      Bits sum = static_cast<Bits>((u >= t1) + (u >= t2) + (u >= t3) + (u >= t4) + (u >= t5) +
                                   (u >= t6) + (u >= t7));
      const Bits negative = (bits > In::kMagnitude) & (u >= sign);
      sum = static_cast<Bits>(sum | negative << 3);
      if (kSaturate) sum = u > In::kInfinity ? Bits{0} : sum;
      code[j] = sum;
    }
    for (int j = 0; j < kBlock / 2; ++j) {
      codes[j] = static_cast<uint8_t>(code[2 * j] | code[2 * j + 1] << 4);
    }
  }
}

struct Portable {
  template <int D, int kBlock, bool kSaturate>
  static void block_amax(const uint8_t* x, int64_t num_blocks, float* amax) {
    block_amax_portable<D, kBlock, kSaturate>(x, num_blocks, amax);
  }
  template <int D, int kBlock, bool kSaturate>
  static void encode(const uint8_t* x, const uint8_t* scales, const CodeTable& table,
                     uint8_t* codes, int64_t num_blocks, bool) {
    encode_portable<D, kBlock, kSaturate>(x, scales, table, codes, num_blocks);
  }
};

constexpr int64_t kStepElements = 2048;

// Amax, scales and codes of a step that stays in the first-level cache.
template <class Isa, int D, int kBlock, bool kSaturate>
void quantize_blocks(const QuantizeArgs& args) {
  constexpr int64_t kStep = kStepElements / kBlock;
  constexpr int64_t kBlockBytes = kBlock * (D == kFP32 ? 4 : 2);
  alignas(64) float amax[kStep];
  for (int64_t b = 0; b < args.num_blocks; b += kStep) {
    const int64_t n = args.num_blocks - b < kStep ? args.num_blocks - b : kStep;
    const uint8_t* x = args.x + b * kBlockBytes;
    Isa::template block_amax<D, kBlock, kSaturate>(x, n, amax);
    scale_bytes(*args.rule, amax, n, args.scales + b);
    Isa::template encode<D, kBlock, kSaturate>(x, args.scales + b, *args.table,
                                               args.codes + b * (kBlock / 2), n, args.stream);
  }
}

template <class Isa>
void fill_quantize(Kernels& kernels) {
  kernels.quantize[kBF16][0][0] = quantize_blocks<Isa, kBF16, 16, false>;
  kernels.quantize[kBF16][0][1] = quantize_blocks<Isa, kBF16, 16, true>;
  kernels.quantize[kBF16][1][0] = quantize_blocks<Isa, kBF16, 32, false>;
  kernels.quantize[kBF16][1][1] = quantize_blocks<Isa, kBF16, 32, true>;
  kernels.quantize[kFP16][0][0] = quantize_blocks<Isa, kFP16, 16, false>;
  kernels.quantize[kFP16][0][1] = quantize_blocks<Isa, kFP16, 16, true>;
  kernels.quantize[kFP16][1][0] = quantize_blocks<Isa, kFP16, 32, false>;
  kernels.quantize[kFP16][1][1] = quantize_blocks<Isa, kFP16, 32, true>;
  kernels.quantize[kFP32][0][0] = quantize_blocks<Isa, kFP32, 16, false>;
  kernels.quantize[kFP32][0][1] = quantize_blocks<Isa, kFP32, 16, true>;
  kernels.quantize[kFP32][1][0] = quantize_blocks<Isa, kFP32, 32, false>;
  kernels.quantize[kFP32][1][1] = quantize_blocks<Isa, kFP32, 32, true>;
}

// ---------------------------------------------------------------- FP8 blocks

template <int D>
void decode_fp8_run(const uint8_t* in, uint8_t* out, int64_t n, float scale) {
  for (int64_t i = 0; i < n; ++i) store_float<D>(out, i, fp32_from_e4m3(in[i]) * scale);
}

template <int D>
void decode_fp8_rows(const Fp8Args& args) {
  constexpr int64_t kSize = D == kFP32 ? 4 : 2;
  for (int64_t r = 0; r < args.num_rows; ++r) {
    const uint8_t* in = args.weight + r * args.row_stride;
    uint8_t* out = args.out + r * args.row_stride * kSize;
    const f32_any* scale = args.scales;
    for (int64_t c = 0; c < args.num_columns; c += args.block_columns) {
      const int64_t left = args.num_columns - c;
      const int64_t n = left < args.block_columns ? left : args.block_columns;
      decode_fp8_run<D>(in + c, out + c * kSize, n, *scale++);
    }
  }
}

void decode_fp8_portable(const Fp8Args& args) {
  if (args.dtype == kBF16) decode_fp8_rows<kBF16>(args);
  if (args.dtype == kFP16) decode_fp8_rows<kFP16>(args);
  if (args.dtype == kFP32) decode_fp8_rows<kFP32>(args);
}

template <int D>
float fp8_amax_rows(const Fp8QuantizeArgs& args) {
  using In = Input<D>;
  const int64_t num_columns = args.num_columns;
  typename In::Bits best = 0;
  for (int64_t r = 0; r < args.num_rows; ++r) {
    const typename In::Any* in = reinterpret_cast<const typename In::Any*>(args.x) +
                                 r * args.row_stride;
    for (int64_t i = 0; i < num_columns; ++i) {
      typename In::Bits magnitude = in[i] & static_cast<typename In::Bits>(In::kMagnitude);
      magnitude = magnitude < In::kInfinity ? magnitude : 0;
      best = magnitude > best ? magnitude : best;
    }
  }
  return In::decode(best);
}

template <int D>
void fp8_encode_run(const typename Input<D>::Any* in, uint8_t* out, int64_t n, float scale) {
  using In = Input<D>;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = in[i];
    const uint32_t magnitude = bits & In::kMagnitude;
    float value = In::decode(magnitude) / scale;
    value = value > 448.0f ? 448.0f : value;
    const uint32_t code = e4m3_from_fp32(value) | (bits > In::kMagnitude ? 0x80u : 0u);
    out[i] = static_cast<uint8_t>(magnitude > In::kInfinity ? 0u : code);
  }
}

template <int D>
void fp8_encode_rows(const Fp8QuantizeArgs& args, float scale) {
  const int64_t stride = args.row_stride;
  for (int64_t r = 0; r < args.num_rows; ++r) {
    fp8_encode_run<D>(reinterpret_cast<const typename Input<D>::Any*>(args.x) + r * stride,
                      args.weight + r * stride, args.num_columns, scale);
  }
}

float fp8_amax_portable(const Fp8QuantizeArgs& args) {
  if (args.dtype == kBF16) return fp8_amax_rows<kBF16>(args);
  if (args.dtype == kFP16) return fp8_amax_rows<kFP16>(args);
  return fp8_amax_rows<kFP32>(args);
}

void fp8_encode_portable(const Fp8QuantizeArgs& args, float scale) {
  if (args.dtype == kBF16) fp8_encode_rows<kBF16>(args, scale);
  if (args.dtype == kFP16) fp8_encode_rows<kFP16>(args, scale);
  if (args.dtype == kFP32) fp8_encode_rows<kFP32>(args, scale);
}

// ---------------------------------------------------------------- MXFP4 -> NVFP4, copies

int64_t convert_scales_portable(const uint8_t* codes, const uint8_t* scales,
                                const uint8_t* bytes, const uint8_t* exact, uint8_t* out,
                                uint8_t* lossless, int64_t n) {
  int64_t num_lossy = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint8_t scale = scales[i];
    uint8_t ok = exact[scale];
    if (!ok && scale != 255) {
      // Sixteen bytes of codes that are all +0 or -0 decode alike under any finite scale.
      uint32_t any = 0;
      for (int j = 0; j < 16; ++j) any |= codes[16 * i + j] & 0x77u;
      ok = any == 0;
    }
    out[2 * i] = out[2 * i + 1] = bytes[scale];
    lossless[i] = ok;
    num_lossy += !ok;
  }
  return num_lossy;
}

void copy_portable(uint8_t* out, const uint8_t* in, int64_t n, bool) {
  __builtin_memcpy(out, in, static_cast<unsigned long>(n));
}

uint64_t bench_read_portable(const uint8_t* in, int64_t n) {
  uint64_t sum = 0;
  for (int64_t i = 0; i + 8 <= n; i += 8) {
    uint64_t word;
    __builtin_memcpy(&word, in + i, 8);
    sum ^= word;
  }
  return sum;
}

void bench_write_portable(uint8_t* out, int64_t n) {
  __builtin_memset(out, 1, static_cast<unsigned long>(n));
}

Kernels portable_kernels(const char* name) {
  Kernels kernels{};
  kernels.name = name;
  kernels.max16 = max_magnitude<u16_any, 0x7FFF>;
  kernels.max32 = max_magnitude<u32_any, 0x7FFFFFFF>;
  kernels.finite_max16 = finite_max_magnitude<u16_any, 0x7FFF>;
  kernels.finite_max32 = finite_max_magnitude<u32_any, 0x7FFFFFFF>;
  kernels.decode16 = decode16_portable;
  kernels.decode32 = decode32_portable;
  kernels.decode_fp8 = decode_fp8_portable;
  fill_quantize<Portable>(kernels);
  kernels.fp8_amax = fp8_amax_portable;
  kernels.fp8_encode = fp8_encode_portable;
  kernels.convert_scales = convert_scales_portable;
  kernels.copy = copy_portable;
  kernels.bench_read = bench_read_portable;
  kernels.bench_write = bench_write_portable;
  return kernels;
}
