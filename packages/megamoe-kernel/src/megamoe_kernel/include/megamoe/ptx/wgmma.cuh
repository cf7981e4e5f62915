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

// wgmma(d, a, b) for 8 to 160 columns. Each list of registers is the one before it and four more.
#define MEGAMOE_FOUR(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define MEGAMOE_N8 "%0, %1, %2, %3"
#define MEGAMOE_N16 MEGAMOE_N8 ", %4, %5, %6, %7"
#define MEGAMOE_N24 MEGAMOE_N16 ", %8, %9, %10, %11"
#define MEGAMOE_N32 MEGAMOE_N24 ", %12, %13, %14, %15"
#define MEGAMOE_N40 MEGAMOE_N32 ", %16, %17, %18, %19"
#define MEGAMOE_N48 MEGAMOE_N40 ", %20, %21, %22, %23"
#define MEGAMOE_N56 MEGAMOE_N48 ", %24, %25, %26, %27"
#define MEGAMOE_N64 MEGAMOE_N56 ", %28, %29, %30, %31"
#define MEGAMOE_N72 MEGAMOE_N64 ", %32, %33, %34, %35"
#define MEGAMOE_N80 MEGAMOE_N72 ", %36, %37, %38, %39"
#define MEGAMOE_N88 MEGAMOE_N80 ", %40, %41, %42, %43"
#define MEGAMOE_N96 MEGAMOE_N88 ", %44, %45, %46, %47"
#define MEGAMOE_N104 MEGAMOE_N96 ", %48, %49, %50, %51"
#define MEGAMOE_N112 MEGAMOE_N104 ", %52, %53, %54, %55"
#define MEGAMOE_N120 MEGAMOE_N112 ", %56, %57, %58, %59"
#define MEGAMOE_N128 MEGAMOE_N120 ", %60, %61, %62, %63"
#define MEGAMOE_N136 MEGAMOE_N128 ", %64, %65, %66, %67"
#define MEGAMOE_N144 MEGAMOE_N136 ", %68, %69, %70, %71"
#define MEGAMOE_N152 MEGAMOE_N144 ", %72, %73, %74, %75"
#define MEGAMOE_N160 MEGAMOE_N152 ", %76, %77, %78, %79"
#define MEGAMOE_D8 MEGAMOE_FOUR(0)
#define MEGAMOE_D16 MEGAMOE_D8, MEGAMOE_FOUR(4)
#define MEGAMOE_D24 MEGAMOE_D16, MEGAMOE_FOUR(8)
#define MEGAMOE_D32 MEGAMOE_D24, MEGAMOE_FOUR(12)
#define MEGAMOE_D40 MEGAMOE_D32, MEGAMOE_FOUR(16)
#define MEGAMOE_D48 MEGAMOE_D40, MEGAMOE_FOUR(20)
#define MEGAMOE_D56 MEGAMOE_D48, MEGAMOE_FOUR(24)
#define MEGAMOE_D64 MEGAMOE_D56, MEGAMOE_FOUR(28)
#define MEGAMOE_D72 MEGAMOE_D64, MEGAMOE_FOUR(32)
#define MEGAMOE_D80 MEGAMOE_D72, MEGAMOE_FOUR(36)
#define MEGAMOE_D88 MEGAMOE_D80, MEGAMOE_FOUR(40)
#define MEGAMOE_D96 MEGAMOE_D88, MEGAMOE_FOUR(44)
#define MEGAMOE_D104 MEGAMOE_D96, MEGAMOE_FOUR(48)
#define MEGAMOE_D112 MEGAMOE_D104, MEGAMOE_FOUR(52)
#define MEGAMOE_D120 MEGAMOE_D112, MEGAMOE_FOUR(56)
#define MEGAMOE_D128 MEGAMOE_D120, MEGAMOE_FOUR(60)
#define MEGAMOE_D136 MEGAMOE_D128, MEGAMOE_FOUR(64)
#define MEGAMOE_D144 MEGAMOE_D136, MEGAMOE_FOUR(68)
#define MEGAMOE_D152 MEGAMOE_D144, MEGAMOE_FOUR(72)
#define MEGAMOE_D160 MEGAMOE_D152, MEGAMOE_FOUR(76)
#define MEGAMOE_WGMMA(N, A, B)                                                               \
  __device__ __forceinline__ void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) { \
    asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0;\n"                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" MEGAMOE_N##N    \
                 "}, {" A "}, " B ", p, 1, 1, 0;}"                                           \
                 : MEGAMOE_D##N                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                       \
  }

MEGAMOE_WGMMA(8, "%4, %5, %6, %7", "%8")
MEGAMOE_WGMMA(16, "%8, %9, %10, %11", "%12")
MEGAMOE_WGMMA(24, "%12, %13, %14, %15", "%16")
MEGAMOE_WGMMA(32, "%16, %17, %18, %19", "%20")
MEGAMOE_WGMMA(40, "%20, %21, %22, %23", "%24")
MEGAMOE_WGMMA(48, "%24, %25, %26, %27", "%28")
MEGAMOE_WGMMA(56, "%28, %29, %30, %31", "%32")
MEGAMOE_WGMMA(64, "%32, %33, %34, %35", "%36")
MEGAMOE_WGMMA(72, "%36, %37, %38, %39", "%40")
MEGAMOE_WGMMA(80, "%40, %41, %42, %43", "%44")
MEGAMOE_WGMMA(88, "%44, %45, %46, %47", "%48")
MEGAMOE_WGMMA(96, "%48, %49, %50, %51", "%52")
MEGAMOE_WGMMA(104, "%52, %53, %54, %55", "%56")
MEGAMOE_WGMMA(112, "%56, %57, %58, %59", "%60")
MEGAMOE_WGMMA(120, "%60, %61, %62, %63", "%64")
MEGAMOE_WGMMA(128, "%64, %65, %66, %67", "%68")
MEGAMOE_WGMMA(136, "%68, %69, %70, %71", "%72")
MEGAMOE_WGMMA(144, "%72, %73, %74, %75", "%76")
MEGAMOE_WGMMA(152, "%76, %77, %78, %79", "%80")
MEGAMOE_WGMMA(160, "%80, %81, %82, %83", "%84")

#undef MEGAMOE_WGMMA
#undef MEGAMOE_FOUR
#undef MEGAMOE_N8
#undef MEGAMOE_D8
#undef MEGAMOE_N16
#undef MEGAMOE_D16
#undef MEGAMOE_N24
#undef MEGAMOE_D24
#undef MEGAMOE_N32
#undef MEGAMOE_D32
#undef MEGAMOE_N40
#undef MEGAMOE_D40
#undef MEGAMOE_N48
#undef MEGAMOE_D48
#undef MEGAMOE_N56
#undef MEGAMOE_D56
#undef MEGAMOE_N64
#undef MEGAMOE_D64
#undef MEGAMOE_N72
#undef MEGAMOE_D72
#undef MEGAMOE_N80
#undef MEGAMOE_D80
#undef MEGAMOE_N88
#undef MEGAMOE_D88
#undef MEGAMOE_N96
#undef MEGAMOE_D96
#undef MEGAMOE_N104
#undef MEGAMOE_D104
#undef MEGAMOE_N112
#undef MEGAMOE_D112
#undef MEGAMOE_N120
#undef MEGAMOE_D120
#undef MEGAMOE_N128
#undef MEGAMOE_D128
#undef MEGAMOE_N136
#undef MEGAMOE_D136
#undef MEGAMOE_N144
#undef MEGAMOE_D144
#undef MEGAMOE_N152
#undef MEGAMOE_D152
#undef MEGAMOE_N160
#undef MEGAMOE_D160

}  // namespace megamoe::ptx
