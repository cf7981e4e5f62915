"""The Triton backend for CUDA tensors: the kernels' launchers, with the reference's bytes.

The kernels are in ``triton_quantize`` and ``triton_dequantize``. Block formats are flat arrays
of blocks to them: rows matter to block-FP8 only. Tensors that are not aligned to a kernel's
words (a view at an odd offset) are copied first; that is correct and slow.

Launch shapes were measured on an H200 (benchmarks/gpu.py) and are fixed: nothing is tuned at
run time, so the first call costs a compilation and every later one the launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import triton_dequantize, triton_quantize
from .scales import (
    PARAMETRIC_PROFILES,
    MXScaleMode,
    Profile,
    mx_rounds_up_from,
    require_parametric,
)

NVFP4_PROFILES = tuple(sorted(PARAMETRIC_PROFILES, reverse=True))


@dataclass(frozen=True)
class Launch:
    """Threads are 32 * num_warps, each with ``unroll`` words or blocks."""

    num_warps: int
    unroll: int

    @property
    def threads(self) -> int:
        return 32 * self.num_warps


QUANTIZE_NVFP4 = Launch(num_warps=4, unroll=2)
QUANTIZE_MXFP4 = Launch(num_warps=4, unroll=1)
DEQUANTIZE_E2M1 = Launch(num_warps=4, unroll=2)
DEQUANTIZE_E4M3 = Launch(num_warps=4, unroll=4)

_AMAX_TILE = 2048
_AMAX_PROGRAMS_PER_PROCESSOR = 16

_FORMATS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_SMALLEST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: 2.0**-149}
_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}


def unavailable_reason() -> str | None:
    """Why this backend cannot be used here, or None if it can."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return None


def amax(x: Tensor) -> tuple[float, int]:
    """Largest finite magnitude in x (0.0 if there is none) and the count of non-finite values.

    One pass and one synchronization; a second pass only if something is not finite.
    """
    if x.numel() == 0:
        return 0.0, 0
    integer = torch.int32 if x.dtype == torch.float32 else torch.int16
    bits, num_nonfinite = start_amax(x).tolist()
    if bits >= _INFINITY[x.dtype]:
        bits, num_nonfinite = start_amax(x, count_nonfinite=True).tolist()
    return float(torch.tensor(bits, dtype=integer, device="cpu").view(x.dtype)), num_nonfinite


def start_amax(x: Tensor, count_nonfinite: bool = False) -> Tensor:
    """Queue one pass over x (not empty); int64 ``[2]``: the largest magnitude's bits, and a count.

    Without count_nonfinite the count stays zero and NaN and Inf count as magnitudes.
    """
    integer = torch.int32 if x.dtype == torch.float32 else torch.int16
    result = torch.zeros(2, dtype=torch.int64, device=x.device)
    with _on_device_of(x):
        _launch(
            triton_quantize.amax_bits,
            _amax_programs(x),
            Launch(num_warps=4, unroll=1),
            x.view(integer),
            result,
            x.numel(),
            MASK=torch.iinfo(integer).max,
            INFINITY=_INFINITY[x.dtype],
            COUNT_NONFINITE=count_nonfinite,
            SIZE=_AMAX_TILE,
        )
    return result


def _amax_programs(x: Tensor) -> int:
    processors = (
        torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    )
    return max(1, min(x.numel() // _AMAX_TILE, processors * _AMAX_PROGRAMS_PER_PROCESSOR))


def quantize_nvfp4(
    x: Tensor,
    global_scale: float,
    profile: Profile,
    saturate: bool,
    weight_out: Tensor,
    scale_out: Tensor,
) -> None:
    """As ``reference.quantize_nvfp4``, for the profiles in NVFP4_PROFILES."""
    require_parametric(profile, "triton")
    launch = QUANTIZE_NVFP4
    num_blocks = scale_out.numel()
    fast = _is_fast(global_scale, x.dtype)
    one = np.float32(1)
    reciprocal = float(one / (np.float32(6) * np.float32(global_scale))) if fast else 1.0
    with _on_device_of(x), _as_words(weight_out) as words:
        _launch(
            triton_quantize.quantize_nvfp4,
            -(-num_blocks // (launch.threads * launch.unroll)),
            launch,
            _words(x, torch.int32),
            words,
            scale_out,
            num_blocks,
            _float32_bits(global_scale),
            _float32_bits(reciprocal),
            FORMAT=_FORMATS[x.dtype],
            ZERO_BLOCK_SCALE=profile.zero_block_scale,
            MIN_SCALE=profile.min_scale,
            KEEP_NEGATIVE_ZERO=profile.keep_negative_zero,
            SATURATE=saturate,
            FAST=fast,
            BLOCKS=launch.threads,
            UNROLL=launch.unroll,
        )


def _is_fast(global_scale: float, dtype: torch.dtype) -> bool:
    """Whether division by multiplication is exact for every value of dtype; see the kernel.

    Block divisors are within 2^-9..448 times the global scale. Their reciprocals, and the
    remainders of quotients near a rounding boundary, must be normal numbers (or, the latter,
    exact subnormal ones), and no quotient of a non-zero value may round to zero.
    """
    in_range = 2.0**-90 <= global_scale <= 2.0**90
    return in_range and 512 * global_scale < _SMALLEST[dtype] * 2.0**150


def dequantize_nvfp4(
    weight: Tensor, weight_scale: Tensor, global_scale: float, divide: bool, out: Tensor
) -> None:
    """As ``reference.dequantize_nvfp4``."""
    scale = "divide" if divide else "multiply"
    _dequantize_e2m1(weight, weight_scale, global_scale, scale, out)


def quantize_mxfp4(
    x: Tensor, scale_mode: MXScaleMode, saturate: bool, weight_out: Tensor, scale_out: Tensor
) -> None:
    """As ``reference.quantize_mxfp4``."""
    rounds_up_from = mx_rounds_up_from(scale_mode)
    launch = QUANTIZE_MXFP4
    num_blocks = scale_out.numel()
    with _on_device_of(x), _as_words(weight_out) as words:
        _launch(
            triton_quantize.quantize_mxfp4,
            -(-num_blocks // launch.threads),
            launch,
            _words(x, torch.int32),
            words,
            scale_out,
            num_blocks,
            FORMAT=_FORMATS[x.dtype],
            ROUND_UP_FROM=rounds_up_from,
            SATURATE=saturate,
            BLOCKS=launch.threads,
        )


def dequantize_mxfp4(weight: Tensor, scale: Tensor, out: Tensor) -> None:
    """As ``reference.dequantize_mxfp4``."""
    _dequantize_e2m1(weight, scale, 1.0, "e8m0", out)


def _dequantize_e2m1(
    weight: Tensor, scale: Tensor, global_scale: float, kind: str, out: Tensor
) -> None:
    launch = DEQUANTIZE_E2M1
    # One store per thread is 16 bytes: eight values, or four of float32.
    words = _words(weight, torch.int16 if out.dtype == torch.float32 else torch.int32)
    with _on_device_of(out):
        _launch(
            triton_dequantize.dequantize_e2m1,
            -(-words.numel() // (launch.threads * launch.unroll)),
            launch,
            words,
            scale,
            out,
            words.numel(),
            _float32_bits(global_scale),
            SCALE=kind,
            WORDS=launch.threads,
            UNROLL=launch.unroll,
        )


def quantize_fp8_block(
    x: Tensor,
    block: tuple[int, int],
    ue8m0: bool,
    saturate: bool,
    weight_out: Tensor,
    scale_out: Tensor,
) -> None:
    """As ``reference.quantize_fp8_block``."""
    rows, columns = x.shape
    with _on_device_of(x):
        _launch(
            triton_quantize.quantize_fp8_block,
            scale_out.numel(),
            Launch(num_warps=8, unroll=1),
            x,
            weight_out,
            scale_out,
            rows,
            columns,
            BLOCK_ROWS=block[0],
            BLOCK_COLUMNS=block[1],
            UE8M0=ue8m0,
            SATURATE=saturate,
            ROWS=32,
            COLUMNS=128,
        )


def dequantize_fp8_block(
    weight: Tensor, scale: Tensor, block: tuple[int, int], out: Tensor
) -> None:
    """As ``reference.dequantize_fp8_block``; fastest if width and block width divide by 4."""
    rows, columns = weight.shape
    launch = DEQUANTIZE_E4M3
    with _on_device_of(out):
        if columns % 4 or block[1] % 4:
            _launch(
                triton_dequantize.dequantize_e4m3_bytes,
                -(-rows // 8) * -(-columns // 128),
                launch,
                weight,
                scale,
                out,
                rows,
                columns,
                BLOCK_ROWS=block[0],
                BLOCK_COLUMNS=block[1],
                ROWS=8,
                COLUMNS=128,
            )
            return
        tile_rows, tile_words = launch.num_warps, 32
        _launch(
            triton_dequantize.dequantize_e4m3_words,
            -(-rows // (tile_rows * launch.unroll)) * -(-columns // (4 * tile_words)),
            launch,
            _words(weight, torch.int32),
            scale,
            out,
            rows,
            columns // 4,
            BLOCK_ROWS=block[0],
            BLOCK_WORDS=block[1] // 4,
            ROWS=tile_rows,
            WORDS=tile_words,
            UNROLL=launch.unroll,
        )


def _launch(
    kernel: Any, programs: int, launch: Launch, *arguments: object, **constants: object
) -> None:
    if programs:  # an empty tensor
        # Fusing a multiplication and an addition would skip a rounding of the reference.
        kernel[programs,](
            *arguments, **constants, num_warps=launch.num_warps, enable_fp_fusion=False
        )


def _float32_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, whatever device the tensors are on."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _is_aligned(tensor: Tensor, size: int) -> bool:
    offset = int(tensor.storage_offset()) * tensor.element_size()
    return tensor.data_ptr() % size == 0 and offset % size == 0


def _words(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor as a flat tensor of integers; copied if it is not aligned for them."""
    if not _is_aligned(tensor, dtype.itemsize):
        tensor = tensor.clone()
    return tensor.view(-1).view(dtype)


@contextlib.contextmanager
def _as_words(out: Tensor) -> Iterator[Tensor]:
    """An output as flat int32 words; by way of a temporary if it is not aligned for them."""
    if _is_aligned(out, 4):
        yield out.view(-1).view(torch.int32)
    else:
        temporary = torch.empty_like(out)
        yield temporary.view(-1).view(torch.int32)
        out.copy_(temporary)
