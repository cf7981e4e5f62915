// Who knows of what: vector clocks over the warps of a run, and the rule that a conflicting access
// needs them.
//
// Two accesses of the same bytes, one of them a store, must be ordered: by a release that the other
// side acquired, by a barrier, by the end of a launch. Whether an unordered pair does harm depends
// on chance; that it is unordered does not, so a missing wait is found under nearly every seed.
// Lanes of a warp count as one, because they share their warp's clock.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "megamoe/common/machine.hpp"

namespace megamoe::host {

inline constexpr int kMaxAgents = 80;
using Clock = std::array<uint32_t, kMaxAgents>;

inline void join(Clock& into, const Clock& other) {
  for (int i = 0; i < kMaxAgents; ++i) into[i] = std::max(into[i], other[i]);
}

// The clocks of all agents (warps, and each rank's host), and of what atomics passed on.
class Clocks {
 public:
  explicit Clocks(int num_agents) : now_(num_agents, Clock{}) {
    for (int i = 0; i < num_agents; ++i) now_[i][i] = 1;
  }

  const Clock& of(int agent) const { return now_[agent]; }

  // An atomic word passes on what the releasing agents knew. A release within the device is known
  // only to that device: from a peer it promises nothing.
  void release(int agent, const void* word, bool same_rank, Scope scope) {
    Released& released = released_[word];
    if (same_rank) join(released.by_owner, now_[agent]);
    if (!same_rank && scope == Scope::kSystem) join(released.by_peers, now_[agent]);
    ++now_[agent][agent];
  }
  void acquire(int agent, const void* word, Scope scope) {
    const auto found = released_.find(word);
    if (found == released_.end()) return;
    join(now_[agent], found->second.by_owner);
    if (scope == Scope::kSystem) join(now_[agent], found->second.by_peers);
  }

  // For means of order that are not words of a buffer: what an agent knows, as of now, is handed on
  // by whoever keeps it; what the agent does afterwards is later than that.
  Clock publish(int agent) {
    const Clock known = now_[agent];
    ++now_[agent][agent];
    return known;
  }
  void learn(int agent, const Clock& known) { join(now_[agent], known); }

  // An agent's own part of that: what it did itself, nothing of what it knows of others.
  Clock publish_own(int agent) {
    Clock own{};
    own[agent] = now_[agent][agent]++;
    return own;
  }

  // A barrier: each of them knows afterwards what any of them knew.
  void meet(const std::vector<int>& agents) {
    Clock all{};
    for (const int agent : agents) join(all, now_[agent]);
    for (const int agent : agents) {
      now_[agent] = all;
      ++now_[agent][agent];
    }
  }

 private:
  struct Released {
    Clock by_owner{}, by_peers{};
  };
  std::vector<Clock> now_;
  std::unordered_map<const void*, Released> released_;
};

// The last accesses of each 4 bytes of one rank's buffer.
class Shadow {
 public:
  Shadow(size_t bytes, int num_agents)
      : num_agents_(num_agents), writes_((bytes + 3) / 4), reads_(writes_.size() * num_agents) {}

  enum class Conflict { kNone, kNeverWritten, kUnseenWrite, kUnseenRead };
  struct Found {
    Conflict conflict = Conflict::kNone;
    int other = 0;  // the agent of the access that is not ordered before this one
  };

  Found read(size_t offset, size_t bytes, int agent, const Clock& clock, bool atomic) {
    for (size_t cell = offset / 4; cell < (offset + bytes + 3) / 4; ++cell) {
      const Write& write = writes_[cell];
      if (write.time == 0) return {Conflict::kNeverWritten, agent};
      if (clock[write.agent] < write.time && !(atomic && write.atomic)) {
        return {Conflict::kUnseenWrite, write.agent};
      }
      // What is carried out late read no later than what began after it.
      uint32_t& last = reads_[cell * num_agents_ + agent];
      if (!atomic) last = std::max(last, clock[agent]);
    }
    return {};
  }

  Found write(size_t offset, size_t bytes, int agent, const Clock& clock, bool atomic) {
    for (size_t cell = offset / 4; cell < (offset + bytes + 3) / 4; ++cell) {
      Write& write = writes_[cell];
      if (clock[write.agent] < write.time && !(atomic && write.atomic)) {
        return {Conflict::kUnseenWrite, write.agent};
      }
      const uint32_t* reads = &reads_[cell * num_agents_];
      for (int other = 0; other < num_agents_; ++other) {
        if (clock[other] < reads[other]) return {Conflict::kUnseenRead, other};
      }
      write = {clock[agent], static_cast<uint16_t>(agent), atomic};
    }
    return {};
  }

  struct Write {
    uint32_t time = 0;  // the agent's own clock then; 0: never
    uint16_t agent = 0;
    bool atomic = false;
  };
  const Write& last_write(size_t offset) const { return writes_[offset / 4]; }

 private:
  int num_agents_;
  std::vector<Write> writes_;
  std::vector<uint32_t> reads_;
};

}  // namespace megamoe::host
