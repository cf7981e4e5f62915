// The arithmetic that every result here is defined in.
#pragma once
#include <cfenv>

namespace nvfp4 {

// Default rounding and no flush-to-zero while it lives: torch.set_flush_denormal changes the
// calling thread's environment, and new threads inherit it.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace nvfp4
