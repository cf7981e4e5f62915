// What tcgen05 instructions take as numbers: descriptors of operands in shared memory and of the
// product. Constant expressions, so that a wrong field does not compile.
//
// Sources: PTX ISA 9.0, "tcgen05: shared memory descriptor" and "tcgen05: instruction descriptor"
// (table for .kind::mxf4nvf4); tests hold both against CUTLASS's makers.
#pragma once

#include "megamoe/common/types.hpp"

namespace megamoe::ptx {

inline constexpr int kMmaK = 64;          // values of K of one MMA on E2M1
inline constexpr int kMmaRows = 128;      // rows of operand A in each CTA of one or two
inline constexpr int kMostMmaColumns = 256;
inline constexpr int kSwizzleBytes = 128;  // a row of an operand in shared memory
inline constexpr int kRowGroupBytes = 8 * kSwizzleBytes;
inline constexpr int kMmaKBytes = kMmaK / 2;  // E2M1 is packed: two values a byte

// An operand in shared memory; fields by their lowest bit. Addresses count in 16 bytes.
struct SharedDescriptor {
  static constexpr int kAddressAt = 0, kAddressBits = 14;
  static constexpr int kLeadingAt = 16;  // unused where K has one swizzled row
  static constexpr int kStrideAt = 32;   // from eight rows to the next eight
  static constexpr int kVersionAt = 46;  // 1: tcgen05
  static constexpr int kSwizzleAt = 61;
  static constexpr uint64_t kVersion = 1, kNoSwizzle = 0, kSwizzle128 = 2;
};

MEGAMOE_FN constexpr uint64_t shared_descriptor(uint32_t address, uint32_t stride_bytes,
                                                uint64_t swizzle) {
  using D = SharedDescriptor;
  return uint64_t{(address & 0x3FFFFu) >> 4} << D::kAddressAt | uint64_t{1} << D::kLeadingAt |
         uint64_t{stride_bytes >> 4} << D::kStrideAt | D::kVersion << D::kVersionAt |
         swizzle << D::kSwizzleAt;
}

// Rows of 128 bytes (256 codes), K contiguous, as a TMA load with the swizzle of 128 bytes leaves
// them: an address that is a multiple of 1024. `step`: which 64 values of the row.
MEGAMOE_FN constexpr uint64_t operand_descriptor(uint32_t address, int step = 0) {
  return shared_descriptor(address + static_cast<uint32_t>(step * kMmaKBytes), kRowGroupBytes,
                           SharedDescriptor::kSwizzle128);
}

// 512 bytes of scales, the words of 128 rows: 32 rows of 16 bytes, eight of them a group.
MEGAMOE_FN constexpr uint64_t scales_descriptor(uint32_t address) {
  return shared_descriptor(address, 8 * 16, SharedDescriptor::kNoSwizzle);
}

// The product's descriptor. Not set, so zero: dense, no negation, both operands K-major, scale
// words begin at their byte 0 (sf_id), K = 64.
struct InstructionDescriptor {
  static constexpr int kAFormatAt = 7, kBFormatAt = 10;
  static constexpr int kColumnsAt = 17;      // N / 8
  static constexpr int kScaleFormatAt = 23;  // 0: UE4M3, 1: UE8M0
  static constexpr int kRowsAt = 24;         // M / 16
  static constexpr uint32_t kE2M1 = 1;  // packed. 5 is the unpacked one of mxf8f6f4: illegal here
  static constexpr uint32_t kUE4M3 = 0;
};

MEGAMOE_FN constexpr uint32_t nvfp4_instruction(int rows, int columns) {
  using D = InstructionDescriptor;
  return D::kE2M1 << D::kAFormatAt | D::kE2M1 << D::kBFormatAt |
         static_cast<uint32_t>(columns / 8) << D::kColumnsAt | D::kUE4M3 << D::kScaleFormatAt |
         static_cast<uint32_t>(rows / 16) << D::kRowsAt;
}

static_assert(nvfp4_instruction(128, 128) == 0x08200480u);
static_assert((nvfp4_instruction(128, 256) >> 23 & 1) == 0, "UE4M3, whatever N is");
static_assert(operand_descriptor(0x400) == 0x4000404000010040ull);
static_assert(scales_descriptor(0x200) == 0x0000400800010020ull);

// Addresses in tensor memory: the lane in the upper half, the column (32 bits wide) in the lower.
inline constexpr int kTensorLanes = 128, kTensorColumns = 512;
MEGAMOE_FN constexpr uint32_t tensor_address(uint32_t base, int lane, int column) {
  return base + (static_cast<uint32_t>(lane) << 16) + static_cast<uint32_t>(column);
}

// What tcgen05.alloc takes: a power of two from 32.
MEGAMOE_FN constexpr int allocated_columns(int columns) {
  int allocated = 32;
  while (allocated < columns) allocated *= 2;
  return allocated;
}

}  // namespace megamoe::ptx
