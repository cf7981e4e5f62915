// All emulated threads of a run, and which of them runs next: one chosen at random under the seed.
// A quarter of the warps is slow for a while, another quarter then: if all were equally fast, none
// would ever get far ahead of the others.
//
// A thread is ready, waits for others at a meeting (a warp operation, a named barrier, the end of
// a launch), or polls. Pollers sleep until memory changes. When nobody is ready and no store is on
// its way, nothing will ever change again; then the clock is advanced until the wait that began
// first is over its limit. So a deadlock is found at once, and found for certain.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "host/fiber.hpp"
#include "megamoe/common/types.hpp"

namespace megamoe::host {

// A small fast generator: xorshift64*.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 0x1234567u) {}
  uint32_t below(uint32_t bound) {
    state_ ^= state_ >> 12, state_ ^= state_ << 25, state_ ^= state_ >> 27;
    return static_cast<uint32_t>((state_ * 0x2545F4914F6CDD1Du >> 32) * bound >> 32);
  }
  bool one_in(uint32_t n) { return below(n) == 0; }

 private:
  uint64_t state_;
};

struct Meeting {
  int arrived = 0;
  std::vector<int> waiting;
};

class Crew {
 public:
  static constexpr uint64_t kWaitLimit = uint64_t{1} << 40;  // steps; no run takes as many

  explicit Crew(uint64_t seed) : random(seed) {}

  // A thread to be run; its number is what the other functions call `self`.
  int add(std::function<void()> body) {
    threads_.push_back({std::make_unique<Fiber>(std::move(body)), {}});
    ready_.push_back(static_cast<int>(threads_.size()) - 1);
    return ready_.back();
  }

  // Runs all threads to their end. A text: why that was not possible. complete_store is called
  // when nobody is ready: it lets a store reach memory, or returns false if none is on its way.
  std::optional<std::string> run(const std::function<bool()>& complete_store) {
    int alive = static_cast<int>(threads_.size());
    while (alive > 0) {
      if (stopped_) return stopped_;
      if (ready_.empty() && !complete_store() && !expire_oldest()) {
        return "threads wait for each other at a barrier or in a warp, and no wait has a limit";
      }
      if (ready_.empty()) continue;
      const int self = take_ready();
      ++clock_;
      Fiber& fiber = *threads_[self].fiber;
      running_ = self;
      fiber.enter();
      if (fiber.ended()) --alive;
    }
    return stopped_;
  }

  // The thread that runs at the moment.
  int running() const { return running_; }

  // Lets others run now and then; between the memory operations of a thread.
  void maybe_switch(int self) {
    if (random.one_in(16)) {
      ready_.push_back(self);
      threads_[self].fiber->leave();
    }
  }

  // Waits until `expected` threads have met. The last one to come first runs `last` and goes on.
  template <class Last>
  void meet(int self, Meeting& meeting, int expected, Last last) {
    threads_[self].waiting_since.reset();
    if (++meeting.arrived == expected) {
      last();
      ready_.insert(ready_.end(), meeting.waiting.begin(), meeting.waiting.end());
      meeting.waiting.clear();
      meeting.arrived = 0;
      return;
    }
    meeting.waiting.push_back(self);
    threads_[self].fiber->leave();
  }

  // Sleeps until memory changes.
  void poll(int self) {
    polling_.push_back(self);
    threads_[self].fiber->leave();
  }

  void memory_changed() {
    ready_.insert(ready_.end(), polling_.begin(), polling_.end());
    polling_.clear();
  }

  // Reading the clock marks the beginning of a wait; anything else that a thread does, its end.
  uint64_t clock(int self) {
    if (!threads_[self].waiting_since) threads_[self].waiting_since = clock_;
    return clock_;
  }
  void not_waiting(int self) { threads_[self].waiting_since.reset(); }

  // Ends the run; the first reason is kept.
  void note(std::string why) {
    if (!stopped_) stopped_ = std::move(why);
  }
  // The same from inside a thread, which never runs again.
  [[noreturn]] void stop(int self, std::string why) {
    note(std::move(why));
    threads_[self].fiber->leave();
    __builtin_unreachable();
  }

  Random random;

 private:
  // Threads are added warp by warp.
  bool is_slow(int self) const { return static_cast<uint32_t>(self / kWarpSize % 4) == slow_; }

  int take_ready() {
    if (clock_ % 1024 == 0) slow_ = random.below(4);
    uint32_t at = 0;
    for (int tries = 0; tries < 6; ++tries) {
      at = random.below(static_cast<uint32_t>(ready_.size()));
      if (!is_slow(ready_[at])) break;
    }
    const int self = ready_[at];
    ready_[at] = ready_.back();
    ready_.pop_back();
    return self;
  }

  struct Thread {
    std::unique_ptr<Fiber> fiber;
    std::optional<uint64_t> waiting_since;
  };

  bool expire_oldest() {
    const Thread* oldest = nullptr;
    for (const int self : polling_) {
      const Thread& thread = threads_[self];
      if (!oldest || *thread.waiting_since < *oldest->waiting_since) oldest = &thread;
    }
    if (!oldest) return false;
    const uint64_t expired = *oldest->waiting_since + kWaitLimit + 1;
    if (expired > clock_) clock_ = expired;
    memory_changed();
    return true;
  }

  std::vector<Thread> threads_;
  std::vector<int> ready_, polling_;
  int running_ = -1;
  uint64_t clock_ = 0;
  uint32_t slow_ = 0;
  std::optional<std::string> stopped_;
};

}  // namespace megamoe::host
