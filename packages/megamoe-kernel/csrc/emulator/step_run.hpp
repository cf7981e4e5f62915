// A few instructions on their own, as a test lists them for each warp: for what the kernel does not
// use, and for what it does not do wrong.
#pragma once

#include <span>

#include "emulator/sm100_kernel.hpp"

namespace megamoe::emulator {

// What a step does; a, b and c are its operands.
enum class Op : int32_t {
  kAlloc,        // a columns
  kFree,         // from column a, b columns
  kMeetWarp,
  kMeet,         // all threads of the CTA
  kMeetPair,
  kFenceBefore,
  kFenceAfter,
  kStore,        // lane a, column b; what the run gives for the thread
  kLoad,         // lane a, column b
  kInit,         // barrier a, b arrivals
  kArrive,       // barrier a
  kExpect,       // barrier a, b bytes
  kWait,         // barrier a, its first phase
  kFill,         // ones: b bytes of codes, and all scales; barrier a
  kBox,          // at x = a, y = b, in place of the second operand; barrier c
  kBoxToPair,    // the same
  kMultiply,     // sums at column a; b: added to what is there
  kCommit,       // barrier a
};

struct Step {
  int32_t warp;    // among those of all CTAs
  Op op;
  uint32_t lanes;  // those that do it, a bit each
  int32_t a, b, c;
};

struct StepRun {
  const Step* steps;
  int32_t num_steps;
  int32_t num_ctas;   // 1, or the 2 of a pair
  int32_t cta_group;  // of the tcgen05 instructions
  int32_t rows, row_bytes;  // of the matrix, of which a box has 16 rows of 128 bytes
  uint64_t seed;
  const uint8_t* matrix;
  const float* values;  // [threads, 16]
  float* loaded;        // [threads, 16]
  int32_t* on_its_way;  // [warps], -1: copies in the other CTA, when the warp's first wait ended
  uint32_t* tensor;     // [CTAs, 128, 512]: what it holds at the end; what nobody wrote is left out
  uint8_t* shared;      // [CTAs, kSharedBytes]
};

template <int kGroup>
class StepRunner {
 public:
  explicit StepRunner(const StepRun& run)
      : run_(run),
        world_(run.seed, none_, 1, run.num_ctas, kWarps, 1),
        emulation_(world_, Geometry{0, kSharedBytes, 0, 0, 0, 0, 0, 0}, Mutant::kNone),
        ctas_(static_cast<size_t>(run.num_ctas)) {
    emulation = &emulation_;
    std::memset(codes_, 0x22, sizeof codes_);    // 1 in E2M1
    std::memset(scales_, 0x38, sizeof scales_);  // and in E4M3
    const EmulatedMap map{EmulatedMap::kMagic, run.matrix, run.rows, run.row_bytes, kColumns,
                          ptx::kSwizzleBytes,  nullptr};
    std::memcpy(map_.bytes, &map, sizeof map);
    for (int cta = 0; cta < run.num_ctas; ++cta) {
      emulation_.add_cta(kSharedBytes);
      ctas_[static_cast<size_t>(cta)].warps.resize(kWarps);
      for (int thread = 0; thread < kThreads; ++thread) {
        emulation_.add_thread(0, cta, thread);
        world_.crew.add([this, cta, thread] { work(cta, thread); });
      }
    }
  }

  std::optional<std::string> run() {
    const auto stopped = world_.crew.run([this] { return emulation_.complete_one(); });
    for (int i = 0; i < run_.num_ctas; ++i) {
      CtaState& cta = emulation_.cta(i);
      std::memcpy(run_.shared + i * kSharedBytes, cta.shared.base(), kSharedBytes);
      for (int lane = 0; lane < TensorMemory::kLanes; ++lane) {
        for (int column = 0; column < TensorMemory::kColumns; ++column) {
          if (!cta.tensor.written(lane, column)) continue;
          run_.tensor[(i * TensorMemory::kLanes + lane) * TensorMemory::kColumns + column] =
              cta.tensor.get(lane, column);
        }
      }
    }
    return stopped;
  }

 private:
  // Twice as many warps as reach all lanes: of each quarter there are two.
  static constexpr int kWarps = 8, kThreads = kWarps * kWarpSize;
  // A product: 128 rows in each CTA times 16 columns. Its scales' columns in tensor memory.
  static constexpr int kColumns = 16, kWeightScaleColumn = 48, kTokenScaleColumn = 52;
  // Shared memory.
  static constexpr uint32_t kTokensAt = ptx::kMmaRows * ptx::kSwizzleBytes,
                            kWeightScalesAt = kTokensAt + kColumns * ptx::kSwizzleBytes,
                            kTokenScalesAt = kWeightScalesAt + kScaleAtomBytes,
                            kBarriersAt = kTokenScalesAt + kScaleAtomBytes,
                            kTensorAddressAt = kBarriersAt + 64, kSharedBytes = 20 * 1024;

  static uint32_t shared(uint32_t at) { return SharedMemory::kBase + at; }
  static uint32_t barrier(int index) {
    return shared(kBarriersAt + 8 * static_cast<uint32_t>(index));
  }

  void work(int cta, int thread) {
    HostMachine m(world_, ctas_[static_cast<size_t>(cta)], cta * kThreads + thread, 0, cta, thread);
    for (const Step& step : std::span(run_.steps, static_cast<size_t>(run_.num_steps))) {
      const bool is_mine = step.warp == cta * kWarps + thread / kWarpSize;
      if (is_mine && step.lanes >> thread % kWarpSize & 1) act(m, step, cta * kThreads + thread);
    }
  }

  void act(HostMachine& m, const Step& step, int thread) {
    const int a = step.a, b = step.b;
    float values[16];
    switch (step.op) {
      case Op::kAlloc: return ptx::tensor_alloc<kGroup>(shared(kTensorAddressAt), a);
      case Op::kFree: return ptx::tensor_free<kGroup>(ptx::tensor_address(0, 0, a), b);
      case Op::kMeetWarp: return m.sync_warp();
      case Op::kMeet: return void(m.sync_all(1, kThreads, true));
      case Op::kMeetPair: return ptx::pair_sync();
      case Op::kFenceBefore: return ptx::tensor_fence_before();
      case Op::kFenceAfter: return ptx::tensor_fence_after();
      case Op::kStore:
        std::copy_n(run_.values + 16 * thread, 16, values);
        return ptx::tensor_store_32x16(ptx::tensor_address(0, a, b), values);
      case Op::kLoad:
        ptx::tensor_load_32x16(ptx::tensor_address(0, a, b), values);
        return void(std::copy_n(values, 16, run_.loaded + 16 * thread));
      case Op::kInit:
        ptx::barrier_init(barrier(a), b);
        return ptx::fence_barrier_init();
      case Op::kArrive: return ptx::barrier_arrive(barrier(a));
      case Op::kExpect: return ptx::barrier_arrive_expect(barrier(a), b);
      case Op::kWait: return wait(m, barrier(a), step.warp);
      case Op::kFill:
        ptx::barrier_arrive_expect(barrier(a), b + static_cast<int>(sizeof scales_));
        ptx::copy_bulk(shared(0), codes_, b, barrier(a));
        return ptx::copy_bulk(shared(kWeightScalesAt), scales_, sizeof scales_, barrier(a));
      case Op::kBox: return ptx::copy_box(shared(kTokensAt), &map_, a, b, barrier(step.c));
      case Op::kBoxToPair:
        return ptx::copy_box_to_pair(shared(kTokensAt), &map_, a, b, barrier(step.c));
      case Op::kMultiply: return multiply(a, b);
      case Op::kCommit: return ptx::tensor_commit<kGroup>(barrier(a));
    }
  }

  void wait(HostMachine& m, uint32_t barrier, int warp) {
    const uint64_t start = m.clock();
    while (!ptx::barrier_test<2>(barrier, 0)) {
      if (m.clock() - start > m.wait_limit()) {
        emulation->stop({__FILE__, __LINE__}, "waits in vain");
      }
      m.pause();
    }
    int32_t& on_its_way = run_.on_its_way[warp];
    if (run_.num_ctas == 1 || on_its_way >= 0) return;
    on_its_way = static_cast<int32_t>(emulation_.cta(1 - warp / kWarps).copies.size());
  }

  void multiply(int column, bool accumulate) {
    const auto address = [](int at) { return ptx::tensor_address(0, 0, at); };
    ptx::tensor_copy_scales<kGroup>(address(kWeightScaleColumn),
                                    ptx::scales_descriptor(shared(kWeightScalesAt)));
    ptx::tensor_copy_scales<kGroup>(address(kTokenScaleColumn),
                                    ptx::scales_descriptor(shared(kTokenScalesAt)));
    ptx::mma_nvfp4<kGroup>(address(column), ptx::operand_descriptor(shared(0)),
                           ptx::operand_descriptor(shared(kTokensAt)),
                           ptx::nvfp4_instruction(kGroup * ptx::kMmaRows, kColumns), accumulate,
                           address(kWeightScaleColumn), address(kTokenScaleColumn));
  }

  const StepRun& run_;
  const RankBuffers none_{};
  World world_;
  Emulation emulation_;
  std::vector<Cta> ctas_;
  TensorMap map_;
  alignas(16) uint8_t codes_[kWeightScalesAt], scales_[2 * kScaleAtomBytes];
};

}  // namespace megamoe::emulator
