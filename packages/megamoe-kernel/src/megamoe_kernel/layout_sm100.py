"""sm_100a: codes as rows for TMA, scales in the order of tcgen05.cp, gate and up within a warp.

codes uint8 ``[E, N, K/2]``: K-major rows, which a TMA load with the 128-byte swizzle takes in boxes
    of 256 columns. Only the rows of ``w13`` move.
scales int32 ``[E, N, K/64]`` with strides ``(., 1, N)``: four UE4M3 bytes of a row, lowest k in the
    low byte, are the scales of one MMA (K = 64); within 128 rows the word of row m is at
    ``(m % 32) * 4 + m // 32``, as tcgen05.cp 32x128b.warpx4 copies it to tensor memory.

Gate and up: a warp of the epilogue reads 32 rows of the accumulator with tcgen05.ld 16x256b, in
which a thread gets the rows g, g + 8, g + 16 and g + 24. Rows come in 32s: the gate rows of 16
outputs with even index, their up rows, the gate rows with odd index, their up rows. So a thread has
gate and up of the outputs 2 g and 2 g + 1, which make one byte of the requantized intermediate, and
the warp has all 16 values of an NVFP4 block.

Sources: PTX ISA, "tcgen05: matrix fragments" and "scale factor A layout"; CUTLASS's
``sm100_blockscaled_layout.hpp``; nvfp4_codec.swizzle, whose "utccp" order this is.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from nvfp4_codec import SwizzledScale, swizzle_blockscale, unswizzle_blockscale

from .errors import RecipeError, ShapeError
from .experts import ALIGNMENT, BLOCK_SIZE, check_dtype

_WORD = 4  # scale bytes in an int32


def interleave_gate_up(rows: Tensor) -> Tensor:
    """Reorder ``[E, N, ...]``, gate then up rows, to [g even, u even, g odd, u odd] in eights."""
    experts, num_rows, *rest = rows.shape
    split = rows.view(experts, 2, num_rows // 32, 8, 2, *rest)  # part, block, pair, parity
    order = (0, 2, 4, 1, 3, *range(5, split.ndim))
    return split.permute(order).reshape(rows.shape)


def separate_gate_up(rows: Tensor) -> Tensor:
    """The inverse of interleave_gate_up."""
    experts, num_rows, *rest = rows.shape
    split = rows.view(experts, num_rows // 32, 2, 2, 8, *rest)  # block, parity, part, pair
    order = (0, 3, 1, 4, 2, *range(5, split.ndim))
    return split.permute(order).reshape(rows.shape)


def to_scale_words(scale: Tensor) -> Tensor:
    """Scale bytes uint8 ``[E, N, K/16]`` as the int32 words that tcgen05.cp copies."""
    return swizzle_blockscale(scale, "utccp").data


def from_scale_words(words: Tensor) -> Tensor:
    """The inverse of to_scale_words, for K a multiple of 64."""
    rows, num_words = words.shape[-2:]
    return unswizzle_blockscale(SwizzledScale(words, rows, num_words * _WORD, "utccp", torch.uint8))


def pack_ue4m3_to_int32(scale: Tensor) -> Tensor:
    """Four UE4M3 scales per int32, lowest k in the low byte: ``[..., K/16]`` to ``[..., K/64]``.

    scale: float8_e4m3fn, or its bytes as uint8. The words may be negative: they are bytes, not
    numbers, so take them apart with a mask after the shift. Any strides; empty is fine. Raises
    DtypeError, or ShapeError if the last dimension is no multiple of 4.
    """
    check_dtype("scale", scale, torch.float8_e4m3fn, torch.uint8)
    _check_whole_words("scale", scale, dimensions=1)
    # A copy: bytes at an odd address, or with odd strides, are no words.
    shape = (*scale.shape[:-1], scale.shape[-1] // _WORD)
    words = torch.empty(shape, dtype=torch.int32, device=scale.device)
    words.view(torch.uint8).copy_(scale.view(torch.uint8))
    return words


def transform_sf_into_required_layout(
    sf: Tensor, *, gran_k: int = BLOCK_SIZE, order: Literal["mn_major", "utccp"] = "mn_major"
) -> Tensor:
    """Scales in reading order to the packed words that the kernels load: int32 ``[..., N, K/64]``.

    sf: float8_e4m3fn, or its bytes as uint8, ``[..., N, K/16]``; or int32 ``[..., N, K/64]`` from
        pack_ue4m3_to_int32.
    gran_k: values per scale. Only 16: MXFP4's 32 has E8M0 scales, for which there is
        nvfp4_codec.get_mn_major_tma_aligned_packed_ue8m0_tensor.
    order: "mn_major" (strides 1 and N aligned to 4, for TMA) or "utccp" (the same memory, rows
        permuted within each 128; N a multiple of 128): what transformed weights hold.
    Any strides; empty is fine. Raises RecipeError, DtypeError, and ShapeError for fewer than two
    dimensions or a K that is no multiple of 64.
    """
    if gran_k != BLOCK_SIZE:
        raise RecipeError(
            f"gran_k is {gran_k!r}, expected {BLOCK_SIZE}: one UE4M3 scale for 16 values of NVFP4; "
            "for E8M0 scales use nvfp4_codec.get_mn_major_tma_aligned_packed_ue8m0_tensor"
        )
    if order not in ("mn_major", "utccp"):
        raise RecipeError(f"order is {order!r}, expected 'mn_major' or 'utccp'")
    check_dtype("sf", sf, torch.float8_e4m3fn, torch.uint8, torch.int32)
    if sf.dtype == torch.int32 and sf.ndim:
        sf = sf.contiguous().view(torch.uint8)
    _check_whole_words("sf", sf, dimensions=2)
    if order == "utccp" and sf.shape[-2] % ALIGNMENT:
        raise ShapeError(
            f"sf has {sf.shape[-2]} rows, expected a multiple of {ALIGNMENT} for order 'utccp'; "
            "pad them with zero bytes"
        )
    return swizzle_blockscale(sf, order).data


def _check_whole_words(name: str, scale: Tensor, *, dimensions: int) -> None:
    if scale.ndim < dimensions or scale.shape[-1] % _WORD:
        rows = "N, " if dimensions == 2 else ""
        raise ShapeError(
            f"{name} has shape {tuple(scale.shape)}, expected [..., {rows}K/16] with a last "
            f"dimension that is a multiple of {_WORD}; pad it with zero bytes"
        )
