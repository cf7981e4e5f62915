// Element formats in float32 and bit arithmetic, without branches on data. Included, like
// kernels.inl and under its two rules, inside the anonymous namespace of each user.

// (A union would do the same, but keeps compilers from vectorizing.)
inline float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t as_bits(float value) { return __builtin_bit_cast(uint32_t, value); }

inline uint16_t bf16_from_fp32(float value) {
  const uint32_t bits = as_bits(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

inline uint16_t fp16_from_fp32(float value) {
  const uint32_t bits = as_bits(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  // Normal results: move the exponent's bias from 127 to 15, round 13 bits away.
  const uint32_t normal = (magnitude + 0xC8000FFFu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results: next to 0.5 a float's last place is 2^-24, so the addition rounds.
  const uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - 0x3F000000u;
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x477FF000u ? 0x7C00u : result;
  return static_cast<uint16_t>(magnitude > 0x7F800000u ? 0x7E00u : result | sign);
}

inline float fp32_from_fp16(uint16_t half) {
  const uint32_t magnitude = half & 0x7FFFu;
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = (magnitude << 13) + (224u << 23);
  const uint32_t subnormal = as_bits(static_cast<float>(static_cast<int32_t>(magnitude)) *
                                     0x1p-24f);
  uint32_t bits = magnitude < 0x400u ? subnormal : normal;
  bits = magnitude >= 0x7C00u ? special : bits;
  return as_float(bits | (static_cast<uint32_t>(half & 0x8000u) << 16));
}

inline float fp32_from_e4m3(uint8_t byte) {
  const uint32_t magnitude = byte & 0x7Fu;
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  const uint32_t subnormal =
      as_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f);
  uint32_t bits = magnitude < 8u ? subnormal : normal;
  bits = magnitude == 0x7Fu ? 0x7FC00000u : bits;
  return as_float(bits | (static_cast<uint32_t>(byte & 0x80u) << 24));
}

// E4M3 magnitude code of a value in [0, 448], to nearest even.
inline uint32_t e4m3_from_fp32(float value) {
  const uint32_t bits = as_bits(value);
  const uint32_t normal = ((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
  // Next to 2^14 a float's last place is 2^-9, E4M3's subnormal step.
  const uint32_t subnormal = as_bits(value + 16384.0f) - 0x46800000u;
  return bits < 0x3C800000u ? subnormal : normal;
}

template <int D>
struct Input;

template <>
struct Input<kBF16> {
  using Any = u16_any;
  using Bits = uint16_t;
  static constexpr uint32_t kInfinity = 0x7F80, kMagnitude = 0x7FFF;
  static float decode(uint32_t bits) { return as_float(bits << 16); }
  static const uint16_t* row(const CodeTable& table, uint8_t scale) { return table.row16[scale]; }
};

template <>
struct Input<kFP16> {
  using Any = u16_any;
  using Bits = uint16_t;
  static constexpr uint32_t kInfinity = 0x7C00, kMagnitude = 0x7FFF;
  static float decode(uint32_t bits) { return fp32_from_fp16(static_cast<uint16_t>(bits)); }
  static const uint16_t* row(const CodeTable& table, uint8_t scale) { return table.row16[scale]; }
};

template <>
struct Input<kFP32> {
  using Any = u32_any;
  using Bits = uint32_t;
  static constexpr uint32_t kInfinity = 0x7F800000, kMagnitude = 0x7FFFFFFF;
  static float decode(uint32_t bits) { return as_float(bits); }
  static const uint32_t* row(const CodeTable& table, uint8_t scale) { return table.row32[scale]; }
};

// Round a float32 to output i of dtype D; every NaN becomes the canonical quiet one.
template <int D>
inline void store_float(uint8_t* out, int64_t i, float value);
template <>
inline void store_float<kBF16>(uint8_t* out, int64_t i, float value) {
  reinterpret_cast<u16_any*>(out)[i] = bf16_from_fp32(value);
}
template <>
inline void store_float<kFP16>(uint8_t* out, int64_t i, float value) {
  reinterpret_cast<u16_any*>(out)[i] = fp16_from_fp32(value);
}
template <>
inline void store_float<kFP32>(uint8_t* out, int64_t i, float value) {
  const uint32_t bits = as_bits(value);
  reinterpret_cast<u32_any*>(out)[i] = (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : bits;
}
