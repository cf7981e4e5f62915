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

from .checks import linear_scale, packed_weight
from .errors import DtypeError, NonFiniteError, ShapeError
from .packing import pack_e2m1, unpack_e2m1
from .tensors import GlobalScale, MXFP4Tensor, NVFP4Tensor, dtype_of, global_scale_value

_MX_BLOCK, _MX_SCALES = 32, 1
_NV_BLOCK, _NV_SCALES = 16, 4  # one record holds four NVFP4 blocks


def from_ggml_mxfp4(records: Tensor) -> MXFP4Tensor:
    """Read GGML MXFP4 rows, uint8 ``[..., K / 32 * 17]``; scale byte 255 means NaN here."""
    scale, codes = _split_records(records, _MX_SCALES, _MX_BLOCK)
    return MXFP4Tensor(ggml_to_linear(codes, _MX_BLOCK), scale.view(torch.float8_e8m0fnu))


def to_ggml_mxfp4(tensor: MXFP4Tensor) -> Tensor:
    """Write GGML MXFP4 rows, uint8 ``[..., K / 32 * 17]``.

    Raises DtypeError unless tensor is an MXFP4Tensor with float8_e8m0fnu or uint8 scales,
    ShapeError if they do not fit the weights, LayoutError for a SwizzledScale.
    """
    if not isinstance(tensor, MXFP4Tensor):
        raise DtypeError(f"tensor is a {type(tensor).__name__}, expected an MXFP4Tensor")
    dtypes = (torch.float8_e8m0fnu, torch.uint8)
    return _join_records(tensor.weight, tensor.weight_scale, dtypes, _MX_SCALES, _MX_BLOCK)


def from_ggml_nvfp4(records: Tensor, weight_scale_2: GlobalScale) -> NVFP4Tensor:
    """Read GGML NVFP4 rows, uint8 ``[..., K / 64 * 36]``, and the tensor's global scale.

    Raises NonFiniteError for scale bytes 0x7F and above: GGML reads 0x7F as zero and ignores
    the sign bit, everyone else reads NaN and a negative number; DtypeError or ShapeError if
    weight_scale_2 is no float32 tensor of one element and no Divisor.
    """
    global_scale_value(weight_scale_2)  # for its checks
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
    """Write GGML NVFP4 rows, uint8 ``[..., K / 64 * 36]``; the global scale is stored apart.

    K is the stored one, padding included. Raises DtypeError unless tensor is an NVFP4Tensor with
    float8_e4m3fn scales, ShapeError if they do not fit the weights or K is no multiple of 64,
    LayoutError for a SwizzledScale.
    """
    if not isinstance(tensor, NVFP4Tensor):
        raise DtypeError(f"tensor is a {type(tensor).__name__}, expected an NVFP4Tensor")
    dtypes = (torch.float8_e4m3fn,)
    records = _join_records(tensor.weight, tensor.weight_scale, dtypes, _NV_SCALES, _NV_BLOCK)
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
    weight = packed_weight(weight)
    block_bytes = block_size // 2
    if weight.shape[-1] % block_bytes:
        raise ShapeError(
            f"weight has shape {tuple(weight.shape)}, expected [..., K/2] with K a multiple of "
            f"{block_size}"
        )
    # Sizes are spelled out here and below: -1 is ambiguous where there are no rows.
    return weight.view(*weight.shape[:-1], weight.shape[-1] // block_bytes, block_bytes)


def _split_records(records: Tensor, num_scales: int, block_size: int) -> tuple[Tensor, Tensor]:
    size = num_scales * (1 + block_size // 2)
    if dtype_of(records) != torch.uint8:
        raise DtypeError(f"records are {dtype_of(records)}, expected torch.uint8")
    if records.ndim == 0 or records.shape[-1] % size:
        raise ShapeError(
            f"records have shape {tuple(records.shape)}, expected rows of {size}-byte records"
        )
    grid = records.reshape(*records.shape[:-1], records.shape[-1] // size, size)
    return grid[..., :num_scales].flatten(-2), grid[..., num_scales:].flatten(-2)


def _join_records(
    weight: Tensor,
    weight_scale: Tensor,
    dtypes: tuple[torch.dtype, ...],
    num_scales: int,
    block_size: int,
) -> Tensor:
    codes = linear_to_ggml(weight, block_size)
    num_blocks = 2 * codes.shape[-1] // block_size
    if num_blocks % num_scales:
        raise ShapeError(
            f"weight has shape {tuple(weight.shape)}, {num_blocks} blocks of {block_size} per "
            f"row, expected a multiple of {num_scales} blocks (K a multiple of "
            f"{num_scales * block_size})"
        )
    scale = linear_scale(weight_scale, dtypes, (*codes.shape[:-1], num_blocks), 0)
    grid_shape = (*codes.shape[:-1], num_blocks // num_scales)
    record = (
        scale.view(*grid_shape, num_scales),
        codes.view(*grid_shape, num_scales * block_size // 2),
    )
    return torch.cat(record, dim=-1).flatten(-2)
