// ptx/sm100.hpp for a host: tensor memory, as threads allocate, read and write it.
#pragma once

#include "emulator/barrier_instructions.hpp"

namespace megamoe::emulator {

// Every lane of a warp calls (.sync.aligned); the last one to come does it for all.
template <class Act>
void in_whole_warp(const Site& site, Act act) {
  Emulation& e = *emulation;
  CtaState& cta = e.cta();
  const int warp = e.thread().thread / kWarpSize;
  if (cta.allocating.arrived > 0 && cta.allocating_warp != warp) {
    e.stop(site, "allocates or frees while another warp does");
  }
  cta.allocating_warp = warp;
  e.world.crew.meet(e.world.crew.running(), cta.allocating, kWarpSize, act);
}

// What the running thread may touch in tensor memory from now on: by its last fence.
inline Clock tensor_known() { return emulation->known(emulation->thread().tensor); }

inline void require(const Shadow::Found& found, const char* access, const char* what,
                    const Site& site) {
  if (found.conflict == Shadow::Conflict::kNone) return;
  emulation->stop(site, emulation->conflict(found, access, what) +
                            ", or without tcgen05.fence::after_thread_sync");
}

// Columns that an instruction names are allocated, and it can know that.
inline void require_allocated(CtaState& cta, int lane, int lanes, int column, int columns,
                              const Clock& known, const char* does, const Site& site) {
  if (!cta.tensor.has(lane, lanes, column, columns)) {
    emulation->stop(site, std::string(does) + " tensor memory that is not allocated");
  }
  if (!cta.tensor.is_known(column, columns, known)) {
    emulation->stop(site, std::string(does) +
                              " tensor memory without having waited for its allocation, or without "
                              "tcgen05.fence::after_thread_sync");
  }
}

// All tcgen05 instructions of a launch are for one CTA, or all for a pair.
template <int kCtas>
void require_same_group(const Site& site) {
  int& group = emulation->cta().cta_group;
  if (group != 0 && group != kCtas) emulation->stop(site, "has another cta_group than before");
  group = kCtas;
}

inline void allocate(uint32_t to, int columns, const Site& site) {
  CtaState& cta = emulation->cta();
  if (!cta.may_allocate) emulation->stop(site, "allocates after it gave up the permit");
  const size_t agent = static_cast<size_t>(emulation->thread().agent);
  const Stamp now{emulation->thread().agent, emulation->known_now()[agent]};
  uint32_t address = 0;
  if (const char* error = cta.tensor.allocate(columns, now, &address)) emulation->stop(site, error);
  std::memcpy(cta.shared.at(to), &address, 4);
  cta.tensor_words[to] = now;
}

// Nobody uses what is freed: all reads and products are known to be over.
inline void require_unused(CtaState& cta, int column, int columns, const Clock& known,
                           const Site& site) {
  const int agent = emulation->thread().agent;
  require(cta.tensor.held(0, TensorMemory::kLanes, column, columns,
                          [&](Shadow& shadow, size_t at, size_t bytes) {
                            return shadow.write(at, bytes, agent, known, false);
                          }),
          "frees", "tensor memory", site);
}

inline void free(uint32_t address, int columns, const Site& site) {
  CtaState& cta = emulation->cta();
  Thread& self = emulation->thread();
  cta.leaving = true;
  const Clock known = emulation->known_now();
  for (size_t agent = 0; agent < known.size(); ++agent) {
    if (known[agent] < cta.visitors[agent]) {
      emulation->stop(site, "may end before the other CTA's last arrival or copy");
    }
  }
  if (emulation->is(Mutant::kNoFree)) return;
  if (emulation->is(Mutant::kSmallAlloc)) columns = 32;
  if (emulation->is(Mutant::kNoFenceFree)) self.tensor = self.tensor_before;
  if (emulation->is(Mutant::kEarlyFreeing)) self.tensor = self.at_read;
  const int column = static_cast<int>(address);
  if (cta.tensor.has(0, TensorMemory::kLanes, column, columns) && !emulation->given_up()) {
    require_unused(cta, column, columns, tensor_known(), site);
  }
  if (const char* error = cta.tensor.free(address, columns)) emulation->stop(site, error);
}

// Where value i of 16 of a warp's lane is in 32 lanes by 16 columns of tensor memory.
struct Place {
  int lane, column;
};
inline Place place_in_32x16(int lane, int i) {
  const int half = i / 8, r = i % 8 / 4, j = i % 4, t = lane % 4, g = lane / 4;
  return {16 * r + g + 8 * (j / 2), 8 * half + 2 * t + j % 2};
}

// A warp reads or writes 32 lanes by 16 columns: they are its own quarter, allocated, and nobody
// uses them without order. `access`: Shadow's read or write.
template <class Access>
void require_32x16(int first, int column, Access access, const char* does, const Site& site) {
  CtaState& cta = emulation->cta();
  const Thread& self = emulation->thread();
  if (first != TensorMemory::kQuarter * (self.thread / kWarpSize % 4)) {
    emulation->stop(site, std::string(does) + " lanes that its warp does not reach");
  }
  const Clock known = tensor_known();
  require_allocated(cta, first, 32, column, 16, known, does, site);
  require(cta.tensor.held(first, 32, column, 16,
                          [&](Shadow& shadow, size_t at, size_t bytes) {
                            return (shadow.*access)(at, bytes, self.agent, known, false);
                          }),
          does, "sums", site);
  // The products of a pair are its leader's.
  const std::deque<Pending>& products =
      cta.products.empty() ? emulation->leader().products : cta.products;
  for (const Pending& product : products) {
    if (product.reaches(cta) && column < product.first_column + product.num_columns &&
        product.first_column < column + 16) {
      emulation->stop(site, std::string(does) + " sums that are still being formed");
    }
  }
}

}  // namespace megamoe::emulator

namespace megamoe::ptx {

template <int kCtas>
inline void tensor_alloc(uint32_t to, int columns, Site site) {
  emulation->step();
  emulator::require_same_group<kCtas>(site);
  if (emulation->is(Mutant::kSmallAlloc)) columns = 32;
  if (emulation->is(Mutant::kLargeAlloc)) columns = 1024;
  if (emulation->is(Mutant::kOddAlloc)) columns -= 16;
  const auto allocate = [=] { emulator::allocate(to, columns, site); };
  emulator::in_whole_warp(site, [&] {
    if (emulation->is(Mutant::kAllocAfterPermit)) emulation->cta().may_allocate = false;
    if (!emulation->is(Mutant::kLateAlloc)) return allocate();
    emulation->cta().allocate_late = allocate;
  });
}
template <int kCtas>
inline void tensor_no_more_allocs(Site site) {
  emulation->step();
  emulator::require_same_group<kCtas>(site);
  emulator::in_whole_warp(site, [] {
    if (!emulation->is(Mutant::kLateAlloc)) emulation->cta().may_allocate = false;
  });
}
inline uint32_t tensor_allocated(uint32_t from, Site site) {
  emulation->step();
  emulator::CtaState& cta = emulation->cta();
  const auto found = cta.tensor_words.find(from);
  if (found == cta.tensor_words.end()) {
    emulation->stop(site, "reads an address of tensor memory that nobody has stored");
  }
  if (!found->second.is_known(emulation->known_now())) {
    emulation->stop(site, "reads tensor memory's address without having waited for it");
  }
  uint32_t address;
  std::memcpy(&address, cta.shared.at(from), 4);
  return address;
}
template <int kCtas>
inline void tensor_free(uint32_t address, int columns, Site site) {
  emulation->step();
  emulator::require_same_group<kCtas>(site);
  emulator::in_whole_warp(site, [&] { emulator::free(address, columns, site); });
}

inline void tensor_load_32x16(uint32_t from, float (&out)[16], Site site) {
  emulation->step();
  emulator::CtaState& cta = emulation->cta();
  emulator::Thread& self = emulation->thread();
  int first = static_cast<int>(from >> 16), column = static_cast<int>(from & 0xFFFF);
  if (emulation->is(Mutant::kOtherQuarter)) first = first ? 0 : 32;
  if (emulation->is(Mutant::kOtherColumns)) column += 8;
  emulator::require_32x16(first, column, &emulator::Shadow::read, "reads", site);
  self.at_read = emulation->known_now();
  self.handed_over = false;
  const bool stale = emulation->is(Mutant::kStaleRead);
  for (int i = 0; i < 16; ++i) {
    const emulator::Place place = emulator::place_in_32x16(self.thread % kWarpSize, i);
    const int lane = first + place.lane, at = column + place.column;
    if (!cta.tensor.written(lane, at)) emulation->stop(site, "reads sums that nobody has written");
    int to = i;
    if (emulation->is(Mutant::kGateUpSwapped)) to ^= 2;
    if (emulation->is(Mutant::kTokensSwapped)) to ^= 1;
    if (emulation->is(Mutant::kOutputsSwapped)) to ^= 4;
    out[to] = as_float(stale ? emulator::kPoison : cta.tensor.get(lane, at));
  }
}

// Each lane for itself knows what it may overwrite; the last one to come stores for all, so that
// none goes on before all is there.
inline void tensor_store_32x16(uint32_t to, const float (&values)[16], Site site) {
  emulation->step();
  emulator::CtaState& cta = emulation->cta();
  emulator::Thread& self = emulation->thread();
  const int first = static_cast<int>(to >> 16), column = static_cast<int>(to & 0xFFFF);
  emulator::require_32x16(first, column, &emulator::Shadow::write, "stores to", site);
  self.handed_over = false;
  emulator::Storing& storing = cta.storing[self.thread / kWarpSize];
  if (storing.meeting.arrived == 0) storing.to = to;
  if (storing.to != to) emulation->stop(site, "stores elsewhere than its warp's lanes");
  storing.values[static_cast<size_t>(self.thread % kWarpSize)] = values;
  emulation->world.crew.meet(emulation->world.crew.running(), storing.meeting, kWarpSize, [&] {
    for (int lane = 0; lane < kWarpSize; ++lane) {
      for (int i = 0; i < 16; ++i) {
        const emulator::Place place = emulator::place_in_32x16(lane, i);
        const float value = storing.values[static_cast<size_t>(lane)][i];
        cta.tensor.set(first + place.lane, column + place.column, as_bits(value));
      }
    }
  });
}

}  // namespace megamoe::ptx
