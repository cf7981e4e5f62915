"""common/quantize.hpp, which kernels quantize by, gives quantize_tokens' bytes on the CPU too."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megamoe_kernel import quantize_tokens
from megamoe_kernel.buffer_layout import INCLUDE

SOURCE = """
#include "megamoe/common/quantize.hpp"
using namespace megamoe;

extern "C" void quantize(const float* x, int rows, int columns, uint8_t* codes, uint8_t* scales,
                         float* row_scales) {
  for (int row = 0; row < rows; ++row, x += columns) {
    float amax = 0;
    for (int i = 0; i < columns; ++i) amax = __builtin_fmaxf(amax, __builtin_fabsf(x[i]));
    const float scale = *row_scales++ = token_scale(amax);
    for (int block = 0; block < columns; block += 16) {
      float largest = 0;
      for (int i = 0; i < 16; ++i) {
        largest = __builtin_fmaxf(largest, __builtin_fabsf(x[block + i]));
      }
      const uint32_t byte = block_scale(largest, scale);
      const float divisor = block_divisor(byte, scale);
      *scales++ = static_cast<uint8_t>(byte);
      for (int i = 0; i < 16; i += 2) {
        const uint32_t low = quantized(x[block + i], divisor);
        *codes++ = static_cast<uint8_t>(low | quantized(x[block + i + 1], divisor) << 4);
      }
    }
  }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler on PATH")
    folder: Path = tmp_path_factory.mktemp("quantize")
    (folder / "quantize.cpp").write_text(SOURCE)
    options = ["-std=c++20", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    command = [compiler, *options, "-shared", "-fPIC", f"-I{INCLUDE}", "quantize.cpp", "-oq.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "q.so"))


def _rows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator)
    x[8:16] *= torch.exp2(torch.randint(-30, 30, (8, 256), generator=generator).float())
    x[16:24] = torch.randint(-12, 13, (8, 256), generator=generator) / 4  # ties
    x[24:32] *= 1e-38  # scales below float32's normal numbers
    x[32:36] *= 1e-44
    x[36] = -0.0
    x[37] = torch.finfo(torch.float32).max
    x[38, 1:] = 0
    x[39, :16] = 3e38
    return x


def test_bit_for_bit(library: ctypes.CDLL) -> None:
    x = _rows()
    rows, columns = x.shape
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8)
    scales = torch.empty(rows, columns // 16, dtype=torch.uint8)
    row_scales = torch.empty(rows)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, codes, scales, row_scales)]
    library.quantize(pointers[0], rows, columns, *pointers[1:])
    expected = quantize_tokens(x)
    assert torch.equal(row_scales, expected.scale)
    assert torch.equal(scales, expected.block_scale.view(torch.uint8))
    assert torch.equal(codes, expected.codes)
