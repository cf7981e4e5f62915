#include "dispatch.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace nvfp4 {
namespace {

#if defined(__x86_64__)

struct Features {
  bool avx2 = false, avx512 = false;
};

uint64_t extended_control_register() {
  uint32_t low, high;
  // xgetbv, as bytes: the intrinsic would need a compiler flag for this file.
  __asm__ volatile(".byte 0x0F, 0x01, 0xD0" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

Features detect() {
  Features found;
  uint32_t eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return found;
  const auto has = [](uint32_t word, int bit) { return (word >> bit & 1u) != 0; };
  const bool osxsave = has(ecx, 27), avx = has(ecx, 28);
  const bool fma = has(ecx, 12), f16c = has(ecx, 29);
  // A processor flag is not enough: the system must save the wider registers too.
  const uint64_t saved = osxsave ? extended_control_register() : 0;
  const bool ymm_saved = (saved & 0x06) == 0x06, zmm_saved = (saved & 0xE6) == 0xE6;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return found;
  const bool bmi = has(ebx, 3) && has(ebx, 8);
  found.avx2 = ymm_saved && avx && fma && f16c && bmi && has(ebx, 5);
  const bool f = has(ebx, 16), dq = has(ebx, 17), bw = has(ebx, 30), vl = has(ebx, 31);
  found.avx512 = found.avx2 && zmm_saved && f && dq && bw && vl;
  return found;
}

#endif

std::vector<const Kernels*> detect_kernels() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  const Features features = detect();
  if (features.avx512) found.push_back(&avx512_kernels());
  if (features.avx2) found.push_back(&avx2_kernels());
#endif
  found.push_back(&scalar_kernels());
  return found;
}

}  // namespace

const std::vector<const Kernels*>& supported_kernels() {
  static const std::vector<const Kernels*> kernels = detect_kernels();
  return kernels;
}

const Kernels& kernels_for(const std::string& isa) {
  std::string names;
  for (const Kernels* kernels : supported_kernels()) {
    if (isa.empty() || isa == kernels->name) return *kernels;
    if (!names.empty()) names += ", ";
    names += kernels->name;
  }
  throw std::invalid_argument("instruction set is '" + isa + "', this machine supports: " + names);
}

}  // namespace nvfp4
