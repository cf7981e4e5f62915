// The instructions of sm_100a that the layer needs, and two that it does not, one thin function
// each: their declarations.
//
// Two back ends define them. Compiled for a GPU: inline PTX, ptx/sm100.cuh. Compiled by a host
// compiler: the emulator, csrc/emulator, which the kernel's source does not know of. There each
// call also says where it is (MEGAMOE_SITE), so that a mistake is reported with file and line.
//
// Addresses of shared memory are 32-bit, as the instructions take them. kCtas: 1, or 2 for a pair
// of CTAs (a cluster of two, of which number 0 leads) that multiplies together. Not to be included
// together with ptx/sm90.cuh: the same names, for another architecture.
#pragma once

#include "megamoe/ptx/descriptors.hpp"

#if defined(__CUDACC__)
#define MEGAMOE_GPU_FN __device__ __forceinline__
#define MEGAMOE_SITE_ONLY
#define MEGAMOE_SITE
#define MEGAMOE_PASS_SITE
#else
#define MEGAMOE_GPU_FN inline
#define MEGAMOE_SITE_ONLY ::megamoe::ptx::Site site = {__builtin_FILE(), __builtin_LINE()}
#define MEGAMOE_SITE , MEGAMOE_SITE_ONLY
#define MEGAMOE_PASS_SITE , site
namespace megamoe::ptx {
struct Site {
  const char* file;
  int line;
};
}  // namespace megamoe::ptx
#endif

namespace megamoe::ptx {

MEGAMOE_GPU_FN uint32_t shared_address(const void* pointer MEGAMOE_SITE);
// True in one lane of the warp, always the same one. All lanes.
MEGAMOE_GPU_FN bool elect(MEGAMOE_SITE_ONLY);

// mbarriers: a phase ends when `arrivals` have arrived and the bytes that were expected have come.
MEGAMOE_GPU_FN void barrier_init(uint32_t barrier, int arrivals MEGAMOE_SITE);
// After barrier_init, before any other thread or engine uses the barriers.
MEGAMOE_GPU_FN void fence_barrier_init(MEGAMOE_SITE_ONLY);
MEGAMOE_GPU_FN void barrier_arrive(uint32_t barrier MEGAMOE_SITE);
// Arrives, and lets the phase wait for `bytes` of copies too.
MEGAMOE_GPU_FN void barrier_arrive_expect(uint32_t barrier, int bytes MEGAMOE_SITE);
// At the barrier of the same address in the pair's leader.
MEGAMOE_GPU_FN void barrier_arrive_at_leader(uint32_t barrier MEGAMOE_SITE);
// Whether the phase of this parity is complete; may wait a little before it says no.
template <int kCtas>
MEGAMOE_GPU_FN bool barrier_test(uint32_t barrier, uint32_t parity MEGAMOE_SITE);
// All threads of a pair meet.
MEGAMOE_GPU_FN void pair_sync(MEGAMOE_SITE_ONLY);

// What this thread stored, or acquired, through ordinary accesses becomes visible to the copies and
// products that it begins afterwards.
MEGAMOE_GPU_FN void fence_proxy_async(MEGAMOE_SITE_ONLY);
// `bytes` to shared memory. Both addresses and bytes: multiples of 16.
MEGAMOE_GPU_FN void copy_bulk(uint32_t to, const void* from, int bytes,
                              uint32_t barrier MEGAMOE_SITE);
// The same to both CTAs of a pair: in each at these addresses, and its bytes count at its barrier.
MEGAMOE_GPU_FN void copy_bulk_to_pair(uint32_t to, const void* from, int bytes,
                                      uint32_t barrier MEGAMOE_SITE);
// A box of a two-dimensional tensor; x in elements of the row, y in rows.
MEGAMOE_GPU_FN void copy_box(uint32_t to, const void* map, int x, int y,
                             uint32_t barrier MEGAMOE_SITE);
// The same to both CTAs of a pair, as copy_bulk_to_pair. The kernel does not use it.
MEGAMOE_GPU_FN void copy_box_to_pair(uint32_t to, const void* map, int x, int y,
                                     uint32_t barrier MEGAMOE_SITE);

// Tensor memory. One whole warp of each CTA allocates, stores the address to shared memory, frees.
template <int kCtas>
MEGAMOE_GPU_FN void tensor_alloc(uint32_t to, int columns MEGAMOE_SITE);
template <int kCtas>
MEGAMOE_GPU_FN void tensor_no_more_allocs(MEGAMOE_SITE_ONLY);
// The address that was stored, after a barrier.
MEGAMOE_GPU_FN uint32_t tensor_allocated(uint32_t from MEGAMOE_SITE);
template <int kCtas>
MEGAMOE_GPU_FN void tensor_free(uint32_t address, int columns MEGAMOE_SITE);

// tcgen05.cp, mma and commit: one thread, of a pair's leader; the first two are carried out in
// their order.
// 512 bytes of shared memory, the scale words of 128 rows, to four columns: row m's word to lane
// m % 32 of each quarter of the lanes, column m / 32. In a pair each CTA's to its own.
template <int kCtas>
MEGAMOE_GPU_FN void tensor_copy_scales(uint32_t to, uint64_t from MEGAMOE_SITE);
// D (+)= A * B over 64 values of K, NVFP4; scales in tensor memory. In a pair A has 256 rows; each
// CTA has half of A's rows and their scales, half of B's rows and all of theirs, and gets its rows
// of D.
template <int kCtas>
MEGAMOE_GPU_FN void mma_nvfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction,
                              bool accumulate, uint32_t a_scales, uint32_t b_scales MEGAMOE_SITE);
// Arrives at the barrier, in a pair at both CTAs', when all that this thread has begun is complete.
template <int kCtas>
MEGAMOE_GPU_FN void tensor_commit(uint32_t barrier MEGAMOE_SITE);

// Around other means of order (barriers) between threads that use tensor memory.
MEGAMOE_GPU_FN void tensor_fence_before(MEGAMOE_SITE_ONLY);
MEGAMOE_GPU_FN void tensor_fence_after(MEGAMOE_SITE_ONLY);

// A warp reads 32 lanes, its own quarter, by 16 columns, and has them when the function returns.
// Lane 4 g + t of the warp gets, for half h, r in 0..1 and i in 0..3: at 8 h + 4 r + i, row
// 16 r + g + 8 (i / 2), column 8 h + 2 t + i % 2.
MEGAMOE_GPU_FN void tensor_load_32x16(uint32_t from, float (&out)[16] MEGAMOE_SITE);
// A warp stores what tensor_load_32x16 would give it; it is there when the function returns. All
// lanes. The kernel does not use it.
MEGAMOE_GPU_FN void tensor_store_32x16(uint32_t to, const float (&values)[16] MEGAMOE_SITE);

// A warpgroup's registers per thread; all of its warps.
template <int kRegisters>
MEGAMOE_GPU_FN void registers_up(MEGAMOE_SITE_ONLY);
template <int kRegisters>
MEGAMOE_GPU_FN void registers_down(MEGAMOE_SITE_ONLY);

}  // namespace megamoe::ptx
