"""Random layers that look like trained ones: every projection has a global scale of its own."""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megamoe_kernel import ExpertWeights, QuantizedTokens, quantize_tokens
from megamoe_kernel.experts import as_w2, as_w13
from megamoe_kernel.reference import Activation, RankTokens
from nvfp4_codec import NVFP4Tensor, quantize_nvfp4


@dataclass(frozen=True)
class Layer:
    """A layer's experts, one by one and stacked, and the sizes."""

    gate_up: list[tuple[NVFP4Tensor, NVFP4Tensor]]
    down: list[NVFP4Tensor]
    w13: ExpertWeights
    w2: ExpertWeights


MakeLayer = Callable[..., Layer]
MakeTokens = Callable[..., RankTokens]


@pytest.fixture(scope="session")
def make_layer() -> MakeLayer:
    def make(
        num_experts: int,
        hidden: int,
        intermediate: int,
        *,
        seed: int = 0,
        gain: float = 1.0,
        largest: float = 8.0,
    ) -> Layer:
        """largest: of the intermediate, as w2's input_scale has it."""
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int) -> NVFP4Tensor:
            spread = torch.rand((), generator=generator) * 2 + 0.2  # global scales differ by 10
            w = torch.randn(rows, columns, generator=generator) * spread * gain / columns**0.5
            return quantize_nvfp4(w)

        gate_up = [
            (matrix(intermediate, hidden), matrix(intermediate, hidden)) for _ in range(num_experts)
        ]
        down = [matrix(hidden, intermediate) for _ in range(num_experts)]
        w2 = as_w2(down)
        input_scale = torch.tensor(largest / 2688)
        w2 = ExpertWeights(w2.weight, w2.weight_scale, w2.weight_scale_2, input_scale)
        return Layer(gate_up, down, as_w13(gate_up), w2)

    return make


@pytest.fixture(scope="session")
def make_tokens() -> MakeTokens:
    def make(
        tokens: int,
        hidden: int,
        num_experts: int,
        topk: int,
        activation: Activation,
        *,
        seed: int = 0,
        masked: float = 0.0,
    ) -> RankTokens:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
        ids = torch.rand(tokens, num_experts, generator=generator).topk(topk, -1).indices
        ids[torch.rand(tokens, topk, generator=generator) < masked] = -1
        weights = torch.rand(tokens, topk, generator=generator)
        given: QuantizedTokens | Tensor = quantize_tokens(x) if activation == "nvfp4" else x
        return RankTokens(given, ids, weights)

    return make


PACKAGE = Path(__file__).parent.parent
INCLUDE = PACKAGE / "src" / "megamoe_kernel" / "include"


@pytest.fixture(scope="session")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The neutral device code and its host machine."""
    return _build(tmp_path_factory, "host")


@pytest.fixture(scope="session")
def emulator_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel for sm_100a and the emulator of its instructions."""
    return _build(tmp_path_factory, "emulator")


@pytest.fixture
def kernel_exp(host_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the reference compute SwiGLU with the kernels' exp."""

    def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        x, exp = (-gate).contiguous(), torch.empty_like(gate, memory_format=torch.contiguous_format)
        host_library.megamoe_exp(
            ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(exp.data_ptr()),
            ctypes.c_int64(x.numel()),
        )  # fmt: skip
        return gate / (1 + exp) * up

    monkeypatch.setattr("megamoe_kernel.reference.swiglu", swiglu)


@pytest.fixture(scope="session")
def emulated() -> ModuleType:
    """How layers are passed to either, ``emulated.py``."""
    spec = importlib.util.spec_from_file_location(
        "megamoe_kernel_test_emulated", PACKAGE / "tests" / "emulated.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def _build(tmp_path_factory: pytest.TempPathFactory, name: str) -> ctypes.CDLL:
    """csrc/<name>/library.cpp, compiled once for all workers of a session."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs g++ or clang++: the device code is compiled for the host")
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    library = folder / f"libmegamoe_{name}.so"
    with (folder / f"libmegamoe_{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            options = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off"]
            options += ["-U_FORTIFY_SOURCE"]  # fibers leave by longjmp
            includes = [f"-I{PACKAGE / 'csrc'}", f"-I{INCLUDE}"]
            source = PACKAGE / "csrc" / name / "library.cpp"
            command = [compiler, *options, *includes, "-shared", "-fPIC", str(source)]
            subprocess.run([*command, "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))
