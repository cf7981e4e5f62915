// The Machine that is one emulated thread (megamoe/common/machine.hpp says what it must do).
//
// It also looks for what a GPU would pass over in silence: lanes that do different warp operations,
// barriers whose users disagree on their size, accesses without order, memory that nobody wrote.
#pragma once

#include <array>
#include <cstring>
#include <optional>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "host/faults.hpp"
#include "host/memory.hpp"

namespace megamoe::host {

struct Warp {
  Meeting meeting;
  const char* operation = nullptr;
  std::array<uint32_t, kWarpSize> value{};
  // Of the last operation and the one before: a lane may begin the next while others still read.
  std::array<std::array<uint32_t, kWarpSize>, 2> result{};
  int round = 0;
};

struct NamedBarrier {
  Meeting meeting;
  int num_threads = 0;
  bool all = true;
  std::array<bool, 2> result{};
  int round = 0;
  std::vector<int> agents;
};

// The epilogues' tile, watched byte by byte: to the shadow each is a word.
struct WatchedTile {
  const uint8_t* base = nullptr;
  size_t bytes = 0;
  std::optional<Shadow> shadow;

  // What it held is forgotten.
  void watch(const uint8_t* at, size_t size, int num_agents) {
    base = at, bytes = size;
    shadow.emplace(4 * size, num_agents);
  }
  bool has(const void* at, size_t size) const {
    const auto* byte = static_cast<const uint8_t*>(at);
    return byte >= base && byte + size <= base + bytes;
  }
  size_t offset(const void* at) const {
    return 4 * static_cast<size_t>(static_cast<const uint8_t*>(at) - base);
  }
};

struct Cta {
  std::array<NamedBarrier, 16> barriers;
  std::vector<Warp> warps;
  std::vector<uint32_t> words;  // shared memory: see impl/shared_memory.hpp
  std::vector<Chunk> tile;
  WatchedTile watched;
};

// What all threads of a run share.
struct World {
  Crew crew;
  Memory memory;
  Clocks clocks;
  Fault fault;
  const RankBuffers& buffers;
  int num_ctas, warps_per_cta, num_ranks;
  int num_engines;  // of a CTA: 1 if it has tensor cores, whose accesses are nobody else's

  World(uint64_t seed, const RankBuffers& ranks, int num_ranks, int num_ctas, int warps_per_cta,
        int num_engines = 0)
      : crew(seed),
        memory(ranks, num_ranks, num_ctas,
               agents_in(num_ranks, num_ctas, warps_per_cta, num_engines), crew.random),
        clocks(agents_in(num_ranks, num_ctas, warps_per_cta, num_engines)), buffers(ranks),
        num_ctas(num_ctas), warps_per_cta(warps_per_cta), num_ranks(num_ranks),
        num_engines(num_engines) {}

  static constexpr int agents_in(int ranks, int ctas, int warps, int engines) {
    return ranks * (1 + ctas * (warps + engines));
  }
  int num_agents() const { return agents_in(num_ranks, num_ctas, warps_per_cta, num_engines); }

  // A rank's host comes first among its agents, then its warps, then its tensor cores.
  int host_agent(int rank) const {
    return agents_in(rank, num_ctas, warps_per_cta, num_engines);
  }
  int agent(int rank, int cta, int warp) const {
    return host_agent(rank) + 1 + cta * warps_per_cta + warp;
  }
  int engine(int rank, int cta) const {
    return host_agent(rank) + 1 + num_ctas * warps_per_cta + cta;
  }
  std::string who(int agent) const {
    const int per_rank = host_agent(1), warp = agent % per_rank - 1,
              cta = warp - num_ctas * warps_per_cta;
    std::ostringstream text;
    text << "rank " << agent / per_rank;
    if (warp < 0) {
      text << "'s host";
    } else if (cta >= 0) {
      text << " CTA " << cta << "'s tensor cores";
    } else {
      text << " CTA " << warp / warps_per_cta << " warp " << warp % warps_per_cta;
    }
    return text.str();
  }
  std::string describe(const Shadow::Found& found, const char* access, int agent,
                       const std::string& what) const {
    const std::string begin = who(agent) + access + what;
    switch (found.conflict) {
      case Shadow::Conflict::kNeverWritten: return begin + ", which nobody has written";
      case Shadow::Conflict::kUnseenWrite:
        return begin + " without waiting for " + who(found.other) + ", which stored it";
      case Shadow::Conflict::kUnseenRead:
        return begin + " without waiting for " + who(found.other) + ", which still reads it";
      case Shadow::Conflict::kNone: break;
    }
    return "";
  }
};

class HostMachine {
 public:
  static constexpr uint32_t kPollsPerLook = 1;

  HostMachine(World& world, Cta& cta, int self, int rank, int cta_idx, int thread)
      : world_(world), cta_(cta), self_(self), rank_(rank), cta_idx_(cta_idx), thread_(thread),
        agent_(world.agent(rank, cta_idx, thread / kWarpSize)) {}

  int rank_idx() const { return rank_; }
  int cta_idx() const { return cta_idx_; }
  int num_ctas() const { return world_.num_ctas; }
  int thread_idx() const { return thread_; }

  template <class T>
  T load(const T* from) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 16);
    step();
    if (const Spot spot = world_.memory.spot(from); spot.rank >= 0) {
      check_read(spot, sizeof(T), false);
      world_.memory.complete_own(rank_, cta_idx_, from, sizeof(T));
    }
    return *from;
  }

  template <class T>
  void store(T* to, T value) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 16);
    step();
    const Spot spot = world_.memory.spot(to);
    if (spot.rank < 0) {
      *to = value;
      return;
    }
    check_write(spot, sizeof(T), false);
    if (hit(Fault::kDropStore, spot)) return;
    world_.memory.store(rank_, cta_idx_, spot, to, &value, sizeof(T));
  }

  template <class T>
  T load_tile(const T* from, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    check_tile(&Shadow::read, from, sizeof(T), " reads ", file, line);
    return *from;
  }
  template <class T>
  void store_tile(T* to, T value, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE()) {
    check_tile(&Shadow::write, to, sizeof(T), " overwrites ", file, line);
    *to = value;
  }

  uint32_t add(uint32_t* to, uint32_t value) {
    step();
    if (const Spot spot = world_.memory.spot(to); spot.rank >= 0) {
      check_write(spot, 4, true);
      world_.memory.complete_own(rank_, cta_idx_, to, 4);
    }
    return change(to, *to + value);
  }

  uint32_t add_release(uint32_t* to, uint32_t value, Scope scope) {
    const Spot spot = released(to, scope);
    if (hit(Fault::kDropSignal, spot)) value = 0;
    if (hit(Fault::kDoubleSignal, spot)) value *= 2;
    return change(to, *to + value);
  }

  void store_release(uint32_t* to, uint32_t value, Scope scope) {
    const Spot spot = released(to, scope);
    if (hit(Fault::kDropSignal, spot)) return;
    if (hit(Fault::kStaleSignal, spot)) --value;
    change(to, value);
  }

  uint32_t load_acquire(const uint32_t* from, Scope scope) {
    world_.crew.maybe_switch(self_);
    const Spot spot = world_.memory.spot(from);
    if (spot.rank != rank_) stop("polls a word that is not in its rank's buffer");
    if (hit(Fault::kSkipWait, spot)) {
      // Beyond any count that is waited for; a barrier's top bit as if all had come.
      return world_.memory.field_at(spot) == field("counters") ? *from ^ 0x80000000u
                                                               : *from + 0x40000000u;
    }
    check_read(spot, 4, true);
    world_.clocks.acquire(agent_, from, scope);
    return *from;
  }

  uint32_t shuffle(uint32_t value, int lane) { return in_warp("shuffle", value)[lane]; }
  uint32_t ballot(bool flag) {
    const auto& flags = in_warp("ballot", flag);
    uint32_t bits = 0;
    for (int lane = 0; lane < kWarpSize; ++lane) bits |= flags[lane] << lane;
    return bits;
  }
  void sync_warp() { in_warp("sync_warp", 0); }

  bool sync_all(int barrier, int num_threads, bool flag) {
    NamedBarrier& at = cta_.barriers[static_cast<size_t>(barrier)];
    if (at.meeting.arrived == 0) at.num_threads = num_threads;
    if (at.num_threads != num_threads) stop("meets others at a barrier of another size");
    at.all = at.all && flag;
    if (thread_ % kWarpSize == 0) at.agents.push_back(agent_);
    const int round = at.round;
    world_.crew.meet(self_, at.meeting, num_threads, [&] {
      world_.clocks.meet(at.agents);
      at.agents.clear();
      at.result[at.round++ % 2] = std::exchange(at.all, true);
    });
    return at.result[round % 2];
  }

  uint64_t clock() { return world_.crew.clock(self_); }
  uint64_t wait_limit() { return Crew::kWaitLimit; }
  void pause() { world_.crew.poll(self_); }

  void give_up(Place place, uint32_t expected, uint32_t found) {
    uint32_t* record = failure();
    if (record[kFailureWait] != 0) return;
    record[kFailureWait] = static_cast<uint32_t>(place.wait);
    record[kFailureRank] = static_cast<uint32_t>(rank_);
    record[kFailureCta] = static_cast<uint32_t>(cta_idx_);
    record[kFailureThread] = static_cast<uint32_t>(thread_);
    record[kFailureTile] = static_cast<uint32_t>(place.tile);
    record[kFailurePeer] = static_cast<uint32_t>(place.peer);
    record[kFailureExpected] = expected;
    record[kFailureFound] = found;
    record[kFailureComplete] = 1;
    world_.crew.memory_changed();
  }
  bool given_up() { return failure()[kFailureWait] != 0; }

 private:
  uint32_t* failure() const { return Fields{world_.buffers, rank_}.failure(); }

  // Before each access: others may run, and some store may arrive.
  void step() {
    world_.crew.not_waiting(self_);
    world_.crew.maybe_switch(self_);
    if (world_.crew.random.one_in(8)) world_.memory.complete_one();
  }

  Spot released(uint32_t* to, Scope scope) {
    step();
    const Spot spot = world_.memory.spot(to);
    if (spot.rank < 0) stop("releases to a word in no rank's buffer");
    check_write(spot, 4, true);
    if (hit(Fault::kWeakSignal, spot)) scope = Scope::kDevice;
    world_.memory.release(rank_, cta_idx_, scope);
    world_.clocks.release(agent_, to, spot.rank == rank_, scope);
    return spot;
  }

  uint32_t change(uint32_t* word, uint32_t value) {
    const uint32_t before = std::exchange(*word, value);
    world_.crew.memory_changed();
    return before;
  }

  bool hit(int kind, const Spot& spot) {
    Fault& fault = world_.fault;
    return fault.kind == kind && fault.hits(kind, world_.memory.field_at(spot), rank_);
  }

  void check_read(const Spot& spot, size_t bytes, bool atomic) {
    const Clock& clock = world_.clocks.of(agent_);
    Shadow& shadow = world_.memory.shadow(spot);
    const Shadow::Found found = shadow.read(spot.offset, bytes, agent_, clock, atomic);
    if (found.conflict != Shadow::Conflict::kNone) {
      world_.crew.stop(self_, world_.describe(found, " reads ", agent_, world_.memory.name(spot)));
    }
  }
  void check_write(const Spot& spot, size_t bytes, bool atomic) {
    const Clock& clock = world_.clocks.of(agent_);
    Shadow& shadow = world_.memory.shadow(spot);
    const Shadow::Found found = shadow.write(spot.offset, bytes, agent_, clock, atomic);
    if (found.conflict != Shadow::Conflict::kNone) {
      world_.crew.stop(self_,
                       world_.describe(found, " overwrites ", agent_, world_.memory.name(spot)));
    }
  }

  template <class Access>
  void check_tile(Access access, const void* at, size_t bytes, const char* does, const char* file,
                  int line) {
    WatchedTile& tile = cta_.watched;
    const auto where = [&] {
      const std::string path = file;
      return " (" + path.substr(path.rfind('/') + 1) + ":" + std::to_string(line) + ")";
    };
    if (!tile.has(at, bytes)) stop(does + std::string("what is not in the tile") + where());
    const Shadow::Found found = (*tile.shadow.*access)(tile.offset(at), 4 * bytes, agent_,
                                                       world_.clocks.of(agent_), false);
    if (found.conflict != Shadow::Conflict::kNone) {
      world_.crew.stop(self_, world_.describe(found, does, agent_, "the tile") + where());
    }
  }

  const std::array<uint32_t, kWarpSize>& in_warp(const char* operation, uint32_t value) {
    Warp& warp = cta_.warps[static_cast<size_t>(thread_ / kWarpSize)];
    if (warp.meeting.arrived == 0) warp.operation = operation;
    if (warp.operation != operation) stop("does another warp operation than its warp's lanes");
    warp.value[static_cast<size_t>(thread_ % kWarpSize)] = value;
    const int round = warp.round;
    world_.crew.meet(self_, warp.meeting, kWarpSize,
                     [&] { warp.result[static_cast<size_t>(warp.round++ % 2)] = warp.value; });
    return warp.result[static_cast<size_t>(round % 2)];
  }

  [[noreturn]] void stop(const std::string& what) {
    world_.crew.stop(self_, world_.who(agent_) + " " + what);
  }

  World& world_;
  Cta& cta_;
  int self_, rank_, cta_idx_, thread_, agent_;
};
static_assert(Machine<HostMachine>);

}  // namespace megamoe::host
