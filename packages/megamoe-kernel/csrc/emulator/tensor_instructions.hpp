// ptx/sm100.hpp for a host: tensor memory, as threads allocate and read it.
#pragma once

#include "emulator/barrier_instructions.hpp"

namespace megamoe::emulator {

// Every lane of a warp calls; the last one to come does it.
inline bool all_lanes_called(const Site& site) {
  CtaState& cta = emulation->cta();
  const int warp = emulation->thread().thread / kWarpSize;
  if (cta.allocating_lanes > 0 && cta.allocating_warp != warp) {
    emulation->stop(site, "allocates or frees while another warp does");
  }
  cta.allocating_warp = warp;
  if (++cta.allocating_lanes < kWarpSize) return false;
  cta.allocating_lanes = 0;
  return true;
}

// What the running thread may touch in tensor memory from now on: by its last fence.
inline Clock tensor_known() { return emulation->known(emulation->thread().tensor); }

inline void require(const Shadow::Found& found, const char* access, const char* what,
                    const Site& site) {
  if (found.conflict == Shadow::Conflict::kNone) return;
  emulation->stop(site, emulation->conflict(found, access, what) +
                            ", or without tcgen05.fence::after_thread_sync");
}

}  // namespace megamoe::emulator

namespace megamoe::ptx {

template <int kCtas>
inline void tensor_alloc(uint32_t to, int columns, Site site) {
  emulation->step();
  if (!emulator::all_lanes_called(site)) return;
  if (emulation->is(Mutant::kSmallAlloc)) columns = 32;
  if (emulation->is(Mutant::kLargeAlloc)) columns = 1024;
  if (emulation->is(Mutant::kOddAlloc)) columns -= 16;
  emulator::CtaState& cta = emulation->cta();
  uint32_t address = 0;
  if (const char* error = cta.tensor.allocate(columns, &address)) emulation->stop(site, error);
  std::memcpy(cta.shared.at(to), &address, 4);
}
template <int kCtas>
inline void tensor_no_more_allocs(Site) {
  emulation->step();
}
template <int kCtas>
inline void tensor_free(uint32_t address, int columns, Site site) {
  emulation->step();
  if (!emulator::all_lanes_called(site)) return;
  emulator::CtaState& cta = emulation->cta();
  cta.leaving = true;
  const emulator::Clock known = emulation->known_now();
  for (size_t agent = 0; agent < known.size(); ++agent) {
    if (known[agent] < cta.visitors[agent]) {
      emulation->stop(site, "may end before the other CTA's last arrival or copy");
    }
  }
  if (emulation->is(Mutant::kNoFree)) return;
  if (emulation->is(Mutant::kSmallAlloc)) columns = 32;
  if (const char* error = cta.tensor.free(address, columns)) emulation->stop(site, error);
}

inline void tensor_load_32x16(uint32_t from, float (&out)[16], Site site) {
  emulation->step();
  emulator::CtaState& cta = emulation->cta();
  emulator::Thread& self = emulation->thread();
  const int quarter = self.thread / kWarpSize % 4, t = self.thread % 4,
            g = self.thread % kWarpSize / 4;
  int first = static_cast<int>(from >> 16), column = static_cast<int>(from & 0xFFFF);
  if (emulation->is(Mutant::kOtherQuarter)) first = first ? 0 : 32;
  if (emulation->is(Mutant::kOtherColumns)) column += 8;
  if (first != 32 * quarter) emulation->stop(site, "reads lanes that its warp does not reach");
  if (!cta.tensor.has(first, 32, column, 16)) {
    emulation->stop(site, "reads tensor memory that is not allocated");
  }
  const emulator::Clock known = emulator::tensor_known();
  emulator::require(cta.tensor.held(first, 32, column, 16,
                                    [&](emulator::Shadow& shadow, size_t at, size_t bytes) {
                                      return shadow.read(at, bytes, self.agent, known, false);
                                    }),
                    "reads", "sums", site);
  // The products of a pair are its leader's.
  std::deque<emulator::Pending>& products =
      cta.products.empty() ? emulation->leader().products : cta.products;
  for (const emulator::Pending& product : products) {
    if (product.reaches(cta) && column < product.first_column + product.num_columns &&
        product.first_column < column + 16) {
      emulation->stop(site, "reads sums that are still being formed");
    }
  }
  self.handed_over = false;
  const bool stale = emulation->is(Mutant::kStaleRead);
  for (int i = 0; i < 16; ++i) {
    const int half = i / 8, r = i % 8 / 4, j = i % 4;
    const int lane = first + 16 * r + g + 8 * (j / 2), at = column + 8 * half + 2 * t + j % 2;
    if (!cta.tensor.written(lane, at)) emulation->stop(site, "reads sums that nobody has written");
    int to = i;
    if (emulation->is(Mutant::kGateUpSwapped)) to ^= 2;
    if (emulation->is(Mutant::kTokensSwapped)) to ^= 1;
    if (emulation->is(Mutant::kOutputsSwapped)) to ^= 4;
    out[to] = as_float(stale ? emulator::kPoison : cta.tensor.get(lane, at));
  }
}

}  // namespace megamoe::ptx
