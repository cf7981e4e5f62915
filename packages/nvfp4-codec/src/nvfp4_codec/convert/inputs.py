"""What every conversion checks about packed weights and their linear block scales."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import linear_scale, packed_weight
from ..scales import BLOCK_SIZE, MX_BLOCK_SIZE

E8M0_DTYPES = (torch.float8_e8m0fnu, torch.uint8)


def nvfp4_bytes(weight: Tensor, weight_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[..., K/2]`` and E4M3 bytes ``[..., K/16]``, contiguous and of matching shapes."""
    return _bytes(weight, weight_scale, (torch.float8_e4m3fn,), BLOCK_SIZE)


def mxfp4_bytes(weight: Tensor, weight_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[..., K/2]`` and E8M0 bytes ``[..., K/32]``, contiguous and of matching shapes."""
    return _bytes(weight, weight_scale, E8M0_DTYPES, MX_BLOCK_SIZE)


def _bytes(
    weight: Tensor, weight_scale: Tensor, dtypes: tuple[torch.dtype, ...], block_size: int
) -> tuple[Tensor, Tensor]:
    codes = packed_weight(weight)
    k = 2 * codes.shape[-1]
    shape = (*codes.shape[:-1], k // block_size)
    return codes, linear_scale(weight_scale, dtypes, shape, k % block_size)
