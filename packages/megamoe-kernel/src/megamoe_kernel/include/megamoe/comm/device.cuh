// The Machine that is a GPU thread: loads, stores, atomics and barriers of PTX, sm_70 and later.
//
// Everything that orders memory is inline PTX with its scope, and clobbers memory so that the
// compiler keeps plain accesses on their side of it.
#pragma once

#include "megamoe/common/machine.hpp"
#include "megamoe/layout/rank_buffers.hpp"

namespace megamoe {

class Device {
 public:
  static constexpr uint32_t kPollsPerLook = 64;

  // wait_limit: nanoseconds until a wait is given up.
  __device__ __forceinline__ Device(const RankBuffers& buffers, int rank_idx, uint64_t wait_limit)
      : failure_(Fields{buffers, rank_idx}.failure()), rank_idx_(rank_idx),
        wait_limit_(wait_limit) {}

  __device__ __forceinline__ int rank_idx() const { return rank_idx_; }
  __device__ __forceinline__ int cta_idx() const { return static_cast<int>(blockIdx.x); }
  __device__ __forceinline__ int num_ctas() const { return static_cast<int>(gridDim.x); }
  __device__ __forceinline__ int thread_idx() const { return static_cast<int>(threadIdx.x); }

  template <class T>
  __device__ __forceinline__ T load(const T* from) {
    return *from;
  }
  template <class T>
  __device__ __forceinline__ void store(T* to, T value) {
    *to = value;
  }

  template <class T>
  __device__ __forceinline__ T load_tile(const T* from) {
    return *from;
  }
  template <class T>
  __device__ __forceinline__ void store_tile(T* to, T value) {
    *to = value;
  }

  __device__ __forceinline__ uint32_t add(uint32_t* to, uint32_t value) {
    uint32_t before;  // a generic address: shared memory too
    asm volatile("atom.relaxed.gpu.add.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(to), "r"(value) : "memory");
    return before;
  }
  __device__ __forceinline__ uint32_t add_release(uint32_t* to, uint32_t value, Scope scope) {
    uint32_t before;
    if (scope == Scope::kDevice) {
      asm volatile("atom.release.gpu.global.add.u32 %0, [%1], %2;"
                   : "=r"(before) : "l"(global(to)), "r"(value) : "memory");
    } else {
      asm volatile("atom.release.sys.global.add.u32 %0, [%1], %2;"
                   : "=r"(before) : "l"(global(to)), "r"(value) : "memory");
    }
    return before;
  }
  __device__ __forceinline__ void store_release(uint32_t* to, uint32_t value, Scope scope) {
    if (scope == Scope::kDevice) {
      asm volatile("st.release.gpu.global.u32 [%0], %1;"
                   :: "l"(global(to)), "r"(value) : "memory");
    } else {
      asm volatile("st.release.sys.global.u32 [%0], %1;"
                   :: "l"(global(to)), "r"(value) : "memory");
    }
  }
  __device__ __forceinline__ uint32_t load_acquire(const uint32_t* from, Scope scope) {
    uint32_t value;
    if (scope == Scope::kDevice) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                   : "=r"(value) : "l"(global(from)) : "memory");
    } else {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                   : "=r"(value) : "l"(global(from)) : "memory");
    }
    return value;
  }

  __device__ __forceinline__ uint32_t shuffle(uint32_t value, int lane) {
    return __shfl_sync(kAllLanes, value, lane);
  }
  __device__ __forceinline__ uint32_t ballot(bool flag) { return __ballot_sync(kAllLanes, flag); }
  __device__ __forceinline__ void sync_warp() { __syncwarp(); }

  __device__ __forceinline__ bool sync_all(int barrier, int num_threads, bool flag) {
    uint32_t all;  // without .aligned: one lane may come late from a wait
    asm volatile("{.reg .pred p, q; setp.ne.u32 p, %1, 0;\n"
                 "barrier.cta.red.and.pred q, %2, %3, p; selp.u32 %0, 1, 0, q;}"
                 : "=r"(all) : "r"(static_cast<uint32_t>(flag)), "r"(barrier), "r"(num_threads)
                 : "memory");
    return all != 0;
  }

  __device__ __forceinline__ uint64_t clock() {
    uint64_t nanoseconds;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
  }
  __device__ __forceinline__ uint64_t wait_limit() { return wait_limit_; }
  __device__ __forceinline__ void pause() {}

  // In line: ptxas gives up on setmaxnreg where a kernel calls functions.
  __device__ __forceinline__ void give_up(Place place, uint32_t expected, uint32_t found) {
    if (atomicCAS(&failure_[kFailureWait], 0u, static_cast<uint32_t>(place.wait)) != 0) return;
    failure_[kFailureRank] = static_cast<uint32_t>(rank_idx_);
    failure_[kFailureCta] = blockIdx.x;
    failure_[kFailureThread] = threadIdx.x;
    failure_[kFailureTile] = static_cast<uint32_t>(place.tile);
    failure_[kFailurePeer] = static_cast<uint32_t>(place.peer);
    failure_[kFailureExpected] = expected;
    failure_[kFailureFound] = found;
    store_release(&failure_[kFailureComplete], 1, Scope::kSystem);
  }
  __device__ __forceinline__ bool given_up() {
    uint32_t wait;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
                 : "=r"(wait) : "l"(global(&failure_[kFailureWait])));
    return wait != 0;
  }

 private:
  __device__ __forceinline__ static uint64_t global(const void* address) {
    return __cvta_generic_to_global(address);
  }

  uint32_t* failure_;
  int rank_idx_;
  uint64_t wait_limit_;
};
static_assert(Machine<Device>);

}  // namespace megamoe
