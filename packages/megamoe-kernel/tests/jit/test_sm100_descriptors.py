"""Descriptors of tcgen05 operands and products equal CUTLASS's, made by its own code.

One program is compiled from our header and CUTLASS's and prints where they differ.
"""

from __future__ import annotations

import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

INCLUDE = Path(__file__).parents[2] / "src" / "megamoe_kernel" / "include"
PROGRAM = r"""
#include <cstdio>
#include "cute/arch/mma_sm100_desc.hpp"
#include "cutlass/numeric_types.h"
#include "megamoe/ptx/descriptors.hpp"

using namespace cute;
int wrong = 0, compared = 0;

void compare(const char* what, int at, uint64_t ours, uint64_t theirs) {
  ++compared;
  if (ours == theirs) return;
  ++wrong;
  std::printf("%s %d: %016llx, CUTLASS %016llx\n", what, at, (unsigned long long)ours,
              (unsigned long long)theirs);
}

template <int kColumns>
void instruction() {
  using Code = cutlass::float_e2m1_t;
  compare("instruction", kColumns, megamoe::ptx::nvfp4_instruction(128, kColumns),
          uint32_t(UMMA::make_instr_desc_block_scaled<Code, Code, float, cutlass::float_ue4m3_t,
                                                      128, kColumns, UMMA::Major::K,
                                                      UMMA::Major::K>()));
  if constexpr (kColumns > 8) instruction<kColumns - 8>();
}

UMMA::SmemDescriptor operand(uint32_t address, int stride, UMMA::LayoutType layout) {
  UMMA::SmemDescriptor descriptor;
  descriptor.start_address_ = address >> 4;
  descriptor.leading_byte_offset_ = 1;
  descriptor.stride_byte_offset_ = stride >> 4;
  descriptor.version_ = 1;
  descriptor.layout_type_ = uint8_t(layout);
  return descriptor;
}

int main() {
  instruction<256>();
  for (uint32_t address = 1024; address < 227 * 1024; address += 1024) {
    for (int step = 0; step < 4; ++step) {
      compare("operand", address + step, megamoe::ptx::operand_descriptor(address, step),
              operand(address + 32 * step, 1024, UMMA::LayoutType::SWIZZLE_128B));
    }
    compare("scales", address, megamoe::ptx::scales_descriptor(address + 512),
            operand(address + 512, 128, UMMA::LayoutType::SWIZZLE_NONE));
  }
  std::printf("%d compared\n", compared);
  return wrong != 0;
}
"""


def test_descriptors_equal_cutlasss(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs g++ or clang++ for CUTLASS's headers")
    cutlass = metadata.distribution("nvidia-cutlass").locate_file("cutlass_library/source/include")
    cuda = metadata.distribution("nvidia-cuda-runtime").locate_file("nvidia/cu13/include")
    folders = [INCLUDE, cutlass, cuda, Path(str(cuda)) / "cccl"]
    source, program = tmp_path / "compare.cpp", tmp_path / "compare"
    source.write_text(PROGRAM)
    command = [compiler, "-std=c++20", "-w", *(f"-I{folder}" for folder in folders), str(source)]
    subprocess.run([*command, "-o", str(program)], check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert result.stdout == f"{32 + 226 * 5} compared\n"
