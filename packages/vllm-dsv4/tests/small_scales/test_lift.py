"""`lift` moves powers of two between block scales and weight_scale_2, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_dsv4.small_scales import lift

E4M3 = torch.float8_e4m3fn
#: Every non-negative finite E4M3 value below 2^-1, subnormals among them, as one expert's scales.
SMALL = torch.arange(48, dtype=torch.uint8).view(E4M3).float().view(1, 6, 8)


def lifted(scale: Tensor, scale_2: Tensor) -> tuple[Tensor, Tensor, int]:
    scale, scale_2 = scale.to(E4M3), scale_2.clone()
    left = lift(scale, scale_2)
    return scale.float(), scale_2, left


def test_every_small_scale_is_lifted_exactly() -> None:
    scale, scale_2, left = lifted(SMALL, torch.tensor([3.0]))
    assert left == 0
    assert 224 < scale.max() <= 448
    assert torch.equal(scale * scale_2[:, None, None], SMALL * 3)


def test_both_columns_of_w13_follow() -> None:
    scale, scale_2, _ = lifted(SMALL, torch.tensor([[3.0, 3.0]]))
    assert scale_2.shape == (1, 2)
    assert torch.equal(scale * scale_2[:, :1, None], SMALL * 3)


def test_experts_without_subnormal_scales_stay() -> None:
    normal = torch.full((1, 6, 8), 2.0**-6)
    scale, scale_2, left = lifted(torch.cat([normal, SMALL]), torch.tensor([1.0, 1.0]))
    assert torch.equal(scale[0], normal[0])
    assert scale_2[0] == 1
    assert scale_2[1] < 1
    assert left == 0


def test_zeros_stay_zeros() -> None:
    scale, scale_2, left = lifted(torch.zeros(1, 6, 8), torch.tensor([1.0]))
    assert not scale.any()
    assert scale_2 == 1
    assert left == 0


def test_what_no_factor_can_lift_is_counted() -> None:
    """2^-9 beside 2^8: the exact cast's whole window."""
    window = torch.tensor([[[2.0**-9, 2.0**-7, 2.0**-6, 256.0]]])
    scale, _, left = lifted(window, torch.tensor([1.0]))
    assert left == 2
    assert torch.equal(scale, window)
