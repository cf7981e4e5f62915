"""rescale_weight_scale: unify_weight_scale_2 for scales that come without their codes."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from nvfp4_codec import (
    LosslessError,
    NonFiniteError,
    NVFP4Tensor,
    ScaleError,
    unify_weight_scale_2,
)
from nvfp4_codec.convert import rescale_weight_scale

RATIOS = (Fraction(1, 2), Fraction(3, 10), Fraction(1, 64), Fraction(2, 1000))


def _random(seed: int, rows: int = 24, columns: int = 160) -> tuple[Tensor, Tensor]:
    """Codes, a tenth of the blocks all zero (of both signs), and scales of every magnitude."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns // 16, 8), dtype=torch.uint8, generator=generator)
    empty = torch.rand(rows, columns // 16, generator=generator) < 0.1
    zeros = torch.randint(0, 4, codes.shape, dtype=torch.uint8, generator=generator)
    codes = torch.where(
        empty[..., None], torch.tensor([0, 8, 0x80, 0x88]).byte()[zeros.long()], codes
    )
    shape = (rows, columns // 16)
    scales = torch.randint(0, 0x7F, shape, dtype=torch.uint8, generator=generator)
    return codes.reshape(rows, -1), scales.view(torch.float8_e4m3fn)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("underflow", ["floor", "zero"])
def test_the_same_bytes_and_report_as_for_whole_tensors(ratio: Fraction, underflow: str) -> None:
    codes, scales = _random(1)
    small = torch.tensor(float(ratio), dtype=torch.float32)
    pair = [NVFP4Tensor(codes, scales, torch.tensor(1.0)), NVFP4Tensor(codes, scales, small)]
    unified, reports = unify_weight_scale_2(pair, underflow=underflow)
    exact = Fraction(float(small))
    found, report = rescale_weight_scale(scales, exact, weight=codes, underflow=underflow)
    assert torch.equal(found.view(torch.uint8), unified[1].weight_scale.view(torch.uint8))
    assert report == reports[1]


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_report_counts_blocks_whose_values_moved(ratio: Fraction) -> None:
    codes, scales = _random(2, rows=512)
    found, report = rescale_weight_scale(scales, ratio, weight=codes, underflow="zero")
    moved = found.double() != scales.double() * float(ratio)
    used = (codes.unflatten(-1, (-1, 8)) & 0x77 != 0).any(-1)
    assert bool((moved & ~used).any())
    assert report.inexact_blocks == int((moved & used & (scales.float() != 0)).sum())
    assert report.num_blocks == scales.numel()


def test_without_codes_every_block_counts() -> None:
    codes, scales = _random(3)
    with_codes, exact = rescale_weight_scale(scales, RATIOS[1], weight=codes, underflow="zero")
    without, upper = rescale_weight_scale(scales, RATIOS[1], underflow="zero")
    assert torch.equal(with_codes.view(torch.uint8), without.view(torch.uint8))
    assert upper.inexact_blocks > exact.inexact_blocks


def test_unaligned_codes_count_alike() -> None:
    """safetensors hands out views at any offset; a block is then no aligned integer."""
    codes, scales = _random(4)
    memory = torch.empty(codes.numel() + 3, dtype=torch.uint8)
    shifted = memory[3:].view(codes.shape).copy_(codes)
    assert shifted.storage_offset() % 8
    aligned = rescale_weight_scale(scales, RATIOS[1], weight=codes, underflow="zero")[1]
    assert rescale_weight_scale(scales, RATIOS[1], weight=shifted, underflow="zero")[1] == aligned


def test_a_ratio_of_one_changes_nothing() -> None:
    _, scales = _random(5)
    found, report = rescale_weight_scale(scales, Fraction(1))
    assert found is scales
    assert report.exact


@pytest.mark.parametrize("ratio", [Fraction(0), Fraction(-1, 2), Fraction(3, 2)])
def test_other_ratios_are_refused(ratio: Fraction) -> None:
    _, scales = _random(6)
    with pytest.raises(ScaleError, match="above 0 and at most 1"):
        rescale_weight_scale(scales, ratio)


def test_nan_and_underflow_are_refused() -> None:
    _, scales = _random(7)
    with pytest.raises(LosslessError, match="rounds to zero"):
        rescale_weight_scale(scales, Fraction(1, 1000))
    broken = scales.view(torch.uint8).clone()
    broken[0, 0] = 0x7F
    with pytest.raises(NonFiniteError, match="1 NaN byte"):
        rescale_weight_scale(broken.view(torch.float8_e4m3fn), Fraction(1, 2))
