// wgmma with its operand A, 64 rows by 16 values of K in BF16, in registers.
//
// A warpgroup (128 threads) computes D[64, N] += A[64, 16] * B[16, N]. B lies in shared memory, K
// contiguous: N rows of 128 bytes in the swizzle of 128 bytes, which copy_box leaves. Thread
// 32 w + 4 g + t has of D, for j = 0, 1, ...: d[4 j + i] is row 16 w + g + 8 (i / 2), column
// 8 j + 2 t + i % 2. Source: PTX ISA, "wgmma.mma_async", m64nNk16, and "Matrix descriptor format".
#pragma once

#include "megamoe/common/types.hpp"

namespace megamoe::ptx {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending groups are not complete.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(kPending) : "memory");
}

// Of B at a shared address: rows of 128 bytes, groups of 8 rows 1024 bytes apart, swizzled. The
// next 16 values of K are 32 bytes on.
__device__ __forceinline__ uint64_t descriptor_k_major(uint32_t address) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kStride = (1024ull >> 4) << 32, kUnused = 1ull << 16;
  return kSwizzle128 | kStride | kUnused | ((address & 0x3FFFFu) >> 4);
}

// The same, `bytes` further on in shared memory. An address fills 14 bits of the descriptor, so that
// nothing is carried from them.
__device__ __forceinline__ uint64_t descriptor_plus(uint64_t descriptor, int bytes) {
  const uint32_t low = static_cast<uint32_t>(descriptor) + static_cast<uint32_t>(bytes / 16);
  return (descriptor & 0xFFFFFFFF00000000ull) | low;
}

// wgmma<N>(d, a, b)
#define MEGAMOE_D4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define MEGAMOE_D16(i) MEGAMOE_D4(i), MEGAMOE_D4((i) + 4), MEGAMOE_D4((i) + 8), MEGAMOE_D4((i) + 12)
#define MEGAMOE_WGMMA(N, NAMES, A, B, ...)                                                   \
  __device__ __forceinline__ void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) { \
    asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0;\n"                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES "}, {" A  \
                 "}, " B ", p, 1, 1, 0;}"                                                     \
                 : __VA_ARGS__                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                       \
  }

#define MEGAMOE_N16 \
  "%0, %1, %2, %3, %4, %5, %6, %7, " \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define MEGAMOE_N32 \
  MEGAMOE_N16 ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define MEGAMOE_N48 \
  MEGAMOE_N32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define MEGAMOE_N64 \
  MEGAMOE_N48 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63"

MEGAMOE_WGMMA(8, "%0, %1, %2, %3", "%4, %5, %6, %7", "%8",
              MEGAMOE_D4(0))
MEGAMOE_WGMMA(16, "%0, %1, %2, %3, %4, %5, %6, %7", "%8, %9, %10, %11", "%12",
              MEGAMOE_D4(0), MEGAMOE_D4(4))
MEGAMOE_WGMMA(32, MEGAMOE_N16, "%16, %17, %18, %19", "%20",
              MEGAMOE_D16(0))
MEGAMOE_WGMMA(40, MEGAMOE_N16 ", %16, %17, %18, %19", "%20, %21, %22, %23", "%24",
              MEGAMOE_D16(0), MEGAMOE_D4(16))
MEGAMOE_WGMMA(48, MEGAMOE_N16 ", %16, %17, %18, %19, %20, %21, %22, %23", "%24, %25, %26, %27", "%28",
              MEGAMOE_D16(0), MEGAMOE_D4(16), MEGAMOE_D4(20))
MEGAMOE_WGMMA(64, MEGAMOE_N32, "%32, %33, %34, %35", "%36",
              MEGAMOE_D16(0), MEGAMOE_D16(16))
MEGAMOE_WGMMA(80, MEGAMOE_N32 ", %32, %33, %34, %35, %36, %37, %38, %39", "%40, %41, %42, %43", "%44",
              MEGAMOE_D16(0), MEGAMOE_D16(16), MEGAMOE_D4(32), MEGAMOE_D4(36))
MEGAMOE_WGMMA(96, MEGAMOE_N48, "%48, %49, %50, %51", "%52",
              MEGAMOE_D16(0), MEGAMOE_D16(16), MEGAMOE_D16(32))
MEGAMOE_WGMMA(112, MEGAMOE_N48 ", %48, %49, %50, %51, %52, %53, %54, %55", "%56, %57, %58, %59", "%60",
              MEGAMOE_D16(0), MEGAMOE_D16(16), MEGAMOE_D16(32), MEGAMOE_D4(48), MEGAMOE_D4(52))
MEGAMOE_WGMMA(128, MEGAMOE_N64, "%64, %65, %66, %67", "%68",
              MEGAMOE_D16(0), MEGAMOE_D16(16), MEGAMOE_D16(32), MEGAMOE_D16(48))

#undef MEGAMOE_WGMMA
#undef MEGAMOE_D16
#undef MEGAMOE_D4
#undef MEGAMOE_N16
#undef MEGAMOE_N32
#undef MEGAMOE_N48
#undef MEGAMOE_N64

}  // namespace megamoe::ptx
