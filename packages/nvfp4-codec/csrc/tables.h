// Lookup tables from the float definition of each format, built once per call.
#pragma once
#include "kernels.h"

namespace nvfp4 {

// Rows of 16 outputs, one per scale byte. Below, `step[byte]` is what code 2 (1.0) stands for.
struct DecodeTable {
  alignas(64) uint16_t row16[256][16];
  alignas(64) uint32_t row32[256][16];
};

// float32 of every E4M3 and every E8M0 byte.
float e4m3_value(int byte);
float e8m0_value(int byte);

// E4M3 byte of a value in [0, 448], to nearest even.
uint8_t e4m3_byte(float value);

// E8M0 byte of the smallest power of two that is not below a positive value.
uint8_t e8m0_ceil(float value);

void build_decode_table(const float step[256], int dtype, bool byte_planes, DecodeTable& table);

// How a float becomes an E2M1 code: quotient = float32(x / step), to nearest even. A negative
// quotient that rounds to zero has the sign bit; -0.0 only with keep_negative_zero.
// Rows from num_bytes on are left as they are.
void build_code_table(const float* step, int num_bytes, int dtype, bool keep_negative_zero,
                      CodeTable& table);

// float32 of magnitude bits in a dtype.
float magnitude_value(int dtype, uint32_t bits);

}  // namespace nvfp4
