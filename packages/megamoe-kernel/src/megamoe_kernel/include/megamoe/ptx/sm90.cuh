// The instructions of sm_90a that the pipeline needs, one thin function each.
//
// Source: PTX ISA 8.x, sections "mbarrier", "cp.async.bulk", "cp.async.bulk.tensor", "st.async"
// and "setmaxnreg". Addresses of shared memory are 32-bit, as the instructions take them.
#pragma once

#include "megamoe/common/types.hpp"

namespace megamoe::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
// After barrier_init, before any other thread or the copy engine uses the barriers.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
// Arrives, and lets the phase wait for `bytes` of copies too.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(barrier), "r"(bytes) : "memory");
}
// At the barrier that CTA number `cta` of the cluster has at this address. For who has only read: a
// release that the other CTA sees would wait for the memory of the whole GPU.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, int cta) {
  asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];}"
               :: "r"(barrier), "r"(cta) : "memory");
}
// A word to this address in CTA number `cta` of the cluster, and 4 bytes to its barrier there.
__device__ __forceinline__ void store_at(uint32_t to, uint32_t value, uint32_t barrier, int cta) {
  asm volatile("{.reg .b32 there, bar; mapa.shared::cluster.u32 there, %0, %3;\n"
               "mapa.shared::cluster.u32 bar, %2, %3;\n"
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [there], %1, [bar];}"
               :: "r"(to), "r"(value), "r"(barrier), "r"(cta) : "memory");
}
// All threads of all CTAs of the cluster.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Whether the phase of this parity is complete; may wait a little before it says no.
__device__ __forceinline__ bool barrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
               "selp.u32 %0, 1, 0, p;}"
               : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done != 0;
}

// Generic stores that were acquired become visible to the copy engine.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

// `bytes`, a multiple of 16, to shared memory; read once, so the L2 cache may drop them first.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes,
                                          uint32_t barrier) {
  constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1], %2, [%3], %4;"
               :: "r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier),
                  "l"(kEvictFirst) : "memory");
}

// A box of a two-dimensional tensor; x in elements of the row, y in rows.
__device__ __forceinline__ void copy_box(uint32_t to, const void* map, int x, int y,
                                         uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3}], [%4];"
               :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier) : "memory");
}

// The same box to this address in both CTAs of a cluster of two, each with a barrier at `barrier`.
__device__ __forceinline__ void copy_box_to_both(uint32_t to, const void* map, int x, int y,
                                                 uint32_t barrier) {
  constexpr uint16_t kBoth = 0b11;
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
               :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(kBoth) : "memory");
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
