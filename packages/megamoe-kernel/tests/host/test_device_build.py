"""The same stages compile for GPUs: the scalar layer, for Hopper and for Blackwell."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megamoe_kernel import CompileError
from megamoe_kernel.jit.cache import CubinCache
from megamoe_kernel.jit.compile import KernelSource, compile_kernel
from megamoe_kernel.jit.cubin import read_cubin
from megamoe_kernel.jit.nvrtc import find_nvrtc
from megamoe_kernel.jit.targets import Target

PRO = "8, 48, 1, 6, 7168, 3072, 32768, 64, 8, 128"  # a DeepSeek-V4-Pro layer on 8 ranks


def scalar_layer(activation: str, target: Target) -> KernelSource:
    return KernelSource(
        name="scalar_layer",
        header="megamoe/impl/scalar.cuh",
        function=f"megamoe::scalar_layer<megamoe::{activation}, megamoe::StaticShape<{PRO}>>",
        arguments="megamoe::ScalarArguments",
        threads=96,
        targets=(target,),
    )


@pytest.mark.parametrize(("activation", "target"), [("Bf16", "sm_90a"), ("Nvfp4", "sm_100a")])
def test_the_scalar_layer_compiles(
    activation: str, target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        find_nvrtc()
    except CompileError as error:
        pytest.skip(f"needs NVRTC, which torch for CUDA brings: {error}")
    with caplog.at_level(logging.WARNING):
        compiled = compile_kernel(
            scalar_layer(activation, target), target, cache=CubinCache(tmp_path)
        )
    found = read_cubin(compiled.cubin)
    assert (found.target, "scalar_layer" in found.kernels) == (target, True)
    assert not caplog.messages  # the compiler's warnings
