// What the tests call, by ctypes: whole layers on emulated ranks, and the small parts one by one.
#include <algorithm>
#include <cstring>

#include "host/layer_run.hpp"
#include "megamoe/stages/place_order.hpp"

using namespace megamoe;
using namespace megamoe::host;

namespace {

void copy_text(const std::string& text, char* to, int capacity) {
  const size_t length = std::min(text.size(), static_cast<size_t>(capacity - 1));
  std::memcpy(to, text.data(), length);
  to[length] = 0;
}

template <class Format>
int run(const LayerRun& arguments, char* message, int capacity) {
  if (const char* error = problem_error<Format>(arguments.problem)) {
    copy_text(error, message, capacity);
    return 2;
  }
  const auto stopped = LayerRunner<Format>(arguments).run();
  copy_text(stopped.value_or(""), message, capacity);
  return stopped ? 1 : 0;
}

// A machine whose stores are not of a rank's buffer.
struct IntoPlainMemory : HostMachine {
  using HostMachine::HostMachine;
  template <class T>
  void store(T* to, T value) {
    *to = value;
  }
};

// f(machine, lane) in each lane of one emulated warp.
template <class M, class F>
void run_warp(uint64_t seed, F f) {
  const RankBuffers none{};
  World world(seed, none, 1, 1, 1);
  Cta cta;
  cta.warps.resize(1);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    world.crew.add([&, lane] {
      M m(world, cta, lane, 0, 0, lane);
      f(m, lane);
    });
  }
  world.crew.run([] { return false; });
}

// As (layer, block, part); returns where the next one goes.
int32_t* put_task(const Task& task, int32_t* out) {
  *out++ = task.layer == Layer::kL1 ? 1 : 2;
  *out++ = task.block;
  *out++ = task.part;
  return out;
}

}  // namespace

extern "C" {

// 0: all threads ended, perhaps with failure records. 1: stopped, 2: not a problem that can be run;
// message says why.
int megamoe_run_layer(const LayerRun* arguments, int nvfp4, char* message, int capacity) {
  return nvfp4 ? run<Nvfp4>(*arguments, message, capacity)
               : run<Bf16>(*arguments, message, capacity);
}

// The number of a field of the buffer, -1 if there is none of this name.
int megamoe_field(const char* name) {
  static constexpr BufferTable kTable = buffer_table({});
  for (int i = 0; i < kTable.count; ++i) {
    if (!std::strcmp(kTable.row[i].name, name)) return i;
  }
  return -1;
}

// One CTA's tasks as put_task has them; returns how many, at most capacity.
int megamoe_tasks(const Problem* problem, int num_blocks, int first, int stride, int32_t* out,
                  int capacity) {
  TaskCursor<Problem> cursor(*problem, num_blocks, first, stride);
  int count = 0;
  for (Task task; count < capacity && cursor.next(task); ++count) out = put_task(task, out);
  return count;
}

// Tasks of these numbers, which grow; returns how many there are.
int megamoe_tasks_at(const Problem* problem, int num_blocks, const int32_t* numbers, int count,
                     int32_t* out) {
  TaskList<Problem> list(*problem, num_blocks, 0);
  int found = 0;
  for (Task task; found < count && list.at(numbers[found], task); ++found) out = put_task(task, out);
  return found;
}

void megamoe_exp(const float* x, float* out, int64_t n) {
  std::transform(x, x + n, out, exp_above_minus_86);
}

void megamoe_swiglu(const float* gate, const float* up, float limit, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = swiglu(gate[i], up[i], limit);
}

void megamoe_e2m1_from_fp32(const float* x, uint8_t* out, int64_t n) {
  std::transform(x, x + n, out, e2m1_from_fp32);
}
void megamoe_ue4m3_from_fp32(const float* x, uint8_t* out, int64_t n) {
  std::transform(x, x + n, out, ue4m3_from_fp32);
}
void megamoe_bf16_from_fp32(const float* x, uint16_t* out, int64_t n) {
  std::transform(x, x + n, out, bf16_from_fp32);
}
void megamoe_fp32_from_e2m1(const uint8_t* code, float* out, int64_t n) {
  std::transform(code, code + n, out, fp32_from_e2m1);
}
void megamoe_fp32_from_ue4m3(const uint8_t* byte, float* out, int64_t n) {
  std::transform(byte, byte + n, out, fp32_from_ue4m3);
}

// Blocks of 16 values to NVFP4 by one emulated warp, four blocks at a time; num_blocks is a multiple
// of four.
void megamoe_requantize(const float* x, float input_scale, uint8_t* codes, uint8_t* scales,
                        int64_t num_blocks, uint64_t seed) {
  run_warp<HostMachine>(seed, [&](HostMachine& m, int lane) {
    for (int64_t block = lane % 4; block < num_blocks; block += 4) {
      const int64_t at = block * kBlockSize + lane / 4 * 2;
      const RequantizedPair pair = requantize_pair(m, x[at], x[at + 1], input_scale);
      codes[at / 2] = pair.codes;
      scales[block] = pair.scale;
    }
  });
}

// Rows of BF16 to the order of columns that sm_90a multiplies in, by one emulated warp; the number
// of chunks is a multiple of 32.
void megamoe_place_order(const Chunk* from, uint8_t* to, int64_t num_chunks, uint64_t seed) {
  run_warp<IntoPlainMemory>(seed, [&](IntoPlainMemory& m, int lane) {
    for (int64_t idx = lane; idx < num_chunks; idx += kWarpSize) {
      InPlaceOrder::store(m, to, static_cast<int>(idx), from[idx], true);
    }
  });
}

// Where the word of (row, word_idx) is among a block's.
int megamoe_scale_word(const Problem* problem, int row, int word_idx) {
  return scale_word(*problem, row, word_idx);
}
}
