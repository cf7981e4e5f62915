"""The public quantize and dequantize functions: check, apply policies, call a backend."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from . import backends
from .backends import BackendName
from .errors import (
    CodecError,
    DtypeError,
    LayoutError,
    NonFiniteError,
    ScaleError,
    ShapeError,
    ZeroAmaxError,
)
from .formats import E4M3_MAX, as_bytes, e8m0_to_fp32
from .scales import BLOCK_SIZE, MXScaleMode, Profile, get_profile
from .tensors import (
    Divisor,
    FP8BlockTensor,
    GlobalScale,
    MXFP4Tensor,
    NVFP4Tensor,
    dtype_of,
    global_scale_value,
)

NonFinitePolicy = Literal["error", "saturate"]
ZeroAmaxPolicy = Literal["error", "one"]
ScaleFormat = Literal["fp32", "ue8m0"]

MX_BLOCK_SIZE = 32
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


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
    _check_choice("zero_amax", zero_amax, ZeroAmaxPolicy)
    x, logical_k = _blocked_input(x, BLOCK_SIZE, pad)
    kernels = backends.select("quantize_nvfp4", x.device, backend, profile=profile)
    rows = _rows(x)
    amax, num_nonfinite = kernels.amax(rows)
    _check_finite(num_nonfinite, x, nonfinite)
    if weight_scale_2 is None:
        typed_amax = torch.tensor(amax, dtype=x.dtype)
        value, _ = global_scale_value(rules.global_scale(typed_amax))
        if amax == 0.0 or not 0.0 < value < float("inf"):
            if zero_amax == "error":
                raise ZeroAmaxError(
                    f"x has the amax {amax:g}, too small for a global scale; skip this "
                    "tensor, or pass zero_amax='one' to store it with scale one"
                )
            value = 1.0
        else:
            rules = rules.for_amax(typed_amax)
    else:
        value = _given_scale(weight_scale_2, rules)
    weight, scale = _outputs(
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
        _rows(weight),
        _rows(as_bytes(scale)),
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

    weight: uint8 ``[..., K/2]``, low nibble first. weight_scale: float8_e4m3fn
    ``[..., K/16]``, linear (a swizzled one is refused). weight_scale_2: float32 tensor of
    one element, or a Divisor. dtype: bfloat16, float16 or float32. Code 8 gives -0.0; a
    NaN scale byte gives NaN. Returns ``[..., K]`` (``out`` if given).
    """
    weight = _packed_weight(weight)
    k = 2 * weight.shape[-1]
    scale = _linear_scale(
        weight_scale, (torch.float8_e4m3fn,), (*weight.shape[:-1], k // BLOCK_SIZE), k % BLOCK_SIZE
    )
    _check_device("weight_scale", scale, weight)
    value, divides = global_scale_value(weight_scale_2)
    kernels = backends.select("dequantize_nvfp4", weight.device, backend)
    out = _float_output(out, (*weight.shape[:-1], k), dtype, weight, scale)
    kernels.dequantize_nvfp4(_rows(weight), _rows(scale), value, divides, _rows(out))
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
    _check_choice("scale_mode", scale_mode, MXScaleMode)
    x, _ = _blocked_input(x, MX_BLOCK_SIZE, pad=False)
    kernels = backends.select("quantize_mxfp4", x.device, backend)
    rows = _rows(x)
    _, num_nonfinite = kernels.amax(rows)
    _check_finite(num_nonfinite, x, nonfinite)
    weight, scale = _outputs(
        out,
        ("weight", (*x.shape[:-1], x.shape[-1] // 2), torch.uint8),
        ("weight_scale", (*x.shape[:-1], x.shape[-1] // MX_BLOCK_SIZE), torch.float8_e8m0fnu),
        x,
    )
    kernels.quantize_mxfp4(
        rows,
        scale_mode,
        num_nonfinite > 0,
        _rows(weight),
        _rows(as_bytes(scale)),
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
    weight = _packed_weight(weight)
    k = 2 * weight.shape[-1]
    scale = _linear_scale(
        weight_scale,
        (torch.float8_e8m0fnu, torch.uint8),
        (*weight.shape[:-1], k // MX_BLOCK_SIZE),
        k % MX_BLOCK_SIZE,
    )
    _check_device("weight_scale", scale, weight)
    kernels = backends.select("dequantize_mxfp4", weight.device, backend)
    out = _float_output(out, (*weight.shape[:-1], k), dtype, weight, scale)
    kernels.dequantize_mxfp4(_rows(weight), _rows(scale), _rows(out))
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
    _check_block(block)
    _check_choice("scale_fmt", scale_fmt, ScaleFormat)
    x, _ = _blocked_input(x, 1, pad=False)
    if x.ndim != 2:
        raise ShapeError(f"x has shape {tuple(x.shape)}, expected a matrix [N, K]")
    kernels = backends.select("quantize_fp8_block", x.device, backend)
    _, num_nonfinite = kernels.amax(x)
    _check_finite(num_nonfinite, x, nonfinite)
    scale_dtype = torch.float32 if scale_fmt == "fp32" else torch.float8_e8m0fnu
    weight, scale = _outputs(
        out,
        ("weight", tuple(x.shape), torch.float8_e4m3fn),
        ("weight_scale", _num_blocks(x.shape, block), scale_dtype),
        x,
    )
    raw = scale if scale_fmt == "fp32" else as_bytes(scale)
    kernels.quantize_fp8_block(
        x, block, scale_fmt == "ue8m0", num_nonfinite > 0, as_bytes(weight), raw
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
    _check_block(block)
    if dtype_of(weight) != torch.float8_e4m3fn:
        raise DtypeError(f"weight is {dtype_of(weight)}, expected torch.float8_e4m3fn")
    if weight.ndim != 2:
        raise ShapeError(f"weight has shape {tuple(weight.shape)}, expected a matrix [N, K]")
    weight = weight.detach().contiguous()
    if dtype_of(weight_scale) not in (torch.float8_e8m0fnu, torch.float32):
        raise DtypeError(
            f"weight_scale is {dtype_of(weight_scale)}, expected torch.float32 or "
            "torch.float8_e8m0fnu (view raw E8M0 bytes as float8_e8m0fnu)"
        )
    _check_device("weight_scale", weight_scale, weight)
    scale = weight_scale.detach().contiguous()
    if scale.dtype == torch.float8_e8m0fnu:
        scale = e8m0_to_fp32(scale)
    expected = _num_blocks(weight.shape, block)
    if tuple(scale.shape) != expected:
        raise ShapeError(
            f"weight_scale has shape {tuple(scale.shape)}, expected {expected} for weight "
            f"{tuple(weight.shape)} in blocks of {block}"
        )
    kernels = backends.select("dequantize_fp8_block", weight.device, backend)
    out = _float_output(out, tuple(weight.shape), dtype, weight, weight_scale)
    kernels.dequantize_fp8_block(as_bytes(weight), scale, block, out)
    return out


def _given_scale(weight_scale_2: GlobalScale, rules: Profile) -> float:
    """The value of a caller's global scale, after checking its direction and its range."""
    value, divides = global_scale_value(weight_scale_2)
    expected = rules.typed_scale(torch.ones(()))
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


def _blocked_input(x: Tensor, block_size: int, pad: bool) -> tuple[Tensor, int | None]:
    """Check dtype and K; return x contiguous (padded if asked) and the logical K if padded."""
    if dtype_of(x) not in _FLOATS:
        raise DtypeError(
            f"x is {dtype_of(x)}, expected bfloat16, float16 or float32"
            " (dequantize a packed or FP8 tensor first)"
        )
    if x.ndim == 0:
        raise ShapeError("x is a scalar, expected at least one dimension")
    ragged = x.shape[-1] % block_size
    if not ragged:
        return x.detach().contiguous(), None
    if not pad:
        raise ShapeError(
            f"x has shape {tuple(x.shape)}: its last dimension is no multiple of "
            f"{block_size}; pass pad=True, or quantize along another dimension"
        )
    return torch.nn.functional.pad(x.detach(), (0, block_size - ragged)), x.shape[-1]


def _check_choice(name: str, value: str, choices: object) -> None:
    if value not in get_args(choices):
        raise CodecError(f"{name} is {value!r}, expected one of: {', '.join(get_args(choices))}")


def _check_finite(num_nonfinite: int, x: Tensor, policy: NonFinitePolicy) -> None:
    _check_choice("nonfinite", policy, NonFinitePolicy)
    if num_nonfinite and policy == "error":
        raise NonFiniteError(
            f"x has {num_nonfinite} NaN or Inf of {x.numel()} values; repair the tensor, or "
            "pass nonfinite='saturate' (Inf becomes the block's largest value, NaN zero)"
        )


def _packed_weight(weight: Tensor) -> Tensor:
    dtype = dtype_of(weight)
    if dtype not in (torch.uint8, torch.int8) and "float4" not in str(dtype):
        raise DtypeError(f"weight is {dtype}, expected packed E2M1 as uint8 or int8")
    if weight.ndim == 0:
        raise ShapeError("weight is a scalar, expected packed E2M1 [..., K/2]")
    return as_bytes(weight.detach().contiguous())


def _linear_scale(
    scale: object, dtypes: tuple[torch.dtype, ...], expected: tuple[int, ...], ragged: int
) -> Tensor:
    """Check a linear block-scale tensor; return its bytes, contiguous."""
    if not isinstance(scale, Tensor):
        raise LayoutError(
            f"weight_scale is a {type(scale).__name__}, expected a linear scale tensor; "
            "unswizzle it first (unswizzle_blockscale)"
        )
    if scale.dtype not in dtypes:
        names = " or ".join(str(dtype) for dtype in dtypes)
        raise DtypeError(
            f"weight_scale is {scale.dtype}, expected {names}; E4M3 (NVFP4, 16 values) and "
            "E8M0 (MXFP4, 32 values) bytes are not interchangeable"
        )
    if ragged or tuple(scale.shape) != expected:
        raise ShapeError(
            f"weight_scale has shape {tuple(scale.shape)}, expected {expected}"
            + (" (K is no multiple of the block)" if ragged else "")
            + "; a 1-D or padded scale is swizzled: unswizzle it first"
        )
    return as_bytes(scale.detach().contiguous())


def _check_device(name: str, tensor: Tensor, reference: Tensor) -> None:
    if tensor.device != reference.device:
        raise ShapeError(
            f"{name} is on {tensor.device}, expected {reference.device}; move one of them"
        )


def _rows(x: Tensor) -> Tensor:
    """View ``[..., K]`` as a matrix ``[rows, K]`` (K may be 0)."""
    return x.view(math.prod(x.shape[:-1]), x.shape[-1])


def _check_block(block: tuple[int, int]) -> None:
    if len(block) != 2 or min(block) < 1:
        raise ShapeError(f"block is {block}, expected two positive integers")


def _num_blocks(shape: torch.Size, block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


_Spec = tuple[str, tuple[int, ...], torch.dtype]


def _outputs(
    out: tuple[Tensor, Tensor] | None, first: _Spec, second: _Spec, x: Tensor
) -> tuple[Tensor, Tensor]:
    specs = (first, second)
    if out is None:
        made = [torch.empty(shape, dtype=dtype, device=x.device) for _, shape, dtype in specs]
        return made[0], made[1]
    if len(out) != 2:
        raise ShapeError(f"out has {len(out)} tensors, expected ({first[0]}, {second[0]})")
    for tensor, spec in zip(out, specs, strict=True):
        _check_output(f"out {spec[0]}", tensor, spec[1], spec[2], x)
    _refuse_overlap("out weight", out[0], x, out[1])
    _refuse_overlap("out weight_scale", out[1], x)
    return out


def _float_output(
    out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, *inputs: Tensor
) -> Tensor:
    if dtype not in _FLOATS:
        raise DtypeError(f"dtype is {dtype}, expected bfloat16, float16 or float32")
    if out is None:
        return torch.empty(shape, dtype=dtype, device=inputs[0].device)
    _check_output("out", out, shape, dtype, inputs[0])
    _refuse_overlap("out", out, *inputs)
    return out


def _check_output(
    name: str, out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, source: Tensor
) -> None:
    if dtype_of(out) != dtype:
        raise DtypeError(f"{name} is {dtype_of(out)}, expected {dtype}")
    if tuple(out.shape) != shape:
        raise ShapeError(f"{name} has shape {tuple(out.shape)}, expected {shape}")
    if not out.is_contiguous():
        raise ShapeError(f"{name} is not contiguous (strides {out.stride()}); pass a dense one")
    _check_device(name, out, source)


def _refuse_overlap(name: str, out: Tensor, *others: Tensor) -> None:
    """An output sharing memory with an input would be read after it was written."""
    start, end = out.data_ptr(), out.data_ptr() + out.nbytes
    for other in others:
        if start < other.data_ptr() + other.nbytes and other.data_ptr() < end:
            raise ShapeError(f"{name} overlaps an input or another output in memory; copy one")
