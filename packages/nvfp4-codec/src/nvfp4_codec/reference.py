"""Every operation in plain torch: the definition of correct for all other backends.

Works on any device, independent of torch's float8 casts. It favours reading over speed;
rows are processed in chunks so that its temporaries stay small. Arguments are checked in
``ops``; here tensors are contiguous ``[rows, K]`` and outputs preallocated, as for every
backend. Scales are ``scales``'s formulas; values are rounded by ``formats``'s encoders.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .blocks import as_blocks, expand_blocks
from .formats import (
    E2M1,
    E4M3,
    decode_e2m1,
    decode_e4m3,
    e8m0_to_fp32,
    encode_e2m1,
    encode_e4m3,
    fp32_to_e8m0,
)
from .packing import pack_e2m1, unpack_e2m1
from .scales import (
    BLOCK_SIZE,
    MX_BLOCK_SIZE,
    MXScaleMode,
    Profile,
    fp8_block_scale,
    mx_block_scale,
)

CHUNK = 1 << 20  # elements per chunk; temporaries are about 40 bytes per element


def amax(x: Tensor) -> tuple[float, int]:
    """Largest finite magnitude in x (0.0 if there is none) and the count of non-finite values."""
    largest, num_nonfinite = 0.0, 0
    for rows in _row_chunks(x):
        magnitude, finite = _finite_magnitude(x[rows])
        largest = max(largest, float(magnitude.max()))
        num_nonfinite += int(finite.numel() - finite.sum())
    return largest, num_nonfinite


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
    scale_2 = profile.typed_scale(_fp32(global_scale, x))
    for rows in _row_chunks(x):
        chunk = x[rows]
        blocks = chunk.view(chunk.shape[0], -1, BLOCK_SIZE)
        magnitude, finite = _finite_magnitude(blocks)
        scale = profile.block_scale(magnitude.amax(-1), scale_2)
        values = torch.where(finite, blocks, 0).float()
        codes = profile.encode(profile.normalize(values, scale, scale_2))
        if saturate:
            codes = _replace_nonfinite(codes, blocks, E2M1.max_code, E2M1.sign_bit)
        weight_out[rows] = pack_e2m1(codes.view(chunk.shape))
        scale_out[rows] = scale


def dequantize_nvfp4(
    weight: Tensor, weight_scale: Tensor, global_scale: float, divide: bool, out: Tensor
) -> None:
    """``out = e2m1 * float32(weight_scale * global_scale)``, or ``/ global_scale`` with divide."""
    scale_2 = _fp32(global_scale, weight)
    for rows in _row_chunks(out):
        scale = decode_e4m3(weight_scale[rows])
        scale = scale / scale_2 if divide else scale * scale_2
        _dequantize_e2m1(weight[rows], scale, BLOCK_SIZE, out[rows])


def quantize_mxfp4(
    x: Tensor, scale_mode: MXScaleMode, saturate: bool, weight_out: Tensor, scale_out: Tensor
) -> None:
    """Quantize ``[rows, K]`` to packed codes ``[rows, K/2]`` and E8M0 bytes ``[rows, K/32]``.

    A value is divided by its scale exactly and rounded to nearest even, once; values beyond
    6 * scale saturate, -0.0 and negative values that round to zero give code 8. saturate:
    as in quantize_nvfp4.
    """
    for rows in _row_chunks(x):
        chunk = x[rows]
        blocks = chunk.view(chunk.shape[0], -1, MX_BLOCK_SIZE)
        magnitude, finite = _finite_magnitude(blocks)
        scale = mx_block_scale(magnitude.amax(-1), scale_mode)
        values = torch.where(finite, blocks, 0).float()
        codes = encode_e2m1(values / e8m0_to_fp32(scale).unsqueeze(-1))
        if saturate:
            codes = _replace_nonfinite(codes, blocks, E2M1.max_code, E2M1.sign_bit)
        weight_out[rows] = pack_e2m1(codes.view(chunk.shape))
        scale_out[rows] = scale


def dequantize_mxfp4(weight: Tensor, scale: Tensor, out: Tensor) -> None:
    """``out = e2m1 * 2^(scale - 127)`` with one E8M0 byte per 32 values."""
    for rows in _row_chunks(out):
        _dequantize_e2m1(weight[rows], e8m0_to_fp32(scale[rows]), MX_BLOCK_SIZE, out[rows])


def quantize_fp8_block(
    x: Tensor,
    block: tuple[int, int],
    ue8m0: bool,
    saturate: bool,
    weight_out: Tensor,
    scale_out: Tensor,
) -> None:
    """Quantize ``[rows, K]`` to E4M3 bytes and one scale per ``block``.

    ``e4m3 = float32(x / scale)``, rounded to nearest even, saturating at +-448, -0.0 kept.
    scale_out is float32, or E8M0 bytes (uint8) with ue8m0. saturate: as in quantize_nvfp4.
    """
    for rows in _row_chunks(x, block[0]):
        chunk = x[rows]
        magnitude, finite = _finite_magnitude(chunk)
        scale = fp8_block_scale(as_blocks(magnitude, block).amax((1, 3)), ue8m0)
        values = torch.where(finite, chunk, 0).float()
        codes = encode_e4m3(values / expand_blocks(scale, block, chunk.shape))
        if saturate:
            codes = _replace_nonfinite(codes, chunk, E4M3.max_code, E4M3.sign_bit)
        weight_out[rows] = codes
        first = rows.start // block[0]
        stored = fp32_to_e8m0(scale, "exact") if ue8m0 else scale
        scale_out[first : first + scale.shape[0]] = stored


def dequantize_fp8_block(
    weight: Tensor, scale: Tensor, block: tuple[int, int], out: Tensor
) -> None:
    """``out = e4m3 * scale`` with one float32 scale per ``block``; edge blocks may be ragged."""
    for rows in _row_chunks(weight, block[0]):
        chunk = weight[rows]
        first = rows.start // block[0]
        some = scale[first : first - (-chunk.shape[0] // block[0])]
        _store(decode_e4m3(chunk) * expand_blocks(some, block, chunk.shape), out[rows])


def mxfp4_to_nvfp4(
    weight: Tensor,
    scale: Tensor,
    shift: int,
    weight_out: Tensor,
    scale_out: Tensor,
    lossless_out: Tensor,
) -> int:
    """Copy the codes; write two E4M3 bytes ``2^(scale - shift)`` per E8M0 byte.

    The exponent is clamped to E4M3's powers of two, 2^-9..2^8; NaN stays NaN. lossless_out
    (bool, one per E8M0 byte) is False where clamping changed the scale of a block that has a
    non-zero code. weight_out may be weight itself. Returns the number of False.
    """
    exponent = scale.int() - shift
    clamped = exponent.clamp(-9, 8)
    byte = encode_e4m3(e8m0_to_fp32((clamped + 127).to(torch.uint8)))
    nan = scale == 255
    scale_out.copy_(torch.where(nan, 0x7F, byte).repeat_interleave(2, dim=-1))
    zero = (weight.view(*scale.shape, MX_BLOCK_SIZE // 2) & 0x77 == 0).all(-1)
    lossless_out.copy_((exponent == clamped) | zero | nan)
    weight_out.copy_(weight)
    return int(lossless_out.numel() - lossless_out.sum())


def _row_chunks(x: Tensor, multiple: int = 1) -> Iterator[slice]:
    """Slices that cover x's rows, each a multiple of rows (the last may be shorter)."""
    num_rows, columns = x.shape
    if not columns:
        return
    step = max(1, CHUNK // (columns * multiple)) * multiple
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _finite_magnitude(x: Tensor) -> tuple[Tensor, Tensor]:
    """|x| with 0 for every NaN and Inf, in x's dtype; and where x is finite."""
    finite = x.isfinite()
    return torch.where(finite, x, 0).abs(), finite


def _replace_nonfinite(codes: Tensor, x: Tensor, max_code: int, sign_bit: int) -> Tensor:
    """Give Inf the largest code with its sign, and NaN code 0."""
    infinite = torch.where(x > 0, max_code, max_code | sign_bit).to(torch.uint8)
    codes = torch.where(x.isinf(), infinite, codes)
    return torch.where(x.isnan(), 0, codes)


def _dequantize_e2m1(weight: Tensor, scale: Tensor, block_size: int, out: Tensor) -> None:
    values = decode_e2m1(unpack_e2m1(weight)).view(*scale.shape, block_size)
    _store((values * scale.unsqueeze(-1)).view(out.shape), out)


def _fp32(value: float, like: Tensor) -> Tensor:
    # Explicit dtype and device: loaders change torch's defaults while they run.
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _store(values: Tensor, out: Tensor) -> None:
    """Round float32 to out's dtype; every NaN becomes the one canonical quiet NaN."""
    out.copy_(values)
    out.masked_fill_(values.isnan(), float("nan"))
