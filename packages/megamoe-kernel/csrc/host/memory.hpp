// The buffers of all ranks, as the threads of a GPU see them: stores arrive late and in any order.
//
// A plain store waits in its CTA until chance, or a release of its CTA, lets it reach memory. A
// release within the device lets go what is for this rank; what is for peers then waits for a
// release for the system, by any CTA of the rank. Stores of the same bytes keep their order, and a
// CTA reads its own. Every access is also held against the clocks (clocks.hpp).
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "host/clocks.hpp"
#include "host/crew.hpp"
#include "megamoe/layout/rank_buffers.hpp"

namespace megamoe::host {

// Where an address is: in no buffer (weights, output), or at an offset of a rank's.
struct Spot {
  int rank = -1;
  size_t offset = 0;
};

class Memory {
 public:
  Memory(const RankBuffers& buffers, int num_ranks, int num_ctas, int num_agents, Random& random)
      : buffers_(buffers), num_ranks_(num_ranks), num_ctas_(num_ctas), random_(random),
        of_cta_(num_ranks * num_ctas), of_rank_(num_ranks) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      shadows_.emplace_back(buffers.layout.bytes, num_agents);
    }
  }

  Spot spot(const void* address) const {
    const uint8_t* at = static_cast<const uint8_t*>(address);
    for (int rank = 0; rank < num_ranks_; ++rank) {
      const uint8_t* base = buffers_.base[rank];
      if (at >= base && at < base + buffers_.layout.bytes) {
        return {rank, static_cast<size_t>(at - base)};
      }
    }
    return {};
  }

  Shadow& shadow(const Spot& spot) { return shadows_[spot.rank]; }

  // The field's index, and in text with the element: "ring_x[128] of rank 0".
  int field_at(const Spot& spot) const {
    int found = 0;
    while (found + 1 < kNumFields && buffers_.layout.offset[found + 1] <= spot.offset) ++found;
    return found;
  }
  std::string name(const Spot& spot) const {
    static constexpr BufferTable kTable = buffer_table({});
    const BufferRow& row = kTable.row[field_at(spot)];
    std::ostringstream text;
    text << row.name << "[" << (spot.offset - buffers_.layout.offset[field_at(spot)]) /
            type_bytes(row.type) << "] of rank " << spot.rank;
    return text.str();
  }

  void store(int rank, int cta, const Spot& to, void* address, const void* value, size_t bytes) {
    Stores& stores = of_cta_[rank * num_ctas_ + cta];
    Store& store = stores.emplace_back();
    store.remote = to.rank != rank;
    store.to = static_cast<uint8_t*>(address);
    store.bytes = bytes;
    std::memcpy(store.value, value, bytes);
    while (stores.size() > kMostWaiting) complete_one_of(stores);
  }

  // What the thread's own CTA stored there arrives before the thread reads it.
  void complete_own(int rank, int cta, const void* address, size_t bytes) {
    Stores& stores = of_cta_[rank * num_ctas_ + cta];
    const uint8_t* at = static_cast<const uint8_t*>(address);
    for (size_t i = 0; i < stores.size();) {
      const bool overlap = stores[i].to < at + bytes && at < stores[i].to + stores[i].bytes;
      overlap ? complete(stores, i) : void(++i);
    }
  }

  void release(int rank, int cta, Scope scope) {
    Stores& own = of_cta_[rank * num_ctas_ + cta];
    Stores& released = of_rank_[rank];
    for (Store& store : own) {
      if (store.remote && scope == Scope::kDevice) {
        released.push_back(store);
      } else {
        arrive(store);
      }
    }
    own.clear();
    if (scope == Scope::kSystem) {
      for (Store& store : released) arrive(store);
      released.clear();
    }
  }

  // One random store of all; false if none is waiting.
  bool complete_one() {
    const size_t count = of_cta_.size() + of_rank_.size();
    const size_t first = random_.below(static_cast<uint32_t>(count));
    for (size_t i = 0; i < count; ++i) {
      const size_t at = (first + i) % count;
      Stores& stores = at < of_cta_.size() ? of_cta_[at] : of_rank_[at - of_cta_.size()];
      if (stores.empty()) continue;
      complete_one_of(stores);
      return true;
    }
    return false;
  }

 private:
  static constexpr size_t kMostWaiting = 48;
  struct Store {
    uint8_t* to;
    size_t bytes;
    bool remote;
    uint8_t value[16];
  };
  using Stores = std::vector<Store>;

  void arrive(const Store& store) { std::memcpy(store.to, store.value, store.bytes); }

  void complete(Stores& stores, size_t i) {
    arrive(stores[i]);
    stores.erase(stores.begin() + static_cast<std::ptrdiff_t>(i));
  }

  void complete_one_of(Stores& stores) {
    size_t chosen = random_.below(static_cast<uint32_t>(stores.size()));
    for (size_t i = 0; i < chosen; ++i) {
      if (stores[i].to == stores[chosen].to) chosen = i;  // the same bytes keep their order
    }
    complete(stores, chosen);
  }

  const RankBuffers& buffers_;
  int num_ranks_, num_ctas_;
  Random& random_;
  std::vector<Stores> of_cta_, of_rank_;
  std::vector<Shadow> shadows_;
};

}  // namespace megamoe::host
