"""The public quantize and dequantize functions: check, apply policies, call a backend."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from . import backends
from .backends import BackendName
from .errors import DtypeError, LayoutError, NonFiniteError, ShapeError, ZeroAmaxError
from .formats import as_bytes, e8m0_to_fp32
from .scales import BLOCK_SIZE, get_profile
from .tensors import FP8BlockTensor, GlobalScale, MXFP4Tensor, NVFP4Tensor, global_scale_value

NonFinitePolicy = Literal["error", "saturate"]
ZeroAmaxPolicy = Literal["error", "one"]
MXScaleMode = Literal["floor", "ceil", "rceil", "even"]

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
    zero_amax: an x without a usable amax (all zero, or so small that the global scale
        underflows) raises ZeroAmaxError, or gets a global scale of one.
    nonfinite: NaN and Inf raise NonFiniteError, or ("saturate") are left out of every
        amax; Inf then becomes +-6 in its block and NaN becomes 0.
    pad: append zeros to a K that is no multiple of 16 (otherwise ShapeError); the result
        records the logical K.
    out: preallocated ``(weight uint8 [..., K/2], weight_scale float8_e4m3fn [..., K/16])``.
    backend: "native" (CPU), "triton" (CUDA), "reference"; None takes the fastest.
    """
    rules = get_profile(profile)
    x, logical_k = _blocked_input(x, BLOCK_SIZE, pad)
    kernels = backends.select("quantize_nvfp4", x.device, backend, profile=profile)
    rows = x.view(-1, x.shape[-1])
    amax, num_nonfinite = kernels.amax(rows)
    _check_finite(num_nonfinite, x, nonfinite)
    if weight_scale_2 is None:
        weight_scale_2 = rules.global_scale(torch.tensor(amax, dtype=x.dtype))
    value, divides = global_scale_value(weight_scale_2)
    typed = rules.typed_scale(torch.tensor(value))
    if divides != (not isinstance(typed, Tensor)):
        raise DtypeError(
            f"profile {profile!r} works with a {type(typed).__name__}, weight_scale_2 is a "
            f"{type(weight_scale_2).__name__}; convert it with Divisor.from_multiplier or "
            "Divisor.to_multiplier"
        )
    if not 0.0 < value < float("inf"):
        if zero_amax == "error":
            raise ZeroAmaxError(
                f"amax {amax:g} gives the global scale {value:g}, expected a positive finite "
                "number; skip this tensor, or pass zero_amax='one' to store it with scale one"
            )
        value = 1.0
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
        weight.view(rows.shape[0], -1),
        as_bytes(scale).view(rows.shape[0], -1),
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
    value, divides = global_scale_value(weight_scale_2)
    kernels = backends.select("dequantize_nvfp4", weight.device, backend)
    out = _float_output(out, (*weight.shape[:-1], k), dtype, weight, scale)
    rows = (-1, weight.shape[-1])
    kernels.dequantize_nvfp4(
        weight.view(rows),
        scale.view(-1, scale.shape[-1]),
        value,
        divides,
        out.view(-1, k),
    )
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
    x, _ = _blocked_input(x, MX_BLOCK_SIZE, pad=False)
    kernels = backends.select("quantize_mxfp4", x.device, backend)
    rows = x.view(-1, x.shape[-1])
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
        weight.view(rows.shape[0], -1),
        as_bytes(scale).view(rows.shape[0], -1),
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
    kernels = backends.select("dequantize_mxfp4", weight.device, backend)
    out = _float_output(out, (*weight.shape[:-1], k), dtype, weight, scale)
    kernels.dequantize_mxfp4(
        weight.view(-1, weight.shape[-1]), scale.view(-1, scale.shape[-1]), out.view(-1, k)
    )
    return out


def quantize_fp8_block(
    x: Tensor,
    *,
    block: tuple[int, int] = (128, 128),
    scale_fmt: Literal["fp32", "ue8m0"] = "fp32",
    nonfinite: NonFinitePolicy = "error",
    out: tuple[Tensor, Tensor] | None = None,
    backend: BackendName | None = None,
) -> FP8BlockTensor:
    """Quantize a matrix to E4M3 with one scale per block.

    x: bfloat16, float16 or float32 ``[N, K]``; edge blocks may be ragged.
    scale_fmt: "fp32" stores amax / 448; "ue8m0" the smallest power of two >= amax / 448, as
        float8_e8m0fnu. A block of zeros has scale one.
    nonfinite, out, backend: as in quantize_nvfp4.
    """
    _check_block(block)
    x, _ = _blocked_input(x, 1, pad=False)
    if x.ndim != 2:
        raise ShapeError(f"x has shape {tuple(x.shape)}, expected a matrix [N, K]")
    if scale_fmt not in ("fp32", "ue8m0"):
        raise DtypeError(f"scale_fmt is {scale_fmt!r}, expected 'fp32' or 'ue8m0'")
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
    if weight.dtype != torch.float8_e4m3fn:
        raise DtypeError(f"weight is {weight.dtype}, expected torch.float8_e4m3fn")
    if weight.ndim != 2:
        raise ShapeError(f"weight has shape {tuple(weight.shape)}, expected a matrix [N, K]")
    weight = weight.contiguous()
    if weight_scale.dtype == torch.float8_e8m0fnu:
        scale = e8m0_to_fp32(weight_scale)
    elif weight_scale.dtype == torch.float32:
        scale = weight_scale.contiguous()
    else:
        raise DtypeError(
            f"weight_scale is {weight_scale.dtype}, expected torch.float32 or "
            "torch.float8_e8m0fnu (view raw E8M0 bytes as float8_e8m0fnu)"
        )
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


def _blocked_input(x: Tensor, block_size: int, pad: bool) -> tuple[Tensor, int | None]:
    """Check dtype and K; return x contiguous (padded if asked) and the logical K if padded."""
    if not isinstance(x, Tensor) or x.dtype not in _FLOATS:
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise DtypeError(
            f"x is {found}, expected bfloat16, float16 or float32"
            " (dequantize a packed or FP8 tensor first)"
        )
    if x.ndim == 0:
        raise ShapeError("x is a scalar, expected at least one dimension")
    ragged = x.shape[-1] % block_size
    if not ragged:
        return x.contiguous(), None
    if not pad:
        raise ShapeError(
            f"x has shape {tuple(x.shape)}: its last dimension is no multiple of "
            f"{block_size}; pass pad=True, or quantize along another dimension"
        )
    return torch.nn.functional.pad(x, (0, block_size - ragged)), x.shape[-1]


def _check_finite(num_nonfinite: int, x: Tensor, policy: NonFinitePolicy) -> None:
    if policy not in ("error", "saturate"):
        raise DtypeError(f"nonfinite is {policy!r}, expected 'error' or 'saturate'")
    if num_nonfinite and policy == "error":
        raise NonFiniteError(
            f"x has {num_nonfinite} NaN or Inf of {x.numel()} values; repair the tensor, or "
            "pass nonfinite='saturate' (Inf becomes the block's largest value, NaN zero)"
        )


def _packed_weight(weight: Tensor) -> Tensor:
    if weight.dtype not in (torch.uint8, torch.int8) and "float4" not in str(weight.dtype):
        raise DtypeError(f"weight is {weight.dtype}, expected packed E2M1 as uint8 or int8")
    if weight.ndim == 0:
        raise ShapeError("weight is a scalar, expected packed E2M1 [..., K/2]")
    return as_bytes(weight.contiguous())


def _linear_scale(
    scale: Tensor, dtypes: tuple[torch.dtype, ...], expected: tuple[int, ...], ragged: int
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
    return as_bytes(scale.contiguous())


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
        _check_output(f"out {spec[0]}", tensor, spec[1], spec[2], x.device)
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
    _check_output("out", out, shape, dtype, inputs[0].device)
    _refuse_overlap("out", out, *inputs)
    return out


def _check_output(
    name: str, out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if out.dtype != dtype:
        raise DtypeError(f"{name} is {out.dtype}, expected {dtype}")
    if tuple(out.shape) != shape:
        raise ShapeError(f"{name} has shape {tuple(out.shape)}, expected {shape}")
    if not out.is_contiguous():
        raise ShapeError(f"{name} is not contiguous (strides {out.stride()}); pass a dense one")
    if out.device != device:
        raise ShapeError(f"{name} is on {out.device}, the input on {device}")


def _refuse_overlap(name: str, out: Tensor, *others: Tensor) -> None:
    """An output sharing memory with an input would be read after it was written."""
    start, end = out.data_ptr(), out.data_ptr() + out.nbytes
    for other in others:
        if start < other.data_ptr() + other.nbytes and other.data_ptr() < end:
            raise ShapeError(f"{name} overlaps an input or another output in memory; copy one")
