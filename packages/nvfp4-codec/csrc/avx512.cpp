// AVX-512 (F, BW, VL, DQ): table lookups by register permutes, and quantize without a
// division per element.
#include <immintrin.h>

#include "kernels.h"

namespace nvfp4 {
namespace {
#include "kernels.inl"

inline __m512i load512(const void* p) { return _mm512_loadu_si512(p); }

template <bool kStream>
inline void store512(void* p, __m512i value) {
  if (kStream) {
    _mm512_stream_si512(static_cast<__m512i*>(p), value);
  } else {
    _mm512_storeu_si512(p, value);
  }
}

// ---------------------------------------------------------------- amax

// Four independent maxima: one chain of loads would wait for each cache line.
template <bool kWide>
uint32_t max_magnitude512(const uint8_t* x, int64_t n) {
  constexpr int64_t kSize = kWide ? 4 : 2;
  const __m512i mask = kWide ? _mm512_set1_epi32(0x7FFFFFFF) : _mm512_set1_epi16(0x7FFF);
  __m512i best[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
                     _mm512_setzero_si512()};
  const int64_t bytes = n * kSize;
  int64_t i = 0;
  for (; i + 256 <= bytes; i += 256) {
    for (int j = 0; j < 4; ++j) {
      const __m512i value = _mm512_and_si512(load512(x + i + 64 * j), mask);
      best[j] = kWide ? _mm512_max_epu32(best[j], value) : _mm512_max_epu16(best[j], value);
    }
  }
  alignas(64) uint8_t lanes[256];
  for (int j = 0; j < 4; ++j) _mm512_store_si512(lanes + 64 * j, best[j]);
  uint32_t head, tail;
  if (kWide) {
    head = max_magnitude<u32_any, 0x7FFFFFFF>(lanes, 64);
    tail = max_magnitude<u32_any, 0x7FFFFFFF>(x + i, (bytes - i) / 4);
  } else {
    head = max_magnitude<u16_any, 0x7FFF>(lanes, 128);
    tail = max_magnitude<u16_any, 0x7FFF>(x + i, (bytes - i) / 2);
  }
  return head > tail ? head : tail;
}

// ---------------------------------------------------------------- E2M1 decode

// 16 bytes of codes as 32 word indices, even elements first in each pair.
inline __m512i word_codes(const uint8_t* codes) {
  const __m512i bytes =
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m512i odd = _mm512_slli_epi32(bytes, 12);
  // (bytes | odd) & mask
  return _mm512_ternarylogic_epi32(bytes, odd, _mm512_set1_epi32(0x000F000F), 0xA8);
}

template <int kBlock, bool kStream>
void decode16_blocks(const uint8_t* codes, const uint8_t* scales, const uint16_t* table,
                     uint8_t* out, int64_t num_steps) {
  // With blocks of 16 the upper half of a vector reads the second row of 16 outputs.
  const __m512i second_row = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
  for (int64_t i = 0; i < num_steps; ++i) {
    __m512i index = word_codes(codes + 16 * i), rows;
    if (kBlock == 16) {
      rows = _mm512_inserti64x4(
          _mm512_castsi256_si512(_mm256_load_si256(
              reinterpret_cast<const __m256i*>(table + 16 * scales[2 * i]))),
          _mm256_load_si256(reinterpret_cast<const __m256i*>(table + 16 * scales[2 * i + 1])), 1);
      index = _mm512_or_si512(index, second_row);
    } else {
      rows = _mm512_castsi256_si512(
          _mm256_load_si256(reinterpret_cast<const __m256i*>(table + 16 * scales[i])));
    }
    store512<kStream>(out + 64 * i, _mm512_permutexvar_epi16(index, rows));
  }
  if (kStream) _mm_sfence();
}

void decode16(const uint8_t* codes, const uint8_t* scales, const uint16_t* table, uint8_t* out,
              int64_t num_blocks, int block, bool stream) {
  const int per_step = 32 / block;
  const int64_t steps = num_blocks / per_step;
  if (block == 16) {
    (stream ? decode16_blocks<16, true> : decode16_blocks<16, false>)(codes, scales, table, out,
                                                                      steps);
  } else {
    (stream ? decode16_blocks<32, true> : decode16_blocks<32, false>)(codes, scales, table, out,
                                                                      steps);
  }
  decode_rows<uint16_t, u16_any, false>(codes + 16 * steps, scales + steps * per_step, table,
                                        out + 64 * steps, num_blocks - steps * per_step, block);
}

template <int kBlock, bool kStream>
void decode32_blocks(const uint8_t* codes, const uint8_t* scales, const uint32_t* table,
                     uint8_t* out, int64_t num_blocks) {
  for (int64_t b = 0; b < num_blocks; ++b) {
    const __m512i row = _mm512_load_si512(table + 16 * scales[b]);
    for (int half = 0; half < kBlock / 16; ++half, codes += 8, out += 64) {
      const __m512i bytes =
          _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
      // The permute looks at four bits only, so the others may stay.
      const __m512i index = _mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28));
      store512<kStream>(out, _mm512_permutexvar_epi32(index, row));
    }
  }
  if (kStream) _mm_sfence();
}

void decode32(const uint8_t* codes, const uint8_t* scales, const uint32_t* table, uint8_t* out,
              int64_t num_blocks, int block, bool stream) {
  if (block == 16) {
    (stream ? decode32_blocks<16, true> : decode32_blocks<16, false>)(codes, scales, table, out,
                                                                      num_blocks);
  } else {
    (stream ? decode32_blocks<32, true> : decode32_blocks<32, false>)(codes, scales, table, out,
                                                                      num_blocks);
  }
}

// ---------------------------------------------------------------- quantize to E2M1

template <int D, bool kSaturate>
inline __m512i magnitude512(__m512i value) {
  if (D == kFP32) {
    value = _mm512_and_si512(value, _mm512_set1_epi32(0x7FFFFFFF));
    if (!kSaturate) return value;
    const __m512i infinity = _mm512_set1_epi32(Input<kFP32>::kInfinity);
    return _mm512_maskz_mov_epi32(_mm512_cmplt_epu32_mask(value, infinity), value);
  }
  value = _mm512_and_si512(value, _mm512_set1_epi16(0x7FFF));
  if (!kSaturate) return value;
  const __m512i infinity = _mm512_set1_epi16(static_cast<short>(Input<D>::kInfinity));
  return _mm512_maskz_mov_epi16(_mm512_cmplt_epu16_mask(value, infinity), value);
}

inline __m512i max_unpack16(__m512i a, __m512i b) {
  return _mm512_max_epu16(_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b));
}
template <bool kWide>
inline __m512i max512(__m512i a, __m512i b) {
  return kWide ? _mm512_max_epu32(a, b) : _mm512_max_epu16(a, b);
}
template <bool kWide>
inline __m512i max_unpack32(__m512i a, __m512i b) {
  return max512<kWide>(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}
template <bool kWide>
inline __m512i max_unpack64(__m512i a, __m512i b) {
  return max512<kWide>(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

// Eight vectors of words in; word j of each 128-bit lane is the maximum of that lane of x[j].
template <int D, bool kSaturate>
inline __m512i lane_max_of_8(const uint8_t* x) {
  __m512i v[8];
  for (int j = 0; j < 8; ++j) v[j] = magnitude512<D, kSaturate>(load512(x + 64 * j));
  const __m512i a = max_unpack32<false>(max_unpack16(v[0], v[1]), max_unpack16(v[2], v[3]));
  const __m512i b = max_unpack32<false>(max_unpack16(v[4], v[5]), max_unpack16(v[6], v[7]));
  return max_unpack64<false>(a, b);
}

// Four vectors of dwords in; dword j of each 128-bit lane is the maximum of that lane of x[j].
template <bool kSaturate>
inline __m512i lane_max_of_4(const uint8_t* x) {
  __m512i v[4];
  for (int j = 0; j < 4; ++j) v[j] = magnitude512<kFP32, kSaturate>(load512(x + 64 * j));
  return max_unpack64<true>(max_unpack32<true>(v[0], v[1]), max_unpack32<true>(v[2], v[3]));
}

template <int D>
inline void store_amax(float* out, __m256i words) {
  if (D == kBF16) {
    _mm512_storeu_si512(out, _mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
  } else {
    _mm512_storeu_ps(out, _mm512_cvtph_ps(words));
  }
}

// Sixteen vectors: the amax of 32 runs of 16 words, or of 16 runs of 16 dwords.
template <int D, bool kSaturate>
inline void run_amax(const uint8_t* x, float* out) {
  if (D == kFP32) {
    const __m512i a = lane_max_of_4<kSaturate>(x), b = lane_max_of_4<kSaturate>(x + 256);
    const __m512i c = lane_max_of_4<kSaturate>(x + 512), d = lane_max_of_4<kSaturate>(x + 768);
    const __m512i ab = _mm512_max_epu32(_mm512_shuffle_i32x4(a, b, 0x44),
                                        _mm512_shuffle_i32x4(a, b, 0xEE));
    const __m512i cd = _mm512_max_epu32(_mm512_shuffle_i32x4(c, d, 0x44),
                                        _mm512_shuffle_i32x4(c, d, 0xEE));
    _mm512_storeu_si512(out, _mm512_max_epu32(_mm512_shuffle_i32x4(ab, cd, 0x88),
                                              _mm512_shuffle_i32x4(ab, cd, 0xDD)));
  } else {
    const __m512i a = lane_max_of_8<D, kSaturate>(x), b = lane_max_of_8<D, kSaturate>(x + 512);
    // Lanes 0 and 1 hold the halves of the even runs, 2 and 3 of the odd ones.
    const __m512i runs = _mm512_max_epu16(_mm512_shuffle_i32x4(a, b, 0x88),
                                          _mm512_shuffle_i32x4(a, b, 0xDD));
    const __m512i order = _mm512_set_epi16(31, 23, 30, 22, 29, 21, 28, 20, 27, 19, 26, 18, 25, 17,
                                           24, 16, 15, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1,
                                           8, 0);
    const __m512i sorted = _mm512_permutexvar_epi16(order, runs);
    store_amax<D>(out, _mm512_castsi512_si256(sorted));
    store_amax<D>(out + 16, _mm512_extracti64x4_epi64(sorted, 1));
  }
}

// Thresholds of four (words) or two (dwords) scale bytes, eight per byte, in one register.
template <int D>
inline __m512i threshold_rows(const CodeTable& table, const uint8_t* scales) {
  if (D == kFP32) {
    return _mm512_inserti64x4(
        _mm512_castsi256_si512(
            _mm256_load_si256(reinterpret_cast<const __m256i*>(table.row32[scales[0]]))),
        _mm256_load_si256(reinterpret_cast<const __m256i*>(table.row32[scales[1]])), 1);
  }
  const auto row = [&](int j) {
    return _mm_load_si128(reinterpret_cast<const __m128i*>(table.row16[scales[j]]));
  };
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(row(0)), row(1), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(row(2)), row(3), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// Codes 0..15 of one vector, in its own lanes: a binary search among each element's seven
// thresholds. `base` is eight times the number of the row that an element uses.
template <int D, bool kSaturate, bool kSimpleSign>
inline __m512i search_codes(__m512i x, __m512i rows, __m512i base, __m512i sign_if_above) {
  constexpr bool kWide = D == kFP32;
  const __m512i magnitude = magnitude512<D, false>(x);
  if (kWide) {
    const auto ge = [&](__m512i index) {
      return _mm512_cmpge_epu32_mask(magnitude, _mm512_permutexvar_epi32(index, rows));
    };
    const auto step = [&](__m512i index, int down, int up) {
      return _mm512_mask_add_epi32(_mm512_add_epi32(index, _mm512_set1_epi32(down)), ge(index),
                                   index, _mm512_set1_epi32(up));
    };
    __m512i index = _mm512_add_epi32(base, _mm512_set1_epi32(4));
    index = step(step(step(index, -2, 2), -1, 1), -1, 0);
    const __mmask16 negative = kSimpleSign ? _mm512_cmpgt_epu32_mask(x, sign_if_above)
                                           : _mm512_movepi32_mask(x) & ge(base);
    __m512i code = _mm512_and_si512(index, _mm512_set1_epi32(7));
    code = _mm512_mask_add_epi32(code, negative, code, _mm512_set1_epi32(8));
    if (!kSaturate) return code;
    const __m512i infinity = _mm512_set1_epi32(Input<kFP32>::kInfinity);
    return _mm512_maskz_mov_epi32(_mm512_cmple_epu32_mask(magnitude, infinity), code);
  }
  const auto ge = [&](__m512i index) {
    return _mm512_cmpge_epu16_mask(magnitude, _mm512_permutexvar_epi16(index, rows));
  };
  const auto step = [&](__m512i index, short down, short up) {
    return _mm512_mask_add_epi16(_mm512_add_epi16(index, _mm512_set1_epi16(down)), ge(index),
                                 index, _mm512_set1_epi16(up));
  };
  __m512i index = _mm512_add_epi16(base, _mm512_set1_epi16(4));
  index = step(step(step(index, -2, 2), -1, 1), -1, 0);
  const __mmask32 negative = kSimpleSign ? _mm512_cmpgt_epu16_mask(x, sign_if_above)
                                         : _mm512_movepi16_mask(x) & ge(base);
  __m512i code = _mm512_and_si512(index, _mm512_set1_epi16(7));
  code = _mm512_mask_add_epi16(code, negative, code, _mm512_set1_epi16(8));
  if (!kSaturate) return code;
  const __m512i infinity = _mm512_set1_epi16(static_cast<short>(Input<D>::kInfinity));
  return _mm512_maskz_mov_epi16(_mm512_cmple_epu16_mask(magnitude, infinity), code);
}

// Four vectors of 32 word codes as their 64 bytes.
inline __m512i pack_codes(__m512i a, __m512i b, __m512i c, __m512i d) {
  // Bytes of a dword of `ab`: even a, even b, odd a, odd b; the shift puts odd above even.
  const __m512i ab = _mm512_or_si512(a, _mm512_slli_epi16(b, 8));
  const __m512i cd = _mm512_or_si512(c, _mm512_slli_epi16(d, 8));
  const __m512i ab_bytes = _mm512_or_si512(ab, _mm512_srli_epi32(ab, 12));
  const __m512i cd_bytes = _mm512_or_si512(cd, _mm512_srli_epi32(cd, 12));
  const __m512i bytes =
      _mm512_mask_blend_epi16(0xAAAAAAAA, ab_bytes, _mm512_slli_epi32(cd_bytes, 16));
  // Transpose 16 dwords of four bytes to four runs of 16 bytes.
  const __m512i gather = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, _mm512_shuffle_epi8(bytes, gather));
}

// 128 elements to 64 bytes.
template <int D, int kBlock, bool kSaturate, bool kSimpleSign>
inline __m512i encode_128(const uint8_t* x, const uint8_t* scales, const CodeTable& table,
                          __m512i sign_if_above) {
  const auto search = [&](const uint8_t* from, __m512i rows, __m512i base) {
    return search_codes<D, kSaturate, kSimpleSign>(load512(from), rows, base, sign_if_above);
  };
  __m512i code[4];
  if (D == kFP32) {
    for (int j = 0; j < 4; ++j) {
      // Two dword vectors, 32 elements: two blocks of 16 or one of 32.
      const uint8_t pair[2] = {scales[kBlock == 16 ? 2 * j : j],
                               scales[kBlock == 16 ? 2 * j + 1 : j]};
      const __m512i rows = threshold_rows<D>(table, pair);
      const __m512i low = search(x + 128 * j, rows, _mm512_setzero_si512());
      const __m512i high = search(x + 128 * j + 64, rows, _mm512_set1_epi32(8));
      code[j] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)),
                                   _mm512_cvtepi32_epi16(high), 1);
    }
  } else if (kBlock == 16) {
    const __m512i base = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(8), 1);
    const __m512i upper = _mm512_add_epi16(base, _mm512_set1_epi16(16));
    for (int j = 0; j < 4; j += 2) {
      const __m512i rows = threshold_rows<D>(table, scales + 2 * j);
      code[j] = search(x + 64 * j, rows, base);
      code[j + 1] = search(x + 64 * j + 64, rows, upper);
    }
  } else {
    const __m512i rows = threshold_rows<D>(table, scales);
    for (int j = 0; j < 4; ++j) {
      code[j] = search(x + 64 * j, rows, _mm512_set1_epi16(static_cast<short>(8 * j)));
    }
  }
  return pack_codes(code[0], code[1], code[2], code[3]);
}

struct Avx512 {
  template <int D, int kBlock, bool kSaturate>
  static void block_amax(const uint8_t* x, int64_t num_blocks, float* amax) {
    constexpr int64_t kBytes = kBlock * (D == kFP32 ? 4 : 2);  // of one block
    constexpr int kRuns = D == kFP32 ? 16 : 32;                // of 16 elements, per call
    constexpr int kBlocks = kRuns * 16 / kBlock;
    int64_t b = 0;
    for (; b + kBlocks <= num_blocks; b += kBlocks) {
      if (kBlock == 16) {
        run_amax<D, kSaturate>(x + b * kBytes, amax + b);
      } else {
        float runs[kRuns];
        run_amax<D, kSaturate>(x + b * kBytes, runs);
        for (int j = 0; j < kBlocks; ++j) {
          amax[b + j] = runs[2 * j] > runs[2 * j + 1] ? runs[2 * j] : runs[2 * j + 1];
        }
      }
    }
    block_amax_portable<D, kBlock, kSaturate>(x + b * kBytes, num_blocks - b, amax + b);
  }

  template <int D, int kBlock, bool kSaturate>
  static void encode(const uint8_t* x, const uint8_t* scales, const CodeTable& table,
                     uint8_t* codes, int64_t num_blocks, bool stream) {
    constexpr int64_t kBytes = kBlock * (D == kFP32 ? 4 : 2);
    constexpr int kBlocks = 128 / kBlock;
    const int64_t done = num_blocks / kBlocks * kBlocks;
    if (table.sign_if_above >= 0) {
      encode_groups<D, kBlock, kSaturate, true>(x, scales, table, codes, done, stream);
    } else {
      encode_groups<D, kBlock, kSaturate, false>(x, scales, table, codes, done, stream);
    }
    encode_portable<D, kBlock, kSaturate>(x + done * kBytes, scales + done, table,
                                          codes + done * (kBlock / 2), num_blocks - done);
  }

 private:
  template <int D, int kBlock, bool kSaturate, bool kSimpleSign>
  static void encode_groups(const uint8_t* x, const uint8_t* scales, const CodeTable& table,
                            uint8_t* codes, int64_t num_blocks, bool stream) {
    constexpr int kBytes = 128 * (D == kFP32 ? 4 : 2);  // of one group
    const __m512i sign_if_above =
        D == kFP32 ? _mm512_set1_epi32(static_cast<int>(table.sign_if_above))
                   : _mm512_set1_epi16(static_cast<short>(table.sign_if_above));
    for (int64_t b = 0; b < num_blocks; b += 128 / kBlock, x += kBytes, codes += 64) {
      // Encoding leaves the memory idle; fetch what the next step's amax will read.
      for (int line = 0; line < kBytes; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(x + kStepElements * kBytes / 128 + line),
                     _MM_HINT_T0);
      }
      const __m512i packed =
          encode_128<D, kBlock, kSaturate, kSimpleSign>(x, scales + b, table, sign_if_above);
      if (stream) {
        store512<true>(codes, packed);
      } else {
        store512<false>(codes, packed);
      }
    }
    if (stream) _mm_sfence();
  }
};

// ---------------------------------------------------------------- FP8 blocks

constexpr int64_t kMaxTables = 64;  // 16 KiB: stays in the first-level cache

// 16-bit outputs of the 128 non-negative E4M3 bytes under one scale.
template <int D>
void build_fp8_table(float scale, uint16_t* table) {
  for (int i = 0; i < 128; ++i) {
    store_float<D>(reinterpret_cast<uint8_t*>(table), i,
                   fp32_from_e4m3(static_cast<uint8_t>(i)) * scale);
  }
}

inline __m512i lookup_fp8(__m256i bytes, __m512i t0, __m512i t1, __m512i t2, __m512i t3) {
  const __m512i index = _mm512_cvtepu8_epi16(bytes);
  const __m512i low = _mm512_permutex2var_epi16(t0, index, t1);
  const __m512i high = _mm512_permutex2var_epi16(t2, index, t3);
  const __mmask32 upper = _mm512_test_epi16_mask(index, _mm512_set1_epi16(64));
  const __m512i value = _mm512_mask_mov_epi16(low, upper, high);
  // The sign of 0x80..0xFE; 0xFF is NaN, which stays the canonical positive one.
  const __mmask32 negative = _mm512_cmplt_epu16_mask(
      _mm512_sub_epi16(index, _mm512_set1_epi16(128)), _mm512_set1_epi16(127));
  const __m512i flipped = _mm512_xor_si512(value, _mm512_set1_epi16(static_cast<short>(0x8000)));
  return _mm512_mask_mov_epi16(value, negative, flipped);
}

// One row of one column block.
template <bool kStream>
inline void decode_fp8_run512(const uint8_t* in, uint8_t* out, int64_t n, const uint16_t* table) {
  const __m512i t0 = load512(table), t1 = load512(table + 32);
  const __m512i t2 = load512(table + 64), t3 = load512(table + 96);
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    store512<kStream>(out + 2 * i, lookup_fp8(bytes, t0, t1, t2, t3));
  }
  if (i < n) {
    const __mmask32 rest = (1u << (n - i)) - 1u;
    _mm512_mask_storeu_epi16(out + 2 * i, rest,
                             lookup_fp8(_mm256_maskz_loadu_epi8(rest, in + i), t0, t1, t2, t3));
  }
}

// Row after row over as many column blocks as have room for their tables: block after block
// would touch a new page with every 128 bytes.
template <int D>
void decode_fp8_tables(const Fp8Args& args) {
  alignas(64) uint16_t tables[kMaxTables][128];
  const int64_t width = args.block_columns * kMaxTables;
  for (int64_t first = 0; first < args.num_columns; first += width) {
    const int64_t end = args.num_columns - first < width ? args.num_columns : first + width;
    const f32_any* scales = args.scales + first / args.block_columns;
    for (int64_t c = first, j = 0; c < end; c += args.block_columns, ++j) {
      build_fp8_table<D>(scales[j], tables[j]);
    }
    for (int64_t r = 0; r < args.num_rows; ++r) {
      const uint8_t* in = args.weight + r * args.row_stride;
      uint8_t* out = args.out + r * args.row_stride * 2;
      for (int64_t c = first, j = 0; c < end; c += args.block_columns, ++j) {
        const int64_t n = end - c < args.block_columns ? end - c : args.block_columns;
        uint8_t* run = out + 2 * c;
        const bool stream = args.stream && reinterpret_cast<uintptr_t>(run) % 64 == 0;
        (stream ? decode_fp8_run512<true> : decode_fp8_run512<false>)(in + c, run, n, tables[j]);
      }
    }
  }
  _mm_sfence();
}

void decode_fp8(const Fp8Args& args) {
  bool finite = true;
  const int64_t num_scales = (args.num_columns + args.block_columns - 1) / args.block_columns;
  for (int64_t j = 0; j < num_scales; ++j) {
    finite &= (as_bits(args.scales[j]) & 0x7FFFFFFFu) < 0x7F800000u;
  }
  // A table costs about as much as 128 elements. The sign trick needs finite scales: with an
  // infinite one, 0 and -0 are NaN too.
  const bool pays = args.num_rows * args.block_columns >= 512;
  if (args.dtype == kFP32 || !finite || !pays) return decode_fp8_portable(args);
  (args.dtype == kBF16 ? decode_fp8_tables<kBF16> : decode_fp8_tables<kFP16>)(args);
}

// ---------------------------------------------------------------- copies

void copy(uint8_t* out, const uint8_t* in, int64_t n, bool stream) {
  int64_t i = 0;
  if (stream) {
    for (; i + 64 <= n; i += 64) store512<true>(out + i, load512(in + i));
    _mm_sfence();
  }
  copy_portable(out + i, in + i, n - i, false);
}

uint64_t bench_read(const uint8_t* in, int64_t n) {
  __m512i sum[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
                    _mm512_setzero_si512()};
  for (int64_t i = 0; i + 256 <= n; i += 256) {
    for (int j = 0; j < 4; ++j) sum[j] = _mm512_xor_si512(sum[j], load512(in + i + 64 * j));
  }
  alignas(64) uint64_t lanes[32];
  for (int j = 0; j < 4; ++j) _mm512_store_si512(lanes + 8 * j, sum[j]);
  uint64_t total = 0;
  for (uint64_t lane : lanes) total ^= lane;
  return total;
}

void bench_write(uint8_t* out, int64_t n) {
  const __m512i value = _mm512_set1_epi8(1);
  for (int64_t i = 0; i + 64 <= n; i += 64) store512<true>(out + i, value);
  _mm_sfence();
}

}  // namespace

const Kernels& avx512_kernels() {
  static const Kernels kernels = [] {
    Kernels table = portable_kernels("avx512");
    table.max16 = max_magnitude512<false>;
    table.max32 = max_magnitude512<true>;
    table.decode16 = decode16;
    table.decode32 = decode32;
    table.decode_fp8 = decode_fp8;
    fill_quantize<Avx512>(table);
    table.copy = copy;
    table.bench_read = bench_read;
    table.bench_write = bench_write;
    return table;
  }();
  return kernels;
}

}  // namespace nvfp4
