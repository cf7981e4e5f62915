// The instructions of sm_100a as inline PTX; ptx/sm100.hpp says what each does.
//
// Source: PTX ISA 9.0, sections "mbarrier", "cp.async.bulk", "tcgen05", "setmaxnreg". Compiled for
// sm_100a, sm_100f and sm_103a; plain sm_100 has no tcgen05.
#pragma once

#include "megamoe/ptx/sm100.hpp"

namespace megamoe::ptx {

inline constexpr uint16_t kBothCtas = 0b11;  // of a pair, for what goes to several of a cluster

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ bool elect() {
  uint32_t elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p;}"
               : "=r"(elected));
  return elected != 0;
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive_at_leader(uint32_t barrier) {
  asm volatile("{.reg .b32 leader; mapa.shared::cluster.u32 leader, %0, 0;\n"
               "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [leader];}"
               :: "r"(barrier) : "memory");
}
template <int kCtas>
__device__ __forceinline__ bool barrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  if constexpr (kCtas == 1) {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } else {
    asm volatile("{.reg .pred p;\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  }
  return done != 0;
}
__device__ __forceinline__ void pair_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async;" ::: "memory");
}
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes,
                                          uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];"
               :: "r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void copy_bulk_to_pair(uint32_t to, const void* from, int bytes,
                                                  uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".multicast::cluster [%0], [%1], %2, [%3], %4;"
               :: "r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier),
                  "h"(kBothCtas)
               : "memory");
}
__device__ __forceinline__ void copy_box(uint32_t to, const void* map, int x, int y,
                                         uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3}], [%4];"
               :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier) : "memory");
}
__device__ __forceinline__ void copy_box_to_pair(uint32_t to, const void* map, int x, int y,
                                                 uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
               :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(kBothCtas) : "memory");
}

// The same instruction for one CTA and for a pair; operands follow.
#define MEGAMOE_CTA_GROUP(BEFORE, AFTER, ...)                                             \
  if constexpr (kCtas == 1) {                                                             \
    asm volatile(BEFORE ".cta_group::1" AFTER __VA_ARGS__ : "memory");                    \
  } else {                                                                                \
    asm volatile(BEFORE ".cta_group::2" AFTER __VA_ARGS__ : "memory");                    \
  }

template <int kCtas>
__device__ __forceinline__ void tensor_alloc(uint32_t to, int columns) {
  MEGAMOE_CTA_GROUP("tcgen05.alloc", ".sync.aligned.shared::cta.b32 [%0], %1;",
                    :: "r"(to), "r"(columns))
}
template <int kCtas>
__device__ __forceinline__ void tensor_no_more_allocs() {
  MEGAMOE_CTA_GROUP("tcgen05.relinquish_alloc_permit", ".sync.aligned;", ::)
}
__device__ __forceinline__ uint32_t tensor_allocated(uint32_t from) {
  uint32_t address;
  asm volatile("ld.shared::cta.u32 %0, [%1];" : "=r"(address) : "r"(from) : "memory");
  return address;
}
template <int kCtas>
__device__ __forceinline__ void tensor_free(uint32_t address, int columns) {
  MEGAMOE_CTA_GROUP("tcgen05.dealloc", ".sync.aligned.b32 %0, %1;",
                    :: "r"(address), "r"(columns))
}

template <int kCtas>
__device__ __forceinline__ void tensor_copy_scales(uint32_t to, uint64_t from) {
  MEGAMOE_CTA_GROUP("tcgen05.cp", ".32x128b.warpx4 [%0], %1;", :: "r"(to), "l"(from))
}
template <int kCtas>
__device__ __forceinline__ void mma_nvfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction,
                                          bool accumulate, uint32_t a_scales, uint32_t b_scales) {
  MEGAMOE_CTA_GROUP("{.reg .pred p; setp.ne.u32 p, %4, 0;\ntcgen05.mma",
                    ".kind::mxf4nvf4.block_scale.block16 [%0], %1, %2, %3, [%5], [%6], p;}",
                    :: "r"(d), "l"(a), "l"(b), "r"(instruction),
                       "r"(static_cast<uint32_t>(accumulate)), "r"(a_scales), "r"(b_scales))
}
template <int kCtas>
__device__ __forceinline__ void tensor_commit(uint32_t barrier) {
  if constexpr (kCtas == 1) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
                 :: "r"(barrier) : "memory");
  } else {
    asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
                 ".multicast::cluster.b64 [%0], %1;"
                 :: "r"(barrier), "h"(kBothCtas) : "memory");
  }
}
#undef MEGAMOE_CTA_GROUP

__device__ __forceinline__ void tensor_fence_before() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ __forceinline__ void tensor_fence_after() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// Both loads and the wait in one statement: between them the registers hold nothing yet.
__device__ __forceinline__ void tensor_load_32x16(uint32_t from, float (&out)[16]) {
  asm volatile("tcgen05.ld.sync.aligned.16x256b.x2.b32 "
               "{%0, %1, %2, %3, %8, %9, %10, %11}, [%16];\n"
               "tcgen05.ld.sync.aligned.16x256b.x2.b32 "
               "{%4, %5, %6, %7, %12, %13, %14, %15}, [%17];\n"
               "tcgen05.wait::ld.sync.aligned;"
               : "=f"(out[0]), "=f"(out[1]), "=f"(out[2]), "=f"(out[3]), "=f"(out[4]),
                 "=f"(out[5]), "=f"(out[6]), "=f"(out[7]), "=f"(out[8]), "=f"(out[9]),
                 "=f"(out[10]), "=f"(out[11]), "=f"(out[12]), "=f"(out[13]), "=f"(out[14]),
                 "=f"(out[15])
               : "r"(from), "r"(tensor_address(from, 16, 0)) : "memory");
}
__device__ __forceinline__ void tensor_store_32x16(uint32_t to, const float (&values)[16]) {
  asm volatile("tcgen05.st.sync.aligned.16x256b.x2.b32 "
               "[%0], {%2, %3, %4, %5, %10, %11, %12, %13};\n"
               "tcgen05.st.sync.aligned.16x256b.x2.b32 "
               "[%1], {%6, %7, %8, %9, %14, %15, %16, %17};\n"
               "tcgen05.wait::st.sync.aligned;"
               :: "r"(to), "r"(tensor_address(to, 16, 0)), "f"(values[0]), "f"(values[1]),
                  "f"(values[2]), "f"(values[3]), "f"(values[4]), "f"(values[5]), "f"(values[6]),
                  "f"(values[7]), "f"(values[8]), "f"(values[9]), "f"(values[10]),
                  "f"(values[11]), "f"(values[12]), "f"(values[13]), "f"(values[14]),
                  "f"(values[15])
               : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(kRegisters));
}

}  // namespace megamoe::ptx
