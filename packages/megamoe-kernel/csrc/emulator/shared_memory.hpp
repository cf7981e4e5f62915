// A CTA's shared memory as the copy engine and the tensor cores see it.
//
// Bytes are real: ordinary accesses of the kernel go to them directly; those of the epilogues' tile
// are watched by its machine (host/machine.hpp). What asynchronous operations write and read is too: each 4 bytes have a state, each 16 the clocks of the
// last accesses (host/clocks.hpp). A copy's target counts as written by the thread that began it,
// at the time it did, so whoever did not wait for it does not know of it, however early it came.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "host/clocks.hpp"

namespace megamoe::emulator {

using host::Clock;
using host::Shadow;

enum class Cell : uint8_t {
  kUnwritten,
  kInFlight,  // a copy is on its way
  kGarbage,   // copied from memory that nobody had written: may be multiplied, not used
  kWritten,
  kRead,  // and used since
};

class SharedMemory {
 public:
  // Where a CTA's part begins: not at 0, as on a GPU.
  static constexpr uint32_t kBase = 1024;

  SharedMemory(size_t bytes, int num_agents)
      : size_((bytes + 1023) / 1024 * 1024),
        storage_(size_ + 1024),
        cells_(size_ / 4),
        shadow_(size_ / 4, num_agents) {
    clear();
  }

  void clear() {
    std::memset(base(), 0xA5, size_);
    std::fill(cells_.begin(), cells_.end(), Cell::kUnwritten);
  }

  uint8_t* base() {
    const uintptr_t at = reinterpret_cast<uintptr_t>(storage_.data());
    return storage_.data() + (1024 - at % 1024) % 1024;
  }
  bool has(uint32_t address, size_t bytes) const {
    return address >= kBase && address - kBase + bytes <= size_;
  }
  uint8_t* at(uint32_t address) { return base() + (address - kBase); }
  Cell& cell(uint32_t address) { return cells_[(address - kBase) / 4]; }

  // Held against the clocks; address and bytes are multiples of 16.
  Shadow::Found read(uint32_t address, size_t bytes, int agent, const Clock& known) {
    return shadow_.read((address - kBase) / 4, bytes / 4, agent, known, false);
  }
  Shadow::Found write(uint32_t address, size_t bytes, int agent, const Clock& known) {
    return shadow_.write((address - kBase) / 4, bytes / 4, agent, known, false);
  }
  // Who copied what is there now, and when.
  Shadow::Write last_write(uint32_t address) const {
    return shadow_.last_write((address - kBase) / 4);
  }

 private:
  size_t size_;
  std::vector<uint8_t> storage_;
  std::vector<Cell> cells_;
  Shadow shadow_;  // counts in 16 bytes: what is called a byte there is a word here
};

// Bits 4 to 6 of an address are exchanged by its bits 7 to 9: the swizzle of 128 bytes.
inline uint32_t swizzled(uint32_t address) { return address ^ ((address >> 7 & 7u) << 4); }

}  // namespace megamoe::emulator
