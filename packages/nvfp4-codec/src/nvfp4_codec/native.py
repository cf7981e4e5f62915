"""The C++ backend: checks what the kernels rely on, then hands over addresses.

Works without the extension too (a pure-Python install): then ``unavailable_reason`` says why
and every operation raises BackendError. Byte for byte the results are ``reference``'s, with
every instruction set and any number of threads. Outputs may lie at any address but must not
overlap an input; the one exception is ``mxfp4_to_nvfp4`` in place.

The instruction set is the fastest this machine has. ``isa=`` forces one, and so does the
environment variable NVFP4_CODEC_ISA, which is read once, on first use.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

from .checks import check_choice, refuse_overlap
from .errors import BackendError, DtypeError, ShapeError
from .scales import (
    BLOCK_SIZE,
    MX_BLOCK_SIZE,
    PARAMETRIC_PROFILES,
    MXScaleMode,
    Profile,
    require_parametric,
)

try:
    from . import _native
except ImportError as error:
    _import_error: str | None = str(error)
else:
    _import_error = None

IsaName = Literal["scalar", "avx2", "avx512"]

ISA_VARIABLE = "NVFP4_CODEC_ISA"
NVFP4_PROFILES = PARAMETRIC_PROFILES
"""Profiles that quantize_nvfp4 implements; ``backends`` sends the others to the reference."""

_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_MX_MODES = get_args(MXScaleMode)  # in the order of ScaleKind in kernels.h


def unavailable_reason() -> str | None:
    """Why this backend cannot be used here, or None if it can."""
    return _import_error and f"the compiled extension is missing: {_import_error}"


def available() -> bool:
    """Whether the compiled extension is there."""
    return _import_error is None


def isa_names() -> tuple[str, ...]:
    """Instruction sets this machine supports, fastest first; empty without the extension."""
    return tuple(_native.isa_names()) if available() else ()


def active_isa() -> str:
    """The instruction set used when none is named; BackendError if the variable's is absent."""
    _require_extension()
    return _default_isa()


@cache
def _default_isa() -> str:
    requested = os.environ.get(ISA_VARIABLE, "")
    return _supported_isa(requested, f"environment variable {ISA_VARIABLE}")


def _supported_isa(name: str, source: str) -> str:
    names = isa_names()
    if name and name not in names:
        raise BackendError(f"{source} is {name!r}, this machine supports: {', '.join(names)}")
    return name or names[0]


def _require_extension() -> None:
    reason = unavailable_reason()
    if reason:
        raise BackendError(f"{reason}; reinstall with a C++ compiler, or use backend='reference'")


def _runtime(isa: str | None, threads: int | None) -> tuple[str, int]:
    _require_extension()
    if threads is None:
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if threads < 1:
        raise BackendError(f"threads is {threads}, expected at least 1")
    return (_default_isa() if isa is None else _supported_isa(isa, "isa")), threads


def amax(x: Tensor, *, isa: str | None = None, threads: int | None = None) -> tuple[float, int]:
    """Largest finite magnitude in x (0.0 if there is none) and the count of non-finite values."""
    runtime = _runtime(isa, threads)
    return _native.amax(*runtime, *_pointer_and_dtype("x", x), x.numel())


def quantize_nvfp4(
    x: Tensor,
    global_scale: float,
    profile: Profile,
    saturate: bool,
    weight_out: Tensor,
    scale_out: Tensor,
    *,
    isa: str | None = None,
    threads: int | None = None,
) -> None:
    """As ``reference.quantize_nvfp4``, for the profiles in NVFP4_PROFILES."""
    runtime = _runtime(isa, threads)
    require_parametric(profile, "native")
    _check_encode(x, weight_out, scale_out, BLOCK_SIZE)
    _native.quantize_nvfp4(
        *runtime,
        *_pointer_and_dtype("x", x),
        x.numel(),
        global_scale,
        profile.zero_block_scale,
        profile.min_scale,
        profile.keep_negative_zero,
        saturate,
        weight_out.data_ptr(),
        scale_out.data_ptr(),
    )


def dequantize_nvfp4(
    weight: Tensor,
    weight_scale: Tensor,
    global_scale: float,
    divide: bool,
    out: Tensor,
    *,
    isa: str | None = None,
    threads: int | None = None,
) -> None:
    """As ``reference.dequantize_nvfp4``."""
    runtime = _runtime(isa, threads)
    _check_decode(weight, "weight_scale", weight_scale, out, BLOCK_SIZE)
    _native.dequantize_nvfp4(
        *runtime,
        weight.data_ptr(),
        weight_scale.data_ptr(),
        global_scale,
        divide,
        *_pointer_and_dtype("out", out),
        out.numel(),
    )


def quantize_mxfp4(
    x: Tensor,
    scale_mode: MXScaleMode,
    saturate: bool,
    weight_out: Tensor,
    scale_out: Tensor,
    *,
    isa: str | None = None,
    threads: int | None = None,
) -> None:
    """As ``reference.quantize_mxfp4``."""
    runtime = _runtime(isa, threads)
    check_choice("scale_mode", scale_mode, MXScaleMode)
    _check_encode(x, weight_out, scale_out, MX_BLOCK_SIZE)
    _native.quantize_mxfp4(
        *runtime,
        *_pointer_and_dtype("x", x),
        x.numel(),
        _MX_MODES.index(scale_mode),
        saturate,
        weight_out.data_ptr(),
        scale_out.data_ptr(),
    )


def dequantize_mxfp4(
    weight: Tensor,
    scale: Tensor,
    out: Tensor,
    *,
    isa: str | None = None,
    threads: int | None = None,
) -> None:
    """As ``reference.dequantize_mxfp4``."""
    runtime = _runtime(isa, threads)
    _check_decode(weight, "scale", scale, out, MX_BLOCK_SIZE)
    _native.dequantize_mxfp4(
        *runtime,
        weight.data_ptr(),
        scale.data_ptr(),
        *_pointer_and_dtype("out", out),
        out.numel(),
    )


def mxfp4_to_nvfp4(
    weight: Tensor,
    scale: Tensor,
    shift: int,
    weight_out: Tensor,
    scale_out: Tensor,
    lossless_out: Tensor,
    *,
    isa: str | None = None,
    threads: int | None = None,
) -> int:
    """Copy the codes and write two E4M3 scale bytes, ``2^(byte - shift)``, per E8M0 byte.

    weight: uint8 ``[R, K/2]``. scale: E8M0 bytes ``[R, K/32]``. weight_out: uint8
    ``[R, K/2]``; weight itself leaves the codes where they are. scale_out: uint8
    ``[R, K/16]``. lossless_out: bool ``[R, K/32]``. A power of two outside E4M3's 2^-9..2^8
    is clamped to it, and its block is lossy unless all its codes are zero; byte 255 stays
    NaN. Returns the number of lossy blocks.
    """
    runtime = _runtime(isa, threads)
    rows, half = _matrix("weight", weight, MX_BLOCK_SIZE // 2)
    num_blocks = half * 2 // MX_BLOCK_SIZE
    _check("weight", weight, (rows, half), torch.uint8)
    _check("scale", scale, (rows, num_blocks), one_byte=True)
    _check("weight_out", weight_out, (rows, half), torch.uint8)
    _check("scale_out", scale_out, (rows, 2 * num_blocks), torch.uint8)
    _check("lossless_out", lossless_out, (rows, num_blocks), torch.bool)
    outputs = {"scale_out": scale_out, "lossless_out": lossless_out}
    if weight_out.data_ptr() != weight.data_ptr():
        outputs["weight_out"] = weight_out
    refuse_overlap(outputs, {"weight": weight, "scale": scale})
    return _native.mxfp4_to_nvfp4(
        *runtime,
        weight.data_ptr(),
        scale.data_ptr(),
        shift,
        2 * weight.numel(),
        weight_out.data_ptr(),
        scale_out.data_ptr(),
        lossless_out.data_ptr(),
    )


def quantize_fp8_block(
    x: Tensor,
    block: tuple[int, int],
    ue8m0: bool,
    saturate: bool,
    weight_out: Tensor,
    scale_out: Tensor,
    *,
    isa: str | None = None,
    threads: int | None = None,
) -> None:
    """As ``reference.quantize_fp8_block``; non-finite input is handled with or without saturate."""
    runtime = _runtime(isa, threads)
    rows, columns = _matrix("x", x, 1)
    _check("weight_out", weight_out, (rows, columns), torch.uint8)
    grid = -(-rows // block[0]), -(-columns // block[1])
    _check("scale_out", scale_out, grid, torch.uint8 if ue8m0 else torch.float32)
    refuse_overlap({"weight_out": weight_out, "scale_out": scale_out}, {"x": x})
    _native.quantize_fp8_block(
        *runtime,
        *_pointer_and_dtype("x", x),
        rows,
        columns,
        *block,
        ue8m0,
        weight_out.data_ptr(),
        scale_out.data_ptr(),
    )


def dequantize_fp8_block(
    weight: Tensor,
    scale: Tensor,
    block: tuple[int, int],
    out: Tensor,
    *,
    isa: str | None = None,
    threads: int | None = None,
) -> None:
    """As ``reference.dequantize_fp8_block``."""
    runtime = _runtime(isa, threads)
    rows, columns = _matrix("out", out, 1)
    _check("weight", weight, (rows, columns), one_byte=True)
    _check("scale", scale, (-(-rows // block[0]), -(-columns // block[1])), torch.float32)
    refuse_overlap({"out": out}, {"weight": weight, "scale": scale})
    _native.dequantize_fp8_block(
        *runtime,
        weight.data_ptr(),
        scale.data_ptr(),
        *_pointer_and_dtype("out", out),
        rows,
        columns,
        *block,
    )


def _check_encode(x: Tensor, weight_out: Tensor, scale_out: Tensor, block_size: int) -> None:
    rows, columns = _matrix("x", x, block_size)
    _check("weight_out", weight_out, (rows, columns // 2), torch.uint8)
    _check("scale_out", scale_out, (rows, columns // block_size), torch.uint8)
    refuse_overlap({"weight_out": weight_out, "scale_out": scale_out}, {"x": x})


def _check_decode(
    weight: Tensor, scale_name: str, scale: Tensor, out: Tensor, block_size: int
) -> None:
    rows, columns = _matrix("out", out, block_size)
    _check("weight", weight, (rows, columns // 2), torch.uint8)
    _check(scale_name, scale, (rows, columns // block_size), one_byte=True)
    refuse_overlap({"out": out}, {"weight": weight, scale_name: scale})


def _pointer_and_dtype(name: str, tensor: Tensor) -> tuple[int, int]:
    if tensor.dtype not in _DTYPES:
        raise DtypeError(f"{name} is {tensor.dtype}, expected bfloat16, float16 or float32")
    _check(name, tensor, tuple(tensor.shape), tensor.dtype)
    return tensor.data_ptr(), _DTYPES[tensor.dtype]


def _matrix(name: str, tensor: Tensor, multiple: int) -> tuple[int, int]:
    """The shape of a matrix whose rows are a multiple of elements long."""
    if tensor.ndim != 2 or tensor.shape[1] % multiple:
        raise ShapeError(
            f"{name} has shape {tuple(tensor.shape)}, expected [rows, K] with K a multiple "
            f"of {multiple}"
        )
    return tensor.shape[0], tensor.shape[1]


def _check(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
    *,
    one_byte: bool = False,
) -> None:
    """A kernel reads and writes exactly these bytes; anything else would be out of bounds."""
    if tensor.device.type != "cpu":
        raise BackendError(f"{name} is on {tensor.device}, the native backend works on the CPU")
    if tensor.dtype != dtype and not (one_byte and tensor.element_size() == 1):
        raise DtypeError(f"{name} is {tensor.dtype}, expected {dtype or 'a one-byte dtype'}")
    if tuple(tensor.shape) != shape:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
    if not tensor.is_contiguous():
        raise ShapeError(
            f"{name} is not contiguous (strides {tensor.stride()}); pass a contiguous tensor"
        )
