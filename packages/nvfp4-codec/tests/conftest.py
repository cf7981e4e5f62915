"""An oracle that more than one folder of tests asks."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

CudaOracle = Callable[[str, Tensor], Tensor]


@pytest.fixture(scope="session")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> CudaOracle:
    """NVIDIA's host conversions: ``cuda("encode_e4m3_nan", x)``, ``cuda("decode_e4m3", codes)``."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to compile NVIDIA's conversion headers")
    try:
        files = metadata.distribution("nvidia-cuda-runtime")
        metadata.distribution("nvidia-cuda-crt")
    except metadata.PackageNotFoundError as error:
        pytest.skip(f"needs the wheel {error.name} for NVIDIA's conversion headers")
    include = next(
        Path(str(files.locate_file(file))).parent
        for file in files.files or ()
        if file.name == "cuda_fp4.h"
    )
    library = tmp_path_factory.mktemp("cuda_oracle") / "oracle.so"
    source = Path(__file__).parent / "formats" / "cuda_oracle.cpp"
    command = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{include}"]
    subprocess.run([*command, f"-I{include}/cccl", source, "-o", library], check=True)
    functions = ctypes.CDLL(str(library))

    def convert(function: str, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty(x.shape, dtype=torch.uint8 if x.dtype == torch.float32 else torch.float32)
        pointers = (ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()))
        functions[function](*pointers, ctypes.c_int64(x.numel()))
        return out

    return convert


def _bits(x: np.ndarray) -> Tensor:
    return torch.from_numpy(x.astype(np.uint32).view(np.int32))


@pytest.fixture(scope="session")
def all_bf16() -> Tensor:
    """All 65,536 bfloat16 patterns as float32, NaN payloads included."""
    return _bits(np.arange(2**16, dtype=np.uint64) << 16).view(torch.float32)
