// A thread of execution that gives up the CPU only where it says so.
//
// All emulated threads are fibers of one CPU thread: a run depends on its seed alone and can be
// repeated. ucontext starts a fiber on its own stack; after that _setjmp and _longjmp switch
// without the system calls that swapcontext makes.
#pragma once

#if defined(_FORTIFY_SOURCE) && _FORTIFY_SOURCE > 0
#error "compile with -U_FORTIFY_SOURCE: its longjmp refuses to change stacks"
#endif

#include <csetjmp>
#include <cstddef>
#include <functional>
#include <memory>
#include <ucontext.h>
#include <utility>

namespace megamoe::host {

class Fiber {
 public:
  explicit Fiber(std::function<void()> body)
      : body_(std::move(body)), stack_(new std::byte[kStackBytes]) {}
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Runs the fiber until it calls leave() or ends.
  void enter() {
    if (_setjmp(outside_)) return;
    if (started_) _longjmp(inside_, 1);
    started_ = true;
    getcontext(&start_);
    start_.uc_stack.ss_sp = stack_.get();
    start_.uc_stack.ss_size = kStackBytes;
    start_.uc_link = nullptr;
    // makecontext passes ints: the pointer in two of them.
    const uintptr_t self = reinterpret_cast<uintptr_t>(this);
    makecontext(&start_, reinterpret_cast<void (*)()>(&Fiber::main), 2,
                static_cast<unsigned>(self >> 32), static_cast<unsigned>(self));
    setcontext(&start_);
  }

  // From inside: back to whoever entered.
  void leave() {
    if (!_setjmp(inside_)) _longjmp(outside_, 1);
  }

  bool ended() const { return ended_; }

 private:
  static constexpr size_t kStackBytes = 64 * 1024;

  static void main(unsigned high, unsigned low) {
    Fiber* self = reinterpret_cast<Fiber*>(uintptr_t{high} << 32 | low);
    self->body_();
    self->ended_ = true;
    _longjmp(self->outside_, 1);
  }

  std::function<void()> body_;
  std::unique_ptr<std::byte[]> stack_;  // not cleared: most of it is never touched
  ucontext_t start_;
  std::jmp_buf inside_, outside_;
  bool started_ = false, ended_ = false;
};

}  // namespace megamoe::host
