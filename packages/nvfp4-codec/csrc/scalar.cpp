// The path every machine has: portable C++ at the compiler's baseline.
#include "kernels.h"

namespace nvfp4 {
namespace {
#include "kernels.inl"
}  // namespace

const Kernels& scalar_kernels() {
  static const Kernels kernels = portable_kernels("scalar");
  return kernels;
}

}  // namespace nvfp4
