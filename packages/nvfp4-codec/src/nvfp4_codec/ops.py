"""The public quantize and dequantize functions: check, apply policies, call a backend."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from . import backends
from .backends import BackendName, warn_once
from .checks import (
    NonFinitePolicy,
    as_rows,
    blocked_input,
    check_block,
    check_choice,
    check_device,
    check_finite,
    dense,
    fit_block,
    float_output,
    linear_scale,
    num_blocks,
    outputs,
    packed_weight,
)
from .errors import DtypeError, ScaleError, ShapeError, ZeroAmaxError
from .formats import E4M3_MAX, as_bytes, e8m0_to_fp32
from .scales import BLOCK_SIZE, MX_BLOCK_SIZE, MXScaleMode, Profile, get_profile
from .tensors import (
    Divisor,
    FP8BlockTensor,
    GlobalScale,
    MXFP4Tensor,
    NVFP4Tensor,
    dtype_of,
    global_scale_value,
)

ZeroAmaxPolicy = Literal["error", "one"]
ScaleFormat = Literal["fp32", "ue8m0"]


def quantize_nvfp4(
    x: Tensor,
    *,
    weight_scale_2: GlobalScale | None = None,
    profile: str = "modelopt",
    zero_amax: ZeroAmaxPolicy = "error",
    nonfinite: NonFinitePolicy = "error",
    pad: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
    backend: BackendName | None = None,
) -> NVFP4Tensor:
    """Quantize ``x`` to NVFP4.

    x: bfloat16, float16 or float32 ``[..., K]``; a non-contiguous x is copied first.
    weight_scale_2: the global scale to use (float32 tensor of one element, or a Divisor);
        None derives it from x's amax as the profile does.
    profile: whose arithmetic to follow byte for byte; see ``scales.PROFILES``.
    zero_amax: without a weight_scale_2, an x that is all zero, or so small that its global
        scale underflows, raises ZeroAmaxError, or gets a global scale of one. A block of
        zeros is always legal.
    nonfinite: NaN and Inf raise NonFiniteError, or ("saturate") are left out of every
        amax; Inf then becomes +-6 in its block and NaN becomes 0.
    pad: append zeros to a K that is no multiple of 16 (otherwise ShapeError); the result
        records the logical K.
    out: preallocated ``(weight uint8 [..., K/2], weight_scale float8_e4m3fn [..., K/16])``.
    backend: "native" (CPU), "triton" (CUDA), "reference"; None takes the fastest.
    """
    rules = get_profile(profile)
    check_choice("zero_amax", zero_amax, ZeroAmaxPolicy)
    x, logical_k = blocked_input(x, BLOCK_SIZE, pad)
    kernels = backends.select("quantize_nvfp4", x.device, backend, profile=profile)
    rows = as_rows(x)
    amax, num_nonfinite = kernels.amax(rows)
    check_finite(num_nonfinite, x, nonfinite)
    if weight_scale_2 is None:
        typed_amax = torch.tensor(amax, dtype=x.dtype, device="cpu")
        value, _ = global_scale_value(rules.global_scale(typed_amax))
        if amax == 0.0 or not 0.0 < value < float("inf"):
            if zero_amax == "error" and x.numel():
                raise ZeroAmaxError(
                    f"x has the amax {amax:g}, too small for a global scale; skip this "
                    "tensor, or pass zero_amax='one' to store it with scale one"
                )
            value = 1.0
        else:
            rules = rules.for_amax(typed_amax)
    else:
        value = _given_scale(weight_scale_2, rules)
    weight, scale = outputs(
        out,
        ("weight", (*x.shape[:-1], x.shape[-1] // 2), torch.uint8),
        ("weight_scale", (*x.shape[:-1], x.shape[-1] // BLOCK_SIZE), torch.float8_e4m3fn),
        x,
    )
    kernels.quantize_nvfp4(
        rows,
        value,
        rules,
        num_nonfinite > 0,
        as_rows(weight),
        as_rows(as_bytes(scale)),
    )
    value_tensor = torch.tensor(value, dtype=torch.float32, device=x.device)
    return NVFP4Tensor(weight, scale, rules.typed_scale(value_tensor), logical_k)


def dequantize_nvfp4(
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: GlobalScale,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: BackendName | None = None,
) -> Tensor:
    """Dequantize NVFP4: ``e2m1 * float32(weight_scale * weight_scale_2)``, rounded to dtype.

    weight: uint8 ``[..., K/2]``, low nibble first.
    weight_scale: float8_e4m3fn ``[..., K/16]``, linear. A SwizzledScale, a 1-D or a padded
        tensor is refused; a bare swizzled one of the same shape cannot be told apart here.
    weight_scale_2: float32 tensor of one element, or a Divisor; ScaleError unless positive
        and finite. A multiplier above 1 is logged once at WARNING: it is usually a divisor.
    dtype: bfloat16, float16 or float32.

    Code 8 gives -0.0; a NaN scale byte gives NaN. Returns ``[..., K]`` (``out`` if given).
    """
    weight = packed_weight(weight)
    k = 2 * weight.shape[-1]
    scale = linear_scale(
        weight_scale, (torch.float8_e4m3fn,), (*weight.shape[:-1], k // BLOCK_SIZE), k % BLOCK_SIZE
    )
    check_device("weight_scale", scale, weight)
    value, divides = global_scale_value(weight_scale_2)
    if not 0.0 < value < float("inf"):
        raise ScaleError(f"weight_scale_2 is {value:g}, expected a positive finite number")
    if value > 1.0 and not divides:
        warn_once(
            f"weight_scale_2 is {value:g}, far above any weight's multiplier; if this is "
            "compressed-tensors' weight_global_scale, wrap it in Divisor"
        )
    kernels = backends.select("dequantize_nvfp4", weight.device, backend)
    out = float_output(out, (*weight.shape[:-1], k), dtype, weight, scale)
    kernels.dequantize_nvfp4(as_rows(weight), as_rows(scale), value, divides, as_rows(out))
    return out


def quantize_mxfp4(
    x: Tensor,
    *,
    scale_mode: MXScaleMode = "floor",
    nonfinite: NonFinitePolicy = "error",
    out: tuple[Tensor, Tensor] | None = None,
    backend: BackendName | None = None,
) -> MXFP4Tensor:
    """Quantize ``x`` to MXFP4 (OCP MX v1.0: one E8M0 scale per 32 values).

    x: bfloat16, float16 or float32 ``[..., K]``, K a multiple of 32.
    scale_mode: the power of two from the block's amax. "floor": 2^(floor(log2 amax) - 2),
        the MX specification's (values up to 7.99 * scale saturate to 6); "ceil" rounds
        log2 up; "rceil": the smallest power of two >= amax / 6 (never saturates);
        "even": floor after rounding amax to E2M1's precision.
    nonfinite, out, backend: as in quantize_nvfp4.
    """
    check_choice("scale_mode", scale_mode, MXScaleMode)
    x, _ = blocked_input(x, MX_BLOCK_SIZE)
    kernels = backends.select("quantize_mxfp4", x.device, backend)
    rows = as_rows(x)
    _, num_nonfinite = kernels.amax(rows)
    check_finite(num_nonfinite, x, nonfinite)
    weight, scale = outputs(
        out,
        ("weight", (*x.shape[:-1], x.shape[-1] // 2), torch.uint8),
        ("weight_scale", (*x.shape[:-1], x.shape[-1] // MX_BLOCK_SIZE), torch.float8_e8m0fnu),
        x,
    )
    kernels.quantize_mxfp4(
        rows,
        scale_mode,
        num_nonfinite > 0,
        as_rows(weight),
        as_rows(as_bytes(scale)),
    )
    return MXFP4Tensor(weight, scale)


def dequantize_mxfp4(
    weight: Tensor,
    weight_scale: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: BackendName | None = None,
) -> Tensor:
    """Dequantize MXFP4: ``e2m1 * 2^(weight_scale - 127)``, rounded to dtype.

    weight: uint8 or int8 ``[..., K/2]``, low nibble first. weight_scale: float8_e8m0fnu or
    its bytes as uint8, ``[..., K/32]``. Byte 255 gives NaN. Returns ``[..., K]``.
    """
    weight = packed_weight(weight)
    k = 2 * weight.shape[-1]
    scale = linear_scale(
        weight_scale,
        (torch.float8_e8m0fnu, torch.uint8),
        (*weight.shape[:-1], k // MX_BLOCK_SIZE),
        k % MX_BLOCK_SIZE,
    )
    check_device("weight_scale", scale, weight)
    kernels = backends.select("dequantize_mxfp4", weight.device, backend)
    out = float_output(out, (*weight.shape[:-1], k), dtype, weight, scale)
    kernels.dequantize_mxfp4(as_rows(weight), as_rows(scale), as_rows(out))
    return out


def quantize_fp8_block(
    x: Tensor,
    *,
    block: tuple[int, int] = (128, 128),
    scale_fmt: ScaleFormat = "fp32",
    nonfinite: NonFinitePolicy = "error",
    out: tuple[Tensor, Tensor] | None = None,
    backend: BackendName | None = None,
) -> FP8BlockTensor:
    """Quantize a matrix to E4M3 with one scale per block.

    x: bfloat16, float16 or float32 ``[N, K]``; edge blocks may be ragged.
    scale_fmt: "fp32" stores float32(amax / 448); "ue8m0" the smallest power of two not below
        that, as float8_e8m0fnu. A block of zeros has scale one.
    nonfinite, out, backend: as in quantize_nvfp4.
    """
    check_block(block)
    check_choice("scale_fmt", scale_fmt, ScaleFormat)
    x, _ = blocked_input(x, 1)
    if x.ndim != 2:
        raise ShapeError(f"x has shape {tuple(x.shape)}, expected a matrix [N, K]")
    kernels = backends.select("quantize_fp8_block", x.device, backend)
    _, num_nonfinite = kernels.amax(x)
    check_finite(num_nonfinite, x, nonfinite)
    scale_dtype = torch.float32 if scale_fmt == "fp32" else torch.float8_e8m0fnu
    weight, scale = outputs(
        out,
        ("weight", tuple(x.shape), torch.float8_e4m3fn),
        ("weight_scale", num_blocks(x.shape, block), scale_dtype),
        x,
    )
    raw = scale if scale_fmt == "fp32" else as_bytes(scale)
    kernels.quantize_fp8_block(
        x, fit_block(block, x.shape), scale_fmt == "ue8m0", num_nonfinite > 0, as_bytes(weight), raw
    )
    return FP8BlockTensor(weight, scale, block)


def dequantize_fp8_block(
    weight: Tensor,
    weight_scale: Tensor,
    *,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: BackendName | None = None,
) -> Tensor:
    """Dequantize block-scaled E4M3: ``e4m3 * weight_scale``, rounded to dtype.

    weight: float8_e4m3fn ``[N, K]``. weight_scale: float32 or float8_e8m0fnu
    ``[ceil(N / block[0]), ceil(K / block[1])]`` (DeepSeek's ``weight_scale_inv`` and
    ``scale``: both multiply). Returns ``[N, K]``.
    """
    check_block(block)
    if dtype_of(weight) != torch.float8_e4m3fn:
        raise DtypeError(f"weight is {dtype_of(weight)}, expected torch.float8_e4m3fn")
    if weight.ndim != 2:
        raise ShapeError(f"weight has shape {tuple(weight.shape)}, expected a matrix [N, K]")
    weight = dense("weight", weight)
    if dtype_of(weight_scale) not in (torch.float8_e8m0fnu, torch.float32):
        raise DtypeError(
            f"weight_scale is {dtype_of(weight_scale)}, expected torch.float32 or "
            "torch.float8_e8m0fnu (view raw E8M0 bytes as float8_e8m0fnu)"
        )
    scale = dense("weight_scale", weight_scale)
    check_device("weight_scale", scale, weight)
    if scale.dtype == torch.float8_e8m0fnu:
        scale = e8m0_to_fp32(scale)
    expected = num_blocks(weight.shape, block)
    if tuple(scale.shape) != expected:
        raise ShapeError(
            f"weight_scale has shape {tuple(scale.shape)}, expected {expected} for weight "
            f"{tuple(weight.shape)} in blocks of {block}"
        )
    kernels = backends.select("dequantize_fp8_block", weight.device, backend)
    out = float_output(out, tuple(weight.shape), dtype, weight, weight_scale)
    kernels.dequantize_fp8_block(as_bytes(weight), scale, fit_block(block, weight.shape), out)
    return out


def _given_scale(weight_scale_2: GlobalScale, rules: Profile) -> float:
    """The value of a caller's global scale, after checking its direction and its range."""
    value, divides = global_scale_value(weight_scale_2)
    expected = rules.typed_scale(torch.ones((), dtype=torch.float32, device="cpu"))
    if divides != isinstance(expected, Divisor):
        raise DtypeError(
            f"profile {rules.name!r} works with a {type(expected).__name__}, weight_scale_2 is "
            f"a {type(weight_scale_2).__name__}; convert it with Divisor.from_multiplier or "
            "Divisor.to_multiplier"
        )
    largest = E4M3_MAX / value if divides and value else E4M3_MAX * value
    if not (0.0 < value < float("inf") and largest <= torch.finfo(torch.float32).max):
        raise ScaleError(
            f"weight_scale_2 is {value:g}, expected a positive finite number by which a block "
            "scale of 448 decodes to a finite one"
        )
    return value
