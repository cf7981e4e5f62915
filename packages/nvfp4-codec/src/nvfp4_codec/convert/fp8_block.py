"""NVFP4 to block-scaled FP8, with the error that the second rounding adds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..backends import BackendName
from ..checks import check_block, check_choice, num_blocks
from ..errors import ShapeError
from ..ops import (
    dequantize_fp8_block,
    dequantize_nvfp4,
    quantize_fp8_block,
)
from ..tensors import FP8BlockTensor, GlobalScale
from .inputs import exact_multiplier, nvfp4_bytes, refuse_nan_scales

ScaleFormat = Literal["fp32", "ue8m0"]

_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class RequantizationReport:
    """How far the FP8 values are from the NVFP4 values they replace.

    max_relative_error counts non-zero values; sqnr_db is the ratio of signal to error power
    in decibels (inf if every value is exact).
    """

    num_values: int
    inexact_values: int
    max_abs_error: float
    max_relative_error: float
    sqnr_db: float


def nvfp4_to_fp8_block(
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: GlobalScale,
    *,
    block: tuple[int, int] = (128, 128),
    scale_fmt: ScaleFormat = "fp32",
    backend: BackendName | None = None,
) -> tuple[FP8BlockTensor, RequantizationReport]:
    """Dequantize NVFP4 to float32 and quantize it to E4M3 with a scale per block.

    weight: uint8 ``[N, K/2]``; weight_scale: float8_e4m3fn ``[N, K/16]``; weight_scale_2 as
        for dequantize_nvfp4.
    scale_fmt: "fp32" scales are the block's amax / 448; "ue8m0" scales are the smallest power
        of two not below that (float8_e8m0fnu), never a truncated exponent.
    K is the stored one: if it was padded (NVFP4Tensor.logical_k), so is the result, with
    zeros; cut it with ``weight[:, :logical_k]``.
    At most a few block rows are held in float32 at once. Raises ShapeError unless weight is
    a matrix, NonFiniteError for a NaN block scale, ScaleError for a weight_scale_2 that is not
    positive or decodes to Inf, LayoutError for a SwizzledScale.
    """
    check_choice("scale_fmt", scale_fmt, ScaleFormat)
    check_block(block)
    _, scale_bytes = nvfp4_bytes(weight, weight_scale)
    if weight.ndim != 2:
        raise ShapeError(
            f"weight has shape {tuple(weight.shape)}, expected a matrix [N, K/2]; convert the "
            "matrices of a stack one by one"
        )
    refuse_nan_scales(scale_bytes)
    exact_multiplier(weight_scale_2)  # for its checks
    rows, k = weight.shape[0], 2 * weight.shape[1]

    def values(chunk: slice) -> Tensor:
        return dequantize_nvfp4(
            weight[chunk], weight_scale[chunk], weight_scale_2, dtype=torch.float32, backend=backend
        )

    return _requantize(values, (rows, k), weight, block, scale_fmt, backend)


def quantize_fp8_block_with_report(
    x: Tensor,
    *,
    block: tuple[int, int] = (128, 128),
    scale_fmt: ScaleFormat = "fp32",
    backend: BackendName | None = None,
) -> tuple[FP8BlockTensor, RequantizationReport]:
    """`quantize_fp8_block` of a matrix, and how far the FP8 values are from the given ones.

    x: float ``[N, K]``. Scales, memory and errors as for `nvfp4_to_fp8_block`.
    """
    check_choice("scale_fmt", scale_fmt, ScaleFormat)
    check_block(block)
    if x.ndim != 2:
        raise ShapeError(f"x has shape {tuple(x.shape)}, expected a matrix [N, K]")

    def values(chunk: slice) -> Tensor:
        return x[chunk].float()

    return _requantize(values, (x.shape[0], x.shape[1]), x, block, scale_fmt, backend)


def _requantize(
    values_of: Callable[[slice], Tensor],
    shape: tuple[int, int],
    like: Tensor,
    block: tuple[int, int],
    scale_fmt: ScaleFormat,
    backend: BackendName | None,
) -> tuple[FP8BlockTensor, RequantizationReport]:
    """Quantizes rows as ``values_of`` gives them, a few block rows at a time."""
    rows, k = shape
    result = FP8BlockTensor(
        like.new_empty((rows, k), dtype=torch.float8_e4m3fn),
        like.new_empty(
            num_blocks(torch.Size(shape), block),
            dtype=torch.float32 if scale_fmt == "fp32" else torch.float8_e8m0fnu,
        ),
        block,
    )
    block_rows = max(1, _CHUNK_ELEMENTS // max(1, block[0] * k))
    error = _ErrorSum()
    for first in range(0, result.weight_scale.shape[0], block_rows):
        chunk = slice(first * block[0], (first + block_rows) * block[0])
        values = values_of(chunk)
        part = quantize_fp8_block(
            values,
            block=block,
            scale_fmt=scale_fmt,
            out=(result.weight[chunk], result.weight_scale[first : first + block_rows]),
            backend=backend,
        )
        found = dequantize_fp8_block(*part, block=block, dtype=torch.float32, backend=backend)
        error.add(values, found)
    return result, error.report()


class _ErrorSum:
    """Accumulates the report over chunks."""

    def __init__(self) -> None:
        self.num_values = self.inexact = 0
        self.max_abs = self.max_relative = self.signal = self.noise = 0.0

    def add(self, expected: Tensor, found: Tensor) -> None:
        if not expected.numel():
            return
        error = found - expected
        self.num_values += expected.numel()
        # float32 sums squares well enough for decibels, unless they leave its range.
        largest = _magnitude(expected)
        kind = torch.float32 if 1e-12 < largest < 1e12 else torch.float64
        self.signal += _energy(expected.to(kind))
        inexact = int(torch.count_nonzero(error))
        if not inexact:
            return
        self.inexact += inexact
        self.noise += _energy(error.to(kind))
        self.max_abs = max(self.max_abs, _magnitude(error))
        relative = error.div_(expected).nan_to_num_(nan=0.0)  # zeros stay zeros
        self.max_relative = max(self.max_relative, _magnitude(relative))

    def report(self) -> RequantizationReport:
        # Rounded, so that the order in which threads add does not show.
        sqnr = round(10 * math.log10(self.signal / self.noise), 6) if self.inexact else math.inf
        return RequantizationReport(
            self.num_values, self.inexact, self.max_abs, self.max_relative, sqnr
        )


def _magnitude(x: Tensor) -> float:
    low, high = torch.aminmax(x)
    return max(-float(low), float(high))


def _energy(x: Tensor) -> float:
    flat = x.flatten().double()
    return float(torch.dot(flat, flat))
