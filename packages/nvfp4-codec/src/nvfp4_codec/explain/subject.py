"""A tensor as values, and where it has them as parts that can be read differently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..blocks import expand_blocks
from ..errors import DtypeError, ShapeError
from ..formats import as_bytes, decode_e2m1, decode_e4m3, e8m0_to_fp32
from ..packing import unpack_e2m1
from ..scales import BLOCK_SIZE, MX_BLOCK_SIZE
from ..swizzle import SwizzledScale, unswizzle_blockscale
from ..tensors import FP8BlockTensor, MXFP4Tensor, NVFP4Tensor, global_scale_value

Explainable = Tensor | NVFP4Tensor | MXFP4Tensor | FP8BlockTensor
ScaleFormat = Literal["E4M3", "E8M0", "float32"]

_DECODERS: dict[ScaleFormat, Callable[[Tensor], Tensor]] = {
    "E4M3": decode_e4m3,
    "E8M0": e8m0_to_fp32,
    "float32": lambda scale: scale,
}


@dataclass(frozen=True, eq=False)
class Parts:
    """A block-scaled matrix taken apart: values = elements * (scale * global_scale).

    elements: float32 ``[R, C]``. codes: their uint8 codes, same shape. raw_scale: E4M3 or
    E8M0 bytes or float32, one per block, ``[r, c]``; it may be larger than needed (padded).
    """

    elements: Tensor
    codes: Tensor
    raw_scale: Tensor
    scale_format: ScaleFormat
    block: tuple[int, int]
    global_scale: float = 1.0
    divides: bool = False

    @property
    def scale(self) -> Tensor:
        """The block scales as the format says, float32."""
        return _DECODERS[self.scale_format](self.raw_scale)

    def values(self, scale: Tensor | None = None) -> Tensor:
        """The float32 values, read with other float32 block scales if given."""
        scale = self.scale if scale is None else scale
        factor = torch.tensor(self.global_scale, dtype=torch.float32, device=scale.device)
        scale = scale / factor if self.divides else scale * factor
        return self.elements * expand_blocks(scale, self.block, self.elements.shape)


@dataclass(frozen=True, eq=False)
class Subject:
    """One side of a comparison.

    values: float32, at least 2-D. parts: None for a plain tensor. raw: the tensor itself, if
    it was given as one-byte floats (a scale tensor).
    """

    values: Tensor
    parts: Parts | None = None
    raw: Tensor | None = None


def subject_of(x: Explainable, name: str) -> Subject:
    """Decode one input of explain_diff; uint8 is taken for packed E2M1 codes."""
    if isinstance(x, NVFP4Tensor):
        value, divides = global_scale_value(x.weight_scale_2, f"{name}.weight_scale_2")
        parts = _e2m1_parts(x.weight, x.weight_scale, "E4M3", BLOCK_SIZE, name)
        parts = replace(parts, global_scale=value, divides=divides)
        if x.logical_k is not None:
            parts = _without_padding(parts, x.logical_k, name)
        return Subject(parts.values(), parts)
    if isinstance(x, MXFP4Tensor):
        parts = _e2m1_parts(x.weight, x.weight_scale, "E8M0", MX_BLOCK_SIZE, name)
        return Subject(parts.values(), parts)
    if isinstance(x, FP8BlockTensor):
        codes = as_bytes(x.weight)
        e8m0 = x.weight_scale.dtype != torch.float32
        scale = as_bytes(x.weight_scale) if e8m0 else x.weight_scale
        parts = Parts(decode_e4m3(codes), codes, scale, "E8M0" if e8m0 else "float32", x.block)
        return Subject(parts.values(), parts)
    if not isinstance(x, Tensor):
        raise DtypeError(f"{name} is a {type(x).__name__}, expected a tensor of this package")
    if x.dtype in (torch.uint8, torch.int8):
        return Subject(_matrix(decode_e2m1(unpack_e2m1(x))))
    if x.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        return Subject(_matrix(decode_raw(x)), raw=_matrix(x))
    if not x.dtype.is_floating_point:
        raise DtypeError(f"{name} is {x.dtype}, expected floats, packed E2M1 or float8 scales")
    return Subject(_matrix(x.detach().float()))


def decode_raw(x: Tensor) -> Tensor:
    """A tensor of float8_e4m3fn or float8_e8m0fnu as float32."""
    return decode_e4m3(x) if x.dtype == torch.float8_e4m3fn else e8m0_to_fp32(x)


def _e2m1_parts(
    weight: Tensor, scale: Tensor | SwizzledScale, fmt: ScaleFormat, block: int, name: str
) -> Parts:
    codes = unpack_e2m1(weight)
    codes = codes.reshape(-1, codes.shape[-1])
    rows, cols = codes.shape[0], codes.shape[1] // block
    if isinstance(scale, SwizzledScale):
        scale = unswizzle_blockscale(scale)
    raw = as_bytes(scale)
    padded = (rows + -rows % 128, cols + -cols % 4)
    if raw.numel() == rows * cols:
        raw = raw.reshape(rows, cols)
    elif raw.numel() == padded[0] * padded[1]:
        raw = raw.reshape(padded)
    else:
        raise ShapeError(
            f"{name}.weight_scale has shape {tuple(scale.shape)}, expected {rows} x {cols} "
            f"scales, or {padded[0]} x {padded[1]} with padding"
        )
    return Parts(decode_e2m1(codes), codes, raw, fmt, (1, block))


def _without_padding(parts: Parts, logical_k: int, name: str) -> Parts:
    """Drop the columns that quantize_nvfp4(pad=True) added; the last block is then ragged."""
    k = parts.codes.shape[1]
    if not 0 <= logical_k <= k:
        raise ShapeError(f"{name}.logical_k is {logical_k}, expected at most the stored K, {k}")
    return replace(parts, elements=parts.elements[:, :logical_k], codes=parts.codes[:, :logical_k])


def _matrix(values: Tensor) -> Tensor:
    return values if values.ndim > 1 else values.reshape(1, -1)
