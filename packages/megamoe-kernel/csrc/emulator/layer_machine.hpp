// The Machine of a thread of the layer for sm_100a: host::HostMachine, and the place for a mistake
// in the neutral stages, whose source has no trace of it.
#pragma once

#include <type_traits>

#include "emulator/emulation.hpp"
#include "megamoe/stages/l1_epilogue.hpp"

namespace megamoe::emulator {

class LayerMachine : public host::HostMachine {
 public:
  explicit LayerMachine(const host::HostMachine& machine) : HostMachine(machine) {}

  template <class T>
  T load(const T* from) {
    const T value = HostMachine::load(from);
    if constexpr (std::is_same_v<T, float>) {
      if (emulation->is(Mutant::kEarlyTopk)) return note_weight(from, value);
    }
    return value;
  }

  uint32_t load_acquire(const uint32_t* from, Scope scope) {
    if (skips(from)) return *from + 0x40000000u;  // beyond any count that is waited for
    return HostMachine::load_acquire(from, scope);
  }

  bool sync_all(int barrier, int num_threads, bool flag) {
    // The epilogue meets before a task, when its tile is written, and when it is stored.
    constexpr int kEpilogueBarrier = 2;
    if (barrier == kEpilogueBarrier && ++epilogue_meetings_ % 3 == 2 &&
        emulation->is(Mutant::kTileUnmet)) {
      return flag;
    }
    return HostMachine::sync_all(barrier, num_threads, flag);
  }

  // The top-k weight of the token whose scale the thread has read last.
  float topk_weight() const { return topk_weight_; }

 private:
  // A mutant's wait for a block's inputs that its role leaves out.
  bool skips(const uint32_t* from) const {
    const Emulation& e = *emulation;
    const int warp = thread_idx() / kWarpSize;
    const bool copies = warp == e.geometry.tokens_warp, reads = warp >= e.geometry.epilogue_warp;
    const bool tokens = (copies && e.is(Mutant::kCopySkipsTokens)) ||
                        (reads && e.is(Mutant::kEpilogueSkipsTokens));
    const bool hidden = (copies && e.is(Mutant::kCopySkipsHidden)) ||
                        (reads && e.is(Mutant::kEpilogueSkipsHidden));
    if (!tokens && !hidden) return false;
    const int at = e.world.memory.field_at(e.world.memory.spot(from));
    return at == (tokens ? field("ring_arrived") : field("ring_l1_done"));
  }

  // L1's epilogue reads its token's scale first; combine finds weights of 1.
  float note_weight(const float* from, float value) {
    const World& world = emulation->world;
    const Fields mine{world.buffers, rank_idx()};
    const host::Spot spot = world.memory.spot(from);
    const int at = spot.rank < 0 ? -1 : world.memory.field_at(spot);
    if (at == field("topk_weights")) return 1.0f;
    if (at == field("ring_x_scale")) {
      const Source source = mine.ring_source()[from - mine.ring_x_scale()];
      const Fields home{world.buffers, static_cast<int>(source.rank)};
      topk_weight_ = source.slot & kToOutput ? 1.0f : home.topk_weights()[source.slot];
    }
    return value;
  }

  float topk_weight_ = 1.0f;
  int epilogue_meetings_ = 0;
};
static_assert(Machine<LayerMachine>);

// What the stages find in place of megamoe::requantize_pair, by the machine's namespace.
inline RequantizedPair requantize_pair(LayerMachine& m, float even, float odd, float input_scale) {
  if (emulation->is(Mutant::kEarlyTopk)) {
    even = mul_rn(m.topk_weight(), even);
    odd = mul_rn(m.topk_weight(), odd);
  }
  return megamoe::requantize_pair<LayerMachine>(m, even, odd, input_scale);
}

}  // namespace megamoe::emulator
