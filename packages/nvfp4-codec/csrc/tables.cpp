#include "tables.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

namespace nvfp4 {
namespace {
#include "formats.inl"

constexpr float kE2M1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// Bounds between neighbouring codes; a tie goes to the even code.
constexpr float kBound[8] = {0.0f, 0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};

bool reaches(float magnitude, float step, int code) {
  const float quotient = magnitude / step;
  if (code == 0) return quotient > 0.0f;  // a negative x has a sign
  // NaN encodes as the largest code, hence the negated comparisons.
  return code % 2 == 0 ? !(quotient < kBound[code]) : !(quotient <= kBound[code]);
}

template <int D>
uint32_t near_bits(double value) {
  if (!(value > 0.0)) return 0;
  const float rounded = value <= FLT_MAX ? static_cast<float>(value) : INFINITY;
  if (D == kFP32) return as_bits(rounded);
  return D == kBF16 ? as_bits(rounded) >> 16 : fp16_from_fp32(rounded);
}

// Smallest magnitude that reaches a code. `reaches` is monotone in the magnitude (division by
// a fixed number and rounding are), so walking from a close guess finds it exactly.
template <int D>
uint32_t threshold(float step, int code) {
  using In = Input<D>;
  // Half of the smallest subnormal: what a quotient must exceed not to round to zero.
  const double bound = code == 0 ? 0x1p-150 : static_cast<double>(kBound[code]);
  uint32_t bits = near_bits<D>(bound * static_cast<double>(step));
  while (bits > 0 && reaches(In::decode(bits - 1), step, code)) --bits;
  while (bits < In::kInfinity && !reaches(In::decode(bits), step, code)) ++bits;
  return bits;
}

template <int D, class Row>
void build_row(float step, bool keep_negative_zero, Row* row) {
  if (std::isnan(step)) {  // every quotient is NaN: the largest code, without a sign
    std::fill_n(row, 8, Row{0});
    row[0] = static_cast<Row>(Input<D>::kMagnitude + 1);
    return;
  }
  for (int code = 0; code < 8; ++code) row[code] = static_cast<Row>(threshold<D>(step, code));
  if (keep_negative_zero && step != 0.0f) row[0] = 0;  // 0 / 0 is NaN, which has no sign
}

template <int D, class Row>
void build_rows(const float* step, int num_bytes, bool keep_negative_zero, CodeTable& table,
                Row (*rows)[8]) {
  bool uniform = true;
  const Row first = keep_negative_zero ? 0 : 1;
  for (int byte = 0; byte < num_bytes; ++byte) {
    build_row<D>(step[byte], keep_negative_zero, rows[byte]);
    // No block has a zero step (the least scale is positive) unless the product underflowed.
    const bool used = !std::isnan(step[byte]) && (byte > 0 || step[byte] != 0.0f);
    if (used && rows[byte][0] != first) uniform = false;
  }
  // Patterns above the magnitudes are negative; above that of -0.0, negative and not zero.
  const int64_t last_positive = Input<D>::kMagnitude;
  table.sign_if_above = uniform ? last_positive + first : -1;
}

template <int D, class Row>
void build_decode_rows(const float step[256], Row (*rows)[16]) {
  for (int byte = 0; byte < 256; ++byte) {
    const float one = step[byte];
    uint8_t* row = reinterpret_cast<uint8_t*>(rows[byte]);
    for (int code = 0; code < 16; ++code) store_float<D>(row, code, kE2M1[code] * one);
  }
}

void split_bytes(uint16_t* row) {
  uint8_t planes[32];
  for (int code = 0; code < 16; ++code) {
    planes[code] = static_cast<uint8_t>(row[code]);
    planes[code + 16] = static_cast<uint8_t>(row[code] >> 8);
  }
  std::copy_n(planes, 32, reinterpret_cast<uint8_t*>(row));
}

}  // namespace

float e4m3_value(int byte) { return fp32_from_e4m3(static_cast<uint8_t>(byte)); }

float e8m0_value(int byte) {
  if (byte == 255) return NAN;
  return as_float(byte == 0 ? 0x00400000u : static_cast<uint32_t>(byte) << 23);
}

uint8_t e4m3_byte(float value) { return static_cast<uint8_t>(e4m3_from_fp32(value)); }

uint8_t e8m0_ceil(float value) {
  const uint32_t exponent = as_bits(value) >> 23, mantissa = as_bits(value) & 0x7FFFFFu;
  // Among float32 subnormals only 2^-127 and below fit byte 0.
  const uint32_t up = mantissa > (exponent == 0 ? 0x400000u : 0u);
  return static_cast<uint8_t>(std::min(exponent + up, 254u));
}

float magnitude_value(int dtype, uint32_t bits) {
  if (dtype == kBF16) return Input<kBF16>::decode(bits);
  if (dtype == kFP16) return Input<kFP16>::decode(bits);
  return Input<kFP32>::decode(bits);
}

void build_decode_table(const float step[256], int dtype, bool byte_planes, DecodeTable& table) {
  if (dtype == kFP32) return build_decode_rows<kFP32>(step, table.row32);
  if (dtype == kBF16) build_decode_rows<kBF16>(step, table.row16);
  if (dtype == kFP16) build_decode_rows<kFP16>(step, table.row16);
  if (byte_planes) std::for_each_n(table.row16, 256, split_bytes);
}

void build_code_table(const float* step, int num_bytes, int dtype, bool keep_negative_zero,
                      CodeTable& table) {
  if (dtype == kBF16) build_rows<kBF16>(step, num_bytes, keep_negative_zero, table, table.row16);
  if (dtype == kFP16) build_rows<kFP16>(step, num_bytes, keep_negative_zero, table, table.row16);
  if (dtype == kFP32) build_rows<kFP32>(step, num_bytes, keep_negative_zero, table, table.row32);
}

}  // namespace nvfp4
