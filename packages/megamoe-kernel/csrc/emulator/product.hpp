// The arithmetic of tcgen05.mma.kind::mxf4nvf4.block_scale.block16: descriptors taken apart and
// refused if illegal, operands decoded, sums formed.
//
// Independent of the kernel's own builders and formats on purpose: what both misread would agree.
// Sums of 64 products are exact (double) and rounded once, added to the float32 accumulator;
// a GPU's order and rounding are unknown, and the contract's bounds leave room for them.
#pragma once

#include <cmath>
#include <cstdint>

namespace megamoe::emulator {

struct Operand {
  uint32_t address, stride;
  int swizzle, version, base_offset;

  explicit Operand(uint64_t descriptor)
      : address(static_cast<uint32_t>(descriptor & 0x3FFF) << 4),
        stride(static_cast<uint32_t>(descriptor >> 32 & 0x3FFF) << 4),
        swizzle(static_cast<int>(descriptor >> 61)),
        version(static_cast<int>(descriptor >> 46 & 3)),
        base_offset(static_cast<int>(descriptor >> 49 & 7)) {}
};

struct Instruction {
  int rows, columns;
  bool is_ue8m0;
  const char* error = nullptr;

  Instruction(uint32_t bits, int num_ctas)
      : rows(static_cast<int>(bits >> 24 & 31) * 16),
        columns(static_cast<int>(bits >> 17 & 63) * 8),
        is_ue8m0(bits >> 23 & 1) {
    const uint32_t a = bits >> 7 & 7, b = bits >> 10 & 7;
    if (a != 1 || b != 1) error = "operand formats are not packed E2M1";
    if (bits & 0xF) error = "sparse, or a reserved bit is set";
    if (bits >> 13 & 3) error = "negated operands";
    if (bits >> 15 & 3) error = "an operand is not K-major";
    if (bits >> 4 & 7 || bits >> 29 & 3) error = "scale words of a block of 16 begin at byte 0";
    if (bits >> 31) error = "K is not 64";
    if (rows != 128 * num_ctas) error = "each CTA multiplies 128 rows";
    const int step = 8 * num_ctas;
    if (columns < step || columns > 256 || columns % step) {
      error = "columns are not up to 256 in eights, of a pair in sixteens";
    }
  }
};

inline float decode_e2m1(int code) {
  static constexpr float kMagnitude[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return code & 8 ? -kMagnitude[code & 7] : kMagnitude[code & 7];
}

inline float decode_scale(uint32_t word, int block, bool is_ue8m0) {
  const int byte = static_cast<int>(word >> 8 * block & 0xFF);
  if (is_ue8m0) return std::ldexp(1.0f, byte - 127);
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if (exponent == 15 && mantissa == 7) return std::nanf("");
  return exponent ? std::ldexp(1.0f + static_cast<float>(mantissa) / 8.0f, exponent - 7)
                  : std::ldexp(static_cast<float>(mantissa), -9);
}

// What multiplied garbage gives. No sum of numbers has this payload.
inline constexpr uint32_t kPoison = 0x7FC0DEADu;

// 64 values of one row, each times its block's scale.
struct DecodedRow {
  float value[64];
  bool garbage = false;
};

inline double dot(const DecodedRow& a, const DecodedRow& b) {
  double sum = 0.0;
  for (int k = 0; k < 64; ++k) sum += static_cast<double>(a.value[k]) * b.value[k];
  return sum;
}

}  // namespace megamoe::emulator
