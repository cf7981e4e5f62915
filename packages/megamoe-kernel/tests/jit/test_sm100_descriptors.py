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
#include <cstdint>
#include <cstdio>

// CUTLASS takes an operand's address from a pointer to shared memory, for which a host has no
// instruction; here pointers are such addresses.
inline size_t __cvta_generic_to_shared(const void* address) { return (size_t)address; }
#define CUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED 1

#include "cute/tensor.hpp"
#include "cute/atom/copy_traits_sm100.hpp"
#include "cute/atom/mma_traits_sm100.hpp"
#include "cutlass/numeric_types.h"
#include "megamoe/ptx/descriptors.hpp"

using namespace cute;
using Code = cutlass::float_e2m1_t;
int wrong = 0, compared = 0;

void compare(const char* what, int at, uint64_t ours, uint64_t theirs) {
  ++compared;
  if (ours == theirs) return;
  ++wrong;
  std::printf("%s %d: %016llx, CUTLASS %016llx\n", what, at, (unsigned long long)ours,
              (unsigned long long)theirs);
}

// 256 rows: those of a pair, whose columns come in sixteens.
template <int kRows, int kColumns>
void instruction() {
  compare("instruction", 1000 * kRows + kColumns, megamoe::ptx::nvfp4_instruction(kRows, kColumns),
          uint32_t(UMMA::make_instr_desc_block_scaled<Code, Code, float, cutlass::float_ue4m3_t,
                                                      kRows, kColumns, UMMA::Major::K,
                                                      UMMA::Major::K>()));
  constexpr int kStep = kRows / 16;
  if constexpr (kColumns > kStep) instruction<kRows, kColumns - kStep>();
}

// One product's part of an operand in shared memory, as CUTLASS lays out and describes it: of rows
// of 256 codes in the swizzle of 128 bytes, the step's 64.
template <int kRows>
uint64_t operand(uint32_t address, int step) {
  auto layout = tile_to_shape(UMMA::Layout_K_SW128_Atom<Code>{}, Shape<Int<kRows>, _256>{});
  auto rows = make_tensor(make_smem_ptr<Code>((void*)(size_t)address), layout);
  // How CUTLASS's loops go along K: by steps of 64 codes through descriptors of the whole.
  auto steps = make_tensor(UMMA::DescriptorIterator{UMMA::make_umma_desc<UMMA::Major::K>(
                               local_tile(rows, Shape<Int<kRows>, _64>{}, make_coord(0, 0)))},
                           Layout<_4, Int<32 / 16>>{});
  return (*(steps.data() + steps.layout()(step))).desc_;
}

// Scale words of 128 rows as CUTLASS describes what tcgen05.cp.32x128b.warpx4 copies: 32 rows of 16
// bytes, for each of four warps the same; `atom` of four that lie behind each other.
uint64_t scales(uint32_t address, int atom) {
  auto once = Layout<Shape<Shape<_32, _16, _4>, _1>, Stride<Stride<_16, _1, _0>, _0>>{};
  auto bytes = make_tensor(make_smem_ptr<cutlass::float_ue4m3_t>((void*)(size_t)address),
                           make_layout(once, Layout<_4, _512>{}));
  auto atoms = get_utccp_smem_desc_tensor<SM100::TMEM::UTCCP::SM100_UTCCP_4x32dp128bit_1cta>(bytes);
  return (*(atoms.data() + atoms.layout()(0, atom))).desc_;
}

int main() {
  instruction<128, 256>();
  instruction<256, 256>();
  for (uint32_t address = 1024; address < 227 * 1024; address += 1024) {
    for (int step = 0; step < 4; ++step) {
      compare("operand", address + step, megamoe::ptx::operand_descriptor(address, step),
              operand<128>(address, step));
    }
    for (int atom = 0; atom < 4; ++atom) {
      compare("scales", address + atom, megamoe::ptx::scales_descriptor(address + 512 * atom),
              scales(address, atom));
    }
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
    assert result.stdout == f"{32 + 16 + 226 * 8} compared\n"
