// A CTA's tensor memory: 128 lanes of 512 columns of 32 bits, of which a part is allocated.
//
// The clocks are kept for each quarter of the lanes and column: what one warp can reach.
#pragma once

#include <bitset>
#include <cstdint>
#include <vector>

#include "host/clocks.hpp"
#include "megamoe/ptx/descriptors.hpp"

namespace megamoe::emulator {

using host::Clock;
using host::Shadow;

class TensorMemory {
 public:
  static constexpr int kLanes = ptx::kTensorLanes, kColumns = ptx::kTensorColumns;
  static constexpr int kQuarter = kLanes / 4;

  explicit TensorMemory(int num_agents)
      : words_(kLanes * kColumns),
        written_(kLanes * kColumns),
        shadow_(4 * kColumns * 4, num_agents) {}

  // Null, or what is wrong.
  const char* allocate(int columns, uint32_t* address) {
    if (columns < 32 || columns > kColumns || (columns & (columns - 1))) {
      return "allocates a number of columns that is no power of two from 32 to 512";
    }
    for (int first = 0; first + columns <= kColumns; first += columns) {
      bool is_free = true;
      for (int i = 0; i < columns; ++i) is_free = is_free && !allocated_[first + i];
      if (!is_free) continue;
      for (int i = 0; i < columns; ++i) allocated_.set(first + i);
      std::fill(written_.begin(), written_.end(), 0);
      *address = static_cast<uint32_t>(first);
      return nullptr;
    }
    return "allocates more tensor memory than is left";
  }
  const char* free(uint32_t address, int columns) {
    for (int i = 0; i < columns; ++i) {
      const size_t at = address + static_cast<uint32_t>(i);
      if (at >= kColumns || !allocated_[at]) return "frees tensor memory that is not allocated";
      allocated_.reset(at);
    }
    return nullptr;
  }
  bool any_allocated() const { return allocated_.any(); }
  bool has(int lane, int num_lanes, int column, int num_columns) const {
    if (lane + num_lanes > kLanes || column + num_columns > kColumns) return false;
    for (int i = 0; i < num_columns; ++i) {
      if (!allocated_[static_cast<size_t>(column + i)]) return false;
    }
    return true;
  }

  bool written(int lane, int column) const { return written_[index(lane, column)]; }
  uint32_t get(int lane, int column) const { return words_[index(lane, column)]; }
  void set(int lane, int column, uint32_t word) {
    words_[index(lane, column)] = word;
    written_[index(lane, column)] = 1;
  }

  template <class Access>
  Shadow::Found held(int first_lane, int lanes, int column, int columns, Access access) {
    for (int quarter = first_lane / kQuarter; quarter <= (first_lane + lanes - 1) / kQuarter;
         ++quarter) {
      const size_t at = static_cast<size_t>((quarter * kColumns + column) * 4);
      const Shadow::Found found = access(shadow_, at, static_cast<size_t>(columns * 4));
      if (found.conflict != Shadow::Conflict::kNone) return found;
    }
    return {};
  }

 private:
  static size_t index(int lane, int column) {
    return static_cast<size_t>(lane * kColumns + column);
  }

  std::vector<uint32_t> words_;
  std::vector<uint8_t> written_;
  std::bitset<kColumns> allocated_;
  Shadow shadow_;
};

}  // namespace megamoe::emulator
