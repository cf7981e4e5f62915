"""What the native backend promises besides bytes: refusals, threads, fork, float environment."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nvfp4_codec import native
from nvfp4_codec.errors import BackendError, CodecError, DtypeError, ShapeError
from nvfp4_codec.scales import get_profile

RunPython = Callable[..., subprocess.CompletedProcess[str]]
MODELOPT = get_profile("modelopt")


def quantize(x: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    weight = torch.empty(rows, columns // 2, dtype=torch.uint8)
    scale = torch.empty(rows, columns // 16, dtype=torch.uint8)
    native.quantize_nvfp4(x, 0.001, MODELOPT, False, weight, scale, **options)  # type: ignore[arg-type]
    return weight, scale


def test_scalar_is_always_there() -> None:
    assert native.isa_names()[-1] == "scalar"
    assert native.unavailable_reason() is None


def test_unknown_isa_is_refused_by_name() -> None:
    with pytest.raises(BackendError, match=r"isa is 'sse9', this machine supports: .*scalar"):
        native.amax(torch.zeros(1, 16), isa="sse9")


@pytest.mark.parametrize("name", ["scalar", "avx9"])
def test_isa_from_the_environment(run_python: RunPython, name: str) -> None:
    code = "from nvfp4_codec import native; print(native.active_isa())"
    done = run_python(code, NVFP4_CODEC_ISA=name)
    if name == "scalar":
        assert done.stdout.strip() == "scalar", done.stderr
    else:
        assert "BackendError: environment variable NVFP4_CODEC_ISA is 'avx9'" in done.stderr


def test_zero_threads_are_refused() -> None:
    with pytest.raises(BackendError, match="threads is 0"):
        native.amax(torch.zeros(1, 16), threads=0)


@pytest.mark.parametrize("offset", [0, 2, 64, 126])
def test_output_overlapping_the_input_is_refused(offset: int) -> None:
    memory = torch.zeros(512, dtype=torch.uint8)
    x = memory[:128].view(torch.bfloat16).view(4, 16)
    weight = memory[offset : offset + 32].view(4, 8)
    with pytest.raises(ShapeError, match="weight_out overlaps x in memory"):
        native.quantize_nvfp4(x, 1.0, MODELOPT, False, weight, torch.empty(4, 1, dtype=torch.uint8))
    out = memory[:128].view(torch.bfloat16).view(4, 16)
    with pytest.raises(ShapeError, match="out overlaps weight in memory"):
        native.dequantize_nvfp4(weight, torch.ones(4, 1, dtype=torch.uint8), 1.0, False, out)


def test_outputs_overlapping_each_other_are_refused() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ShapeError, match="weight_out overlaps scale_out"):
        native.quantize_nvfp4(
            torch.ones(4, 16),
            1.0,
            MODELOPT,
            False,
            memory[:32].view(4, 8),
            memory[31:35].view(4, 1),
        )


def test_neighbouring_outputs_are_fine() -> None:
    memory = torch.zeros(36, dtype=torch.uint8)
    native.quantize_nvfp4(
        torch.ones(4, 16), 1.0, MODELOPT, False, memory[:32].view(4, 8), memory[32:].view(4, 1)
    )
    assert memory.all()


def test_partial_overlap_of_a_cast_is_refused() -> None:
    memory = torch.zeros(48, dtype=torch.uint8)
    scale, lossless = torch.zeros(1, 1, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.bool)
    scales = torch.zeros(1, 2, dtype=torch.uint8)
    with pytest.raises(ShapeError, match="weight_out overlaps weight"):
        native.mxfp4_to_nvfp4(
            memory[:16].view(1, 16), scale, 127, memory[8:24].view(1, 16), scales, lossless
        )


def test_unchecked_arguments_never_reach_the_kernels() -> None:
    u8 = torch.uint8
    out = torch.empty(2, 16), torch.empty(2, 8, dtype=u8), torch.empty(2, 1, dtype=u8)
    with pytest.raises(ShapeError, match="not contiguous"):
        quantize(torch.ones(32, 2).T)
    with pytest.raises(DtypeError, match=r"x is torch.float64"):
        quantize(torch.ones(2, 16, dtype=torch.float64))
    with pytest.raises(ShapeError, match="K a multiple of 16"):
        quantize(torch.ones(2, 17))
    with pytest.raises(ShapeError, match=r"scale_out has shape \(2, 8\), expected \(2, 1\)"):
        native.quantize_nvfp4(out[0], 1.0, MODELOPT, False, out[1], out[1].clone())
    with pytest.raises(CodecError, match="profile 'te' has arithmetic of its own"):
        native.quantize_nvfp4(out[0], 1.0, get_profile("te"), False, out[1], out[2])
    with pytest.raises(BackendError, match="x is on meta"):
        quantize(torch.ones(2, 16, device="meta"))


def test_concurrent_calls_from_python_threads(isa: str) -> None:
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(64 + 16 * i, 2048, generator=generator) for i in range(6)]
    expected = [quantize(x, isa=isa, threads=1) for x in inputs]
    failures: list[int] = []

    def work(index: int) -> None:
        for _ in range(5):
            found = quantize(inputs[index], isa=isa, threads=3)
            if not all(map(torch.equal, found, expected[index])):
                failures.append(index)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_a_forked_child_starts_its_own_threads(run_python: RunPython) -> None:
    """In the child the pool's threads are gone; waiting for them would hang for ever."""
    code = """
import os, signal, torch
from nvfp4_codec import native
x = torch.ones(512, 2048)
assert native.amax(x, threads=4) == (1.0, 0)  # starts the pool
child = os.fork()
if child == 0:
    signal.alarm(30)
    os._exit(0 if native.amax(x, threads=4) == (1.0, 0) else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert native.amax(x, threads=4) == (1.0, 0)
"""
    done = run_python(code, PYTHONWARNINGS="ignore::DeprecationWarning")
    assert done.returncode == 0, done.stderr


def test_flush_to_zero_of_the_caller_changes_nothing(run_python: RunPython) -> None:
    """torch.set_flush_denormal sets the calling thread's float mode, and it would leak."""
    code = """
import torch
from nvfp4_codec import native
assert torch.set_flush_denormal(True)
weight = torch.full((64, 1024), 0x21, dtype=torch.uint8)  # 0.5 and 1
scale = torch.full((64, 128), 1, dtype=torch.uint8)  # 2^-9
tiny = torch.full((1, 16), 3, dtype=torch.int32).view(torch.float32)
for isa in native.isa_names():
    out = torch.empty(64, 2048, dtype=torch.float32)
    native.dequantize_nvfp4(weight, scale, 2.0**-130, False, out, isa=isa, threads=2)
    bits = out.view(torch.int32)
    assert bits.min() == 2**9 and bits.max() == 2**10, (isa, bits.min(), bits.max())
    native.dequantize_nvfp4(weight, scale, 2.0**-140, False, out, isa=isa, threads=2)
    assert bits.max() == 1, (isa, bits.max())
    assert native.amax(tiny, isa=isa) == (3 * 2.0**-149, 0), isa
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
