"""Conversions give the same bytes on the GPU as on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nvfp4_codec import (
    LosslessError,
    NVFP4Tensor,
    explain_diff,
    joint_weight_scale_2,
    mxfp4_to_nvfp4,
    nvfp4_to_fp8_block,
    unify_weight_scale_2,
)

pytestmark = pytest.mark.gpu


def _mxfp4(low: int, high: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(low)
    weight = torch.randint(0, 256, (160, 256), generator=generator, dtype=torch.uint8)
    scale = torch.randint(low, high, (160, 16), generator=generator, dtype=torch.uint8)
    return weight, scale


def _assert_same(cpu: Tensor, gpu: Tensor) -> None:
    assert gpu.device.type == "cuda"
    assert torch.equal(cpu.contiguous().view(torch.uint8), gpu.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize(("low", "high"), [(110, 128), (90, 130), (0, 30), (236, 254)])
def test_mxfp4_to_nvfp4(low: int, high: int) -> None:
    weight, scale = _mxfp4(low, high)
    cpu = mxfp4_to_nvfp4(weight, scale, outside="requantize", backend="reference")
    gpu = mxfp4_to_nvfp4(weight.cuda(), scale.cuda(), outside="requantize")
    for ours, theirs in zip(cpu, gpu, strict=True):
        _assert_same(ours.reshape(-1), theirs.reshape(-1))
    assert torch.equal(joint_weight_scale_2([scale.cuda()]).cpu(), joint_weight_scale_2([scale]))


def test_the_window_is_checked_on_the_gpu() -> None:
    weight, scale = _mxfp4(90, 130)
    with pytest.raises(LosslessError, match="outside='requantize'"):
        mxfp4_to_nvfp4(weight.cuda(), scale.cuda())


@pytest.mark.parametrize("scale_fmt", ["fp32", "ue8m0"])
def test_nvfp4_to_fp8_block(scale_fmt: str) -> None:
    cast = mxfp4_to_nvfp4(*_mxfp4(110, 128), backend="reference")
    cpu, cpu_report = nvfp4_to_fp8_block(*cast[:3], scale_fmt=scale_fmt, backend="reference")
    gpu, gpu_report = nvfp4_to_fp8_block(*(x.cuda() for x in cast[:3]), scale_fmt=scale_fmt)
    _assert_same(cpu.weight, gpu.weight)
    _assert_same(cpu.weight_scale, gpu.weight_scale)
    assert gpu_report.inexact_values == cpu_report.inexact_values
    assert gpu_report.max_abs_error == cpu_report.max_abs_error
    assert gpu_report.sqnr_db == pytest.approx(cpu_report.sqnr_db)


def test_unify_and_explain() -> None:
    cast = mxfp4_to_nvfp4(*_mxfp4(110, 128), backend="reference")
    parts = [
        NVFP4Tensor(cast.weight, cast.weight_scale, torch.tensor(value)) for value in (1e-4, 3e-4)
    ]
    moved = [
        NVFP4Tensor(*(x.cuda() for x in part if isinstance(x, Tensor)))  # type: ignore[arg-type]
        for part in parts
    ]
    (cpu, _), cpu_reports = unify_weight_scale_2(parts, underflow="floor")
    (gpu, _), gpu_reports = unify_weight_scale_2(moved, underflow="floor")
    _assert_same(cpu.weight_scale, gpu.weight_scale)
    assert cpu_reports == gpu_reports
    wrong = NVFP4Tensor(gpu.weight << 4 | gpu.weight >> 4, gpu.weight_scale, gpu.weight_scale_2)
    best = explain_diff(gpu, wrong).best
    assert best is not None
    assert best.name == "nibble-order"
