// Which instruction sets this machine has, best first.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace nvfp4 {

// Every instruction set that processor and operating system support, fastest first.
const std::vector<const Kernels*>& supported_kernels();

// By name; the fastest if the name is empty. Throws std::invalid_argument naming the
// supported ones if this machine lacks it.
const Kernels& kernels_for(const std::string& isa);

}  // namespace nvfp4
