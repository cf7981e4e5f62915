"""GGML's (llama.cpp's) block records of MXFP4 and NVFP4, which split a block into halves.

Byte j of a block holds element j in the low nibble and element ``j + block / 2`` in the high
one; read as consecutive pairs, the result is fluent nonsense. The scales lie inside the record:

MXFP4, 17 bytes for 32 values: E8M0 scale, 16 bytes of codes (elements j and j + 16)
NVFP4, 36 bytes for 64 values: 4 E4M3 scales, 4 x 8 bytes of codes (j and j + 8 of 16)

A GGUF file keeps NVFP4's per-tensor scale in a tensor of its own; here it is a required
argument, because decoding without it is a known way to lose it.
Source: ggml ``ggml-common.h`` (block_mxfp4, block_nvfp4) and its dequantize_row functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import DtypeError, NonFiniteError, ShapeError
from .formats import as_bytes
from .packing import pack_e2m1, unpack_e2m1
from .tensors import GlobalScale, MXFP4Tensor, NVFP4Tensor

_MX_BLOCK, _MX_SCALES = 32, 1
_NV_BLOCK, _NV_SCALES = 16, 4  # one record holds four NVFP4 blocks


def from_ggml_mxfp4(records: Tensor) -> MXFP4Tensor:
    """Read GGML MXFP4 rows, uint8 ``[..., K / 32 * 17]``; scale byte 255 means NaN here."""
    scale, codes = _split_records(records, _MX_SCALES, _MX_BLOCK)
    return MXFP4Tensor(ggml_to_linear(codes, _MX_BLOCK), scale.view(torch.float8_e8m0fnu))


def to_ggml_mxfp4(tensor: MXFP4Tensor) -> Tensor:
    """Write GGML MXFP4 rows, uint8 ``[..., K / 32 * 17]``."""
    codes = linear_to_ggml(tensor.weight, _MX_BLOCK)
    return _join_records(as_bytes(tensor.weight_scale), codes, _MX_SCALES, _MX_BLOCK)


def from_ggml_nvfp4(records: Tensor, weight_scale_2: GlobalScale) -> NVFP4Tensor:
    """Read GGML NVFP4 rows, uint8 ``[..., K / 64 * 36]``, and the tensor's global scale.

    Raises NonFiniteError for scale bytes 0x7F and above: GGML reads 0x7F as zero and ignores
    the sign bit, everyone else reads NaN and a negative number.
    """
    scale, codes = _split_records(records, _NV_SCALES, _NV_BLOCK)
    num_odd = int((scale >= 0x7F).sum())
    if num_odd:
        raise NonFiniteError(
            f"{num_odd} of {scale.numel()} scale bytes are 0x7F or above, expected "
            "0x00..0x7E; if GGML's reading (zero, no sign) is meant, write 0x00 or clear bit 7"
        )
    weight = ggml_to_linear(codes, _NV_BLOCK)
    return NVFP4Tensor(weight, scale.view(torch.float8_e4m3fn), weight_scale_2)


def to_ggml_nvfp4(tensor: NVFP4Tensor) -> tuple[Tensor, GlobalScale]:
    """Write GGML NVFP4 rows, uint8 ``[..., K / 64 * 36]``; the global scale is stored apart."""
    codes = linear_to_ggml(tensor.weight, _NV_BLOCK)
    records = _join_records(as_bytes(tensor.weight_scale), codes, _NV_SCALES, _NV_BLOCK)
    return records, tensor.weight_scale_2


def ggml_to_linear(weight: Tensor, block_size: int) -> Tensor:
    """Reorder packed codes ``[..., K/2]`` from split halves to consecutive pairs."""
    blocks = _code_blocks(weight, block_size)
    codes = torch.cat((blocks & 0xF, blocks >> 4), dim=-1)
    return pack_e2m1(codes).view(weight.shape)


def linear_to_ggml(weight: Tensor, block_size: int) -> Tensor:
    """Reorder packed codes ``[..., K/2]`` from consecutive pairs to split halves."""
    low, high = unpack_e2m1(_code_blocks(weight, block_size)).chunk(2, dim=-1)
    return (low | high << 4).view(weight.shape)


def _code_blocks(weight: Tensor, block_size: int) -> Tensor:
    weight = as_bytes(weight).contiguous()
    if weight.ndim == 0 or weight.shape[-1] % (block_size // 2):
        raise ShapeError(
            f"weight has shape {tuple(weight.shape)}, expected [..., K/2] with K a multiple of "
            f"{block_size}"
        )
    return weight.view(*weight.shape[:-1], -1, block_size // 2)


def _split_records(records: Tensor, num_scales: int, block_size: int) -> tuple[Tensor, Tensor]:
    size = num_scales * (1 + block_size // 2)
    if records.dtype != torch.uint8:
        raise DtypeError(f"records are {records.dtype}, expected torch.uint8")
    if records.ndim == 0 or records.shape[-1] % size:
        raise ShapeError(
            f"records have shape {tuple(records.shape)}, expected rows of {size}-byte records"
        )
    grid = records.reshape(*records.shape[:-1], -1, size)
    return grid[..., :num_scales].flatten(-2), grid[..., num_scales:].flatten(-2)


def _join_records(scale: Tensor, codes: Tensor, num_scales: int, block_size: int) -> Tensor:
    expected = (*codes.shape[:-1], 2 * codes.shape[-1] // block_size)
    if tuple(scale.shape) != expected or expected[-1] % num_scales:
        raise ShapeError(
            f"weight_scale has shape {tuple(scale.shape)}, expected {expected} with a last "
            f"dimension that is a multiple of {num_scales}"
        )
    scales = scale.reshape(*scale.shape[:-1], -1, num_scales)
    grid = codes.view(*scales.shape[:-1], -1)
    return torch.cat((scales, grid), dim=-1).flatten(-2)
