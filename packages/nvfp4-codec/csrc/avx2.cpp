// AVX2: the portable loops vectorized by the compiler, and E2M1 decode by byte shuffles.
#include <immintrin.h>

#include "kernels.h"

namespace nvfp4 {
namespace {
#include "kernels.inl"

// Two blocks of 16 per step. A row's 16 outputs lie as 16 low and 16 high bytes, so that one
// shuffle per plane looks all of them up.
inline void decode_pair(__m128i packed, __m256i low_plane, __m256i high_plane, uint8_t* out,
                        bool stream) {
  const __m128i nibble = _mm_set1_epi8(15);
  const __m128i even = _mm_and_si128(packed, nibble);
  const __m128i odd = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
  const __m256i codes = _mm256_set_m128i(_mm_unpackhi_epi8(even, odd),
                                         _mm_unpacklo_epi8(even, odd));
  const __m256i low = _mm256_shuffle_epi8(low_plane, codes);
  const __m256i high = _mm256_shuffle_epi8(high_plane, codes);
  const __m256i head = _mm256_unpacklo_epi8(low, high), tail = _mm256_unpackhi_epi8(low, high);
  const __m256i first = _mm256_permute2x128_si256(head, tail, 0x20);
  const __m256i second = _mm256_permute2x128_si256(head, tail, 0x31);
  if (stream) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out), first);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out) + 1, second);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), first);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out) + 1, second);
  }
}

inline __m128i load128(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}

void decode16(const uint8_t* codes, const uint8_t* scales, const uint16_t* table, uint8_t* out,
              int64_t num_blocks, int block, bool stream) {
  const int per_step = block == 16 ? 2 : 1;  // 32 elements
  int64_t b = 0;
  for (; b + per_step <= num_blocks; b += per_step, codes += 16, out += 64) {
    const uint16_t* first = table + 16 * scales[b];
    const uint16_t* second = table + 16 * scales[b + per_step - 1];
    decode_pair(load128(codes), _mm256_set_m128i(load128(second), load128(first)),
                _mm256_set_m128i(load128(second + 8), load128(first + 8)), out, stream);
  }
  if (stream) _mm_sfence();
  decode_rows<uint16_t, u16_any, true>(codes, scales + b, table, out, num_blocks - b, block);
}

void copy(uint8_t* out, const uint8_t* in, int64_t n, bool stream) {
  int64_t i = 0;
  if (stream) {
    for (; i + 32 <= n; i += 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i)));
    }
    _mm_sfence();
  }
  copy_portable(out + i, in + i, n - i, false);
}

void bench_write(uint8_t* out, int64_t n) {
  const __m256i value = _mm256_set1_epi8(1);
  for (int64_t i = 0; i + 32 <= n; i += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i), value);
  }
  _mm_sfence();
}

}  // namespace

const Kernels& avx2_kernels() {
  static const Kernels kernels = [] {
    Kernels table = portable_kernels("avx2");
    table.byte_planes = true;
    table.decode16 = decode16;
    table.copy = copy;
    table.bench_write = bench_write;
    return table;
  }();
  return kernels;
}

}  // namespace nvfp4
