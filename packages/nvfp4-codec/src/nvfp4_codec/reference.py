"""Every operation in plain torch: the definition of correct for all other backends.

Works on any device, independent of torch's float8 casts. It favours reading over speed
and needs several times its output in memory. Arguments are checked in ``ops``; here
tensors are contiguous ``[rows, K]`` and outputs preallocated, as for every backend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .formats import decode_e2m1, decode_e4m3, e8m0_to_fp32
from .packing import pack_e2m1, unpack_e2m1
from .scales import BLOCK_SIZE, Profile

MX_BLOCK_SIZE = 32


def amax(x: Tensor) -> tuple[float, int]:
    """Largest finite magnitude in x (0.0 if there is none) and the count of non-finite values."""
    magnitude = x.float().abs()
    finite = magnitude.isfinite()
    largest = torch.where(finite, magnitude, 0.0).max() if x.numel() else 0.0
    return float(largest), int(x.numel() - finite.sum())


def quantize_nvfp4(
    x: Tensor,
    global_scale: float,
    profile: Profile,
    saturate: bool,
    weight_out: Tensor,
    scale_out: Tensor,
) -> None:
    """Quantize ``[rows, K]`` to packed codes ``[rows, K/2]`` and scale bytes ``[rows, K/16]``.

    saturate: the input may hold non-finite values: they do not count for the block's amax,
    Inf becomes the block's largest code and NaN becomes code 0.
    """
    blocks = x.float().view(x.shape[0], -1, BLOCK_SIZE)
    scale_2 = profile.typed_scale(torch.tensor(global_scale, device=x.device))
    finite = torch.where(blocks.isfinite(), blocks, 0.0) if saturate else blocks
    scale = profile.block_scale(finite.abs().amax(-1), scale_2)
    codes = profile.encode(profile.normalize(finite, scale, scale_2))
    if saturate:
        infinite = torch.where(blocks > 0, 0x7, 0xF).to(torch.uint8)
        codes = torch.where(blocks.isinf(), infinite, codes)
        codes = torch.where(blocks.isnan(), 0, codes)
    weight_out.copy_(pack_e2m1(codes.view(x.shape)))
    scale_out.copy_(scale)


def dequantize_nvfp4(
    weight: Tensor, weight_scale: Tensor, global_scale: float, divide: bool, out: Tensor
) -> None:
    """``out = e2m1 * float32(weight_scale * global_scale)``, or ``/ global_scale`` with divide."""
    scale_2 = torch.tensor(global_scale, device=weight.device)
    block = decode_e4m3(weight_scale)
    block = block / scale_2 if divide else block * scale_2
    _dequantize_e2m1(weight, block, BLOCK_SIZE, out)


def dequantize_mxfp4(weight: Tensor, scale: Tensor, out: Tensor) -> None:
    """``out = e2m1 * 2^(scale - 127)`` with one E8M0 byte per 32 values."""
    _dequantize_e2m1(weight, e8m0_to_fp32(scale), MX_BLOCK_SIZE, out)


def _dequantize_e2m1(weight: Tensor, scale: Tensor, block_size: int, out: Tensor) -> None:
    values = decode_e2m1(unpack_e2m1(weight)).view(*scale.shape, block_size)
    _store((values * scale.unsqueeze(-1)).view(out.shape), out)


def dequantize_fp8_block(
    weight: Tensor, scale: Tensor, block: tuple[int, int], out: Tensor
) -> None:
    """``out = e4m3 * scale`` with one float32 scale per ``block``; edge blocks may be ragged."""
    rows, columns = weight.shape
    full = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    _store(decode_e4m3(weight) * full, out)


def _store(values: Tensor, out: Tensor) -> None:
    """Round float32 to out's dtype; every NaN becomes the one canonical quiet NaN."""
    out.copy_(values)
    out.masked_fill_(values.isnan(), float("nan"))
