// mbarriers: phases that end when all have arrived and all expected bytes have come.
#pragma once

#include <cstdint>

#include "host/clocks.hpp"

namespace megamoe::emulator {

using host::Clock;

struct Barrier {
  int kind = 0;  // its place in the order of initialization
  int expected = 0;
  bool fenced = false;
  int initialized_by = -1;
  uint32_t initialized_at = 0;  // by that agent's clock
  int pending = 0;
  int64_t bytes = 0;  // expected and not come
  uint32_t phase = 0;
  Clock arrived{};   // what those knew who arrived in this phase
  Clock complete{};  // and in all phases before
  // The same of threads of another CTA: only a wait of the cluster's scope learns it.
  Clock arrived_far{}, complete_far{};

  // Each of these: true if the phase ends.
  bool arrive(const Clock& known, int64_t more_bytes) {
    host::join(arrived, known);
    bytes += more_bytes;
    --pending;
    return flip();
  }
  bool arrive_from_far(const Clock& known) {
    host::join(arrived_far, known);
    --pending;
    return flip();
  }
  bool come(const Clock& known, int64_t come_bytes) {
    host::join(arrived, known);
    bytes -= come_bytes;
    return flip();
  }
  bool is_complete(uint32_t parity) const { return (phase & 1u) != parity; }

 private:
  bool flip() {
    if (pending > 0 || bytes != 0) return false;
    ++phase;
    pending = expected;
    host::join(complete, arrived);
    host::join(complete_far, arrived_far);
    return true;
  }
};

}  // namespace megamoe::emulator
