// A CTA's tensor memory: 128 lanes of 512 columns of 32 bits, of which a part is allocated.
//
// The clocks are kept for each quarter of the lanes and column: what one warp can reach.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <vector>

#include "host/clocks.hpp"
#include "megamoe/ptx/descriptors.hpp"

namespace megamoe::emulator {

using host::Clock;
using host::Shadow;

// When something was done, by its agent's own clock.
struct Stamp {
  int agent = 0;
  uint32_t time = 0;

  bool is_known(const Clock& known) const { return known[static_cast<size_t>(agent)] >= time; }
};

class TensorMemory {
 public:
  static constexpr int kLanes = ptx::kTensorLanes, kColumns = ptx::kTensorColumns;
  static constexpr int kQuarter = kLanes / 4;

  explicit TensorMemory(int num_agents)
      : words_(kLanes * kColumns),
        written_(kLanes * kColumns),
        shadow_(4 * kColumns * 4, num_agents) {}

  // Null, or what is wrong.
  const char* allocate(int columns, const Stamp& by, uint32_t* address) {
    if (columns < 32 || columns > kColumns || (columns & (columns - 1))) {
      return "allocates a number of columns that is no power of two from 32 to 512";
    }
    for (int first = 0; first + columns <= kColumns; first += columns) {
      bool is_free = true;
      for (int i = 0; i < columns; ++i) is_free = is_free && !allocated_[first + i];
      if (!is_free) continue;
      for (int i = 0; i < columns; ++i) {
        allocated_.set(static_cast<size_t>(first + i));
        allocation_[static_cast<size_t>(first + i)] = by;
      }
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
  // Of columns that are allocated: whether who has this clock knows that they are.
  bool is_known(int column, int num_columns, const Clock& known) const {
    for (int i = 0; i < num_columns; ++i) {
      if (!allocation_[static_cast<size_t>(column + i)].is_known(known)) return false;
    }
    return true;
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
  std::array<Stamp, kColumns> allocation_{};
  Shadow shadow_;
};

}  // namespace megamoe::emulator
