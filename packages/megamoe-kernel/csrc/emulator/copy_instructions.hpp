// ptx/sm100.hpp for a host: bulk and tensor copies to shared memory.
#pragma once

#include "emulator/barrier_instructions.hpp"

namespace megamoe::emulator {

// What stands in a TensorMap under the emulator: a matrix of bytes, and its boxes.
struct EmulatedMap {
  static constexpr uint32_t kMagic = 0x7E45A907u;
  uint32_t magic;
  const uint8_t* base;
  int64_t rows, row_bytes;
  int32_t box_rows, box_bytes;  // of 128 bytes, swizzled
  const void* other;            // the map of the other layer's tokens
};

// 16 bytes on their way: from where (null: zeros), to where.
struct Piece {
  const uint8_t* from;
  uint32_t to;
};

// What is wrong with reading a piece, empty if nothing. Words that nobody has written are garbage:
// rows of a block that stays partly empty.
inline std::string source_conflict(const Piece& piece, int agent, const Clock& known,
                                   bool (&garbage)[4]) {
  if (!piece.from) return "";
  World& world = emulation->world;
  const host::Spot spot = world.memory.spot(piece.from);
  for (size_t word = 0; spot.rank >= 0 && word < 4; ++word) {
    const Shadow::Found found =
        world.memory.shadow(spot).read(spot.offset + 4 * word, 4, agent, known, false);
    garbage[word] = found.conflict == Shadow::Conflict::kNeverWritten;
    if (found.conflict == Shadow::Conflict::kUnseenWrite) {
      return world.describe(found, " copies ", agent, world.memory.name(spot));
    }
  }
  return "";
}

// A piece arrives.
inline void land(const Pending& self, CtaState& cta, const Piece& piece, const Clock& by_proxy) {
  bool garbage[4] = {};
  const std::string text = source_conflict(piece, self.agent, by_proxy, garbage);
  if (!text.empty()) emulation->note(self, "is overtaken: " + text);
  if (piece.from) {
    std::memcpy(cta.shared.at(piece.to), piece.from, 16);
  } else {
    std::memset(cta.shared.at(piece.to), 0, 16);
  }
  for (uint32_t word = 0; word < 4; ++word) {
    cta.shared.cell(piece.to + 4 * word) = garbage[word] ? Cell::kGarbage : Cell::kWritten;
  }
}

// Its target is taken, from now on.
inline void claim(CtaState& cta, const Piece& piece, const Clock& known, const Site& site) {
  Emulation& e = *emulation;
  if (!cta.shared.has(piece.to, 16)) e.stop(site, "copies beyond shared memory");
  const Shadow::Found found = cta.shared.write(piece.to, 16, e.thread().agent, known);
  if (found.conflict != Shadow::Conflict::kNone) {
    e.stop(site, e.conflict(found, "copies to", "a stage"));
  }
  for (uint32_t word = 0; word < 4; ++word) {
    Cell& cell = cta.shared.cell(piece.to + 4 * word);
    if (cell == Cell::kInFlight) e.stop(site, "copies where another copy is on its way");
    cell = Cell::kInFlight;
  }
  std::memset(cta.shared.at(piece.to), 0xA5, 16);
}

// A thread begins to copy, to its own CTA or to the pair's other: what it reads and overwrites it
// has to know of. `signals`: the CTA whose barrier counts the bytes.
inline void begin_copy(const std::vector<Piece>& pieces, CtaState& cta, CtaState& signals,
                       uint32_t barrier_address, const Site& site) {
  Emulation& e = *emulation;
  const int agent = e.thread().agent;
  Barrier& barrier = barrier_at(signals, barrier_address, site);
  const Clock known = e.known_now(), by_proxy = e.known(e.thread().proxy);
  if (&cta != &e.cta()) {
    cta.visitors[static_cast<size_t>(agent)] = known[static_cast<size_t>(agent)];
  }
  if (cta.shared.has(pieces[0].to, 16) && cta.shared.cell(pieces[0].to) == Cell::kWritten) {
    e.stop(site, "copies to a stage whose content nobody has used");
  }
  for (const Piece& piece : pieces) {
    claim(cta, piece, known, site);
    bool garbage[4];
    const std::string text = source_conflict(piece, agent, by_proxy, garbage);
    if (!text.empty()) {
      const std::string why = text + ", or without a proxy fence" + e.where(site);
      e.world.crew.stop(e.world.crew.running(), why);
    }
  }
  const auto carry_out = [&cta, &barrier, by_proxy, pieces](const Pending& self) {
    for (const Piece& piece : pieces) land(self, cta, piece, by_proxy);
    const int64_t bytes = static_cast<int64_t>(16 * pieces.size());
    if (barrier.come(self.known, bytes)) emulation->world.crew.memory_changed();
  };
  // Whoever waits for the bytes knows of this copy, not of what its thread knew.
  Clock own{};
  own[static_cast<size_t>(agent)] = known[static_cast<size_t>(agent)];
  cta.copies.push_back({site, agent, agent, own, carry_out});
}
inline void begin_copy(const std::vector<Piece>& pieces, uint32_t barrier, const Site& site) {
  CtaState& cta = emulation->cta();
  begin_copy(pieces, cta, cta, barrier, site);
}
// In each CTA of a pair a copy of its own, which comes to its end when it likes.
inline void begin_copy_to_pair(const std::vector<Piece>& pieces, uint32_t barrier,
                               const Site& site) {
  int number = 0;
  for (CtaState* cta : emulation->group(2)) {
    const bool leads = number++ == 0;
    if (emulation->is(Mutant::kMaskLeader) && !leads) continue;
    if (emulation->is(Mutant::kMaskOther) && leads) continue;
    CtaState& signals = emulation->is(Mutant::kSignalOwn) ? emulation->cta() : *cta;
    begin_copy(pieces, *cta, signals, barrier, site);
    // Who has waited for one of the copies does not know of the one begun after it.
    emulation->world.clocks.publish(emulation->thread().agent);
  }
}

// Mutants that concern a copy's target or its barrier: those of the stage after.
inline void disturb(uint32_t& to, uint32_t& barrier) {
  CtaState& cta = emulation->cta();
  const auto next_barrier = cta.barriers.find(barrier + 16);
  if (next_barrier == cta.barriers.end() ||
      next_barrier->second.kind >= emulation->geometry.num_stage_barriers) {
    return;
  }
  if (emulation->is(Mutant::kOtherBarrier)) barrier += 16;
  if (emulation->is(Mutant::kOtherStage)) to += emulation->geometry.stage_bytes;
}

// Those that concern which box.
inline void disturb_box(EmulatedMap& map, uint32_t& to, int& x, int& y) {
  const Emulation& e = *emulation;
  const bool is_token = e.world.memory.spot(map.base).rank >= 0;
  if (!is_token) {
    if (e.is(Mutant::kWeightsStay)) x = 0;
    if (e.is(Mutant::kWeightRows)) y += 8;
    if (e.is(Mutant::kWeightExpert)) y = 0;
    return;
  }
  const bool leads = emulation->leads();
  if (e.is(Mutant::kOtherMap)) std::memcpy(&map, map.other, sizeof map);
  if (e.is(Mutant::kTokensStay)) x = 0;
  if (e.is(Mutant::kTokenRows)) y += y ? -map.box_rows : map.box_rows;
  if (e.is(Mutant::kSameTokens) && !leads) y -= map.box_rows;
  if (e.is(Mutant::kHalvesSwapped)) y += leads ? map.box_rows : -map.box_rows;
  if (e.is(Mutant::kBoxesOverlap)) to += e.geometry.tokens_at - e.geometry.in_stage(to);
}

// The bytes of a bulk copy; its mutants.
inline std::vector<Piece> pieces_of_bulk(uint32_t to, const void* from, int bytes,
                                         uint32_t& barrier, const Site& site) {
  const uint8_t* source = static_cast<const uint8_t*>(from);
  if (to % 16 || reinterpret_cast<uintptr_t>(source) % 16 || bytes % 16 || bytes <= 0) {
    emulation->stop(site, "copies what is no multiple of 16 bytes");
  }
  const bool is_token = emulation->world.memory.spot(source).rank >= 0;
  const uint8_t*& first = emulation->cta().first_scales;
  if (!is_token && emulation->geometry.in_stage(to) == emulation->geometry.weight_scales_at) {
    first = source;
  }
  if (emulation->is(Mutant::kScaleSourceStays) && !is_token) source = first;
  if (emulation->is(Mutant::kTokenScaleSource) && is_token) source += 512;
  disturb(to, barrier);
  std::vector<Piece> pieces;
  for (uint32_t at = 0; at < static_cast<uint32_t>(bytes); at += 16) {
    pieces.push_back({source + at, to + at});
  }
  return pieces;
}

// The bytes of a box; its mutants.
inline std::vector<Piece> pieces_of_box(uint32_t to, const void* map_address, int x, int y,
                                        uint32_t& barrier, const Site& site) {
  EmulatedMap map;
  std::memcpy(&map, map_address, sizeof map);
  if (reinterpret_cast<uintptr_t>(map_address) % 64 || map.magic != EmulatedMap::kMagic) {
    emulation->stop(site, "copies by a tensor map that is none");
  }
  if (to % 1024) emulation->stop(site, "copies a swizzled box to no multiple of 1024");
  disturb_box(map, to, x, y);
  disturb(to, barrier);
  std::vector<Piece> pieces;
  for (int row = 0; row < map.box_rows; ++row) {
    for (int at = 0; at < map.box_bytes; at += 16) {
      const bool inside = y + row < map.rows && x + at < map.row_bytes && y + row >= 0 && x >= 0;
      const uint8_t* from = inside ? map.base + (y + row) * map.row_bytes + x + at : nullptr;
      uint32_t target = to + static_cast<uint32_t>(row * map.box_bytes + at);
      if (!emulation->is(Mutant::kNoSwizzle)) target = swizzled(target);
      pieces.push_back({from, target});
    }
  }
  return pieces;
}

}  // namespace megamoe::emulator

namespace megamoe::ptx {

inline void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier, Site site) {
  emulation->step();
  const auto pieces = emulator::pieces_of_bulk(to, from, bytes, barrier, site);
  emulator::begin_copy(pieces, barrier, site);
}
inline void copy_bulk_to_pair(uint32_t to, const void* from, int bytes, uint32_t barrier,
                              Site site) {
  emulation->step();
  const auto pieces = emulator::pieces_of_bulk(to, from, bytes, barrier, site);
  emulator::begin_copy_to_pair(pieces, barrier, site);
}
inline void copy_box(uint32_t to, const void* map, int x, int y, uint32_t barrier, Site site) {
  emulation->step();
  const auto pieces = emulator::pieces_of_box(to, map, x, y, barrier, site);
  emulator::begin_copy(pieces, barrier, site);
}
inline void copy_box_to_pair(uint32_t to, const void* map, int x, int y, uint32_t barrier,
                             Site site) {
  emulation->step();
  const auto pieces = emulator::pieces_of_box(to, map, x, y, barrier, site);
  emulator::begin_copy_to_pair(pieces, barrier, site);
}

}  // namespace megamoe::ptx
