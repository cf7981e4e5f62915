"""What stored tensors mean: plain torch formulas in float64, none of ours."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

#: E2M1, by code.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nvfp4(weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor) -> Tensor:
    """e2m1 * weight_scale * weight_scale_2 in float64, even columns in the low nibble."""
    codes = torch.stack([weight & 15, weight >> 4], dim=-1).flatten(-2).long()
    scale = weight_scale.float().repeat_interleave(16, dim=-1)
    return E2M1[codes].double() * scale.double() * weight_scale_2.double()


def fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """e4m3 times the scale of its 128x128 block, in float64; E8M0 is 2^(byte - 127)."""
    if scale.dtype == torch.float8_e8m0fnu:
        scale = 2.0 ** (scale.view(torch.uint8).double() - 127)
    wide = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    rows, columns = weight.shape
    return weight.double() * wide[:rows, :columns]


def mxfp4(weight: Tensor, scale: Tensor) -> Tensor:
    """e2m1 times the E8M0 scale of its 32 columns, in float64."""
    packed = weight.view(torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()
    wide = (2.0 ** (scale.view(torch.uint8).double() - 127)).repeat_interleave(32, dim=-1)
    return E2M1[codes].double() * wide


def values(tensors: Mapping[str, Tensor], module: str) -> Tensor:
    """What a linear's tensors mean, in whichever format they are."""
    weight = tensors[f"{module}.weight"]
    if f"{module}.weight_scale" in tensors:
        return nvfp4(weight, tensors[f"{module}.weight_scale"], tensors[f"{module}.weight_scale_2"])
    if f"{module}.scale" not in tensors:
        return weight.double()
    scale = tensors[f"{module}.scale"]
    return fp8(weight, scale) if weight.dtype == torch.float8_e4m3fn else mxfp4(weight, scale)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bytes."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    first, second = (x.contiguous().view(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(first, second)
