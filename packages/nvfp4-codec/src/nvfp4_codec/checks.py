"""Argument checks that all public operations share.

Each refuses what an operation cannot take, with the value found, the value expected and the
remedy, and returns the tensor in the form that backends take.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from .errors import CodecError, DtypeError, LayoutError, NonFiniteError, ShapeError
from .formats import as_bytes
from .tensors import dtype_of

NonFinitePolicy = Literal["error", "saturate"]

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def dense(name: str, x: Tensor) -> Tensor:
    """A contiguous tensor of real memory, without autograd and lazy negation."""
    if x.layout != torch.strided or x.is_meta or x.is_nested:
        kind = "a meta tensor" if x.is_meta else f"nested or of layout {x.layout}"
        raise DtypeError(f"{name} is {kind}, expected a dense tensor in memory")
    return x.detach().resolve_neg().contiguous()


def blocked_input(x: Tensor, block_size: int, pad: bool | None = None) -> tuple[Tensor, int | None]:
    """Check dtype and K; return x contiguous (padded if asked) and the logical K if padded."""
    if dtype_of(x) not in FLOATS:
        raise DtypeError(
            f"x is {dtype_of(x)}, expected bfloat16, float16 or float32"
            " (dequantize a packed or FP8 tensor first)"
        )
    if x.ndim == 0:
        raise ShapeError("x is a scalar, expected at least one dimension")
    ragged = x.shape[-1] % block_size
    if not ragged:
        return dense("x", x), None
    if not pad:
        raise ShapeError(
            f"x has shape {tuple(x.shape)}: its last dimension is no multiple of {block_size}; "
            + ("pad it with zeros" if pad is None else "pass pad=True")
            + ", or quantize along another dimension"
        )
    return torch.nn.functional.pad(dense("x", x), (0, block_size - ragged)), x.shape[-1]


def check_choice(name: str, value: str, choices: object) -> None:
    if value not in get_args(choices):
        raise CodecError(f"{name} is {value!r}, expected one of: {', '.join(get_args(choices))}")


def check_finite(num_nonfinite: int, x: Tensor, policy: NonFinitePolicy) -> None:
    check_choice("nonfinite", policy, NonFinitePolicy)
    if num_nonfinite and policy == "error":
        raise NonFiniteError(
            f"x has {num_nonfinite} NaN or Inf of {x.numel()} values; repair the tensor, or "
            "pass nonfinite='saturate' (Inf becomes the block's largest value, NaN zero)"
        )


def packed_weight(weight: Tensor) -> Tensor:
    dtype = dtype_of(weight)
    if dtype not in (torch.uint8, torch.int8) and "float4" not in str(dtype):
        raise DtypeError(f"weight is {dtype}, expected packed E2M1 as uint8 or int8")
    if weight.ndim == 0:
        raise ShapeError("weight is a scalar, expected packed E2M1 [..., K/2]")
    return as_bytes(dense("weight", weight))


def linear_scale(
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
    return as_bytes(dense("weight_scale", scale))


def check_device(name: str, tensor: Tensor, reference: Tensor) -> None:
    if tensor.device != reference.device:
        raise ShapeError(
            f"{name} is on {tensor.device}, expected {reference.device}; move one of them"
        )


def as_rows(x: Tensor) -> Tensor:
    """View ``[..., K]`` as a matrix ``[rows, K]`` (K may be 0)."""
    return x.view(math.prod(x.shape[:-1]), x.shape[-1])


def check_block(block: tuple[int, int]) -> None:
    whole = isinstance(block, tuple | list) and all(type(size) is int for size in block)
    if not whole or len(block) != 2 or min(block) < 1:
        raise ShapeError(f"block is {block!r}, expected two positive integers")


def fit_block(block: tuple[int, int], shape: torch.Size) -> tuple[int, int]:
    """The block cut to about the matrix, so that no backend allocates or loops far beyond it.

    Cut to powers of two: Triton compiles a kernel for each block size it meets.
    """
    rows, columns = (1 << max(size - 1, 0).bit_length() for size in shape)
    return min(block[0], rows), min(block[1], columns)


def num_blocks(shape: torch.Size, block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


_Spec = tuple[str, tuple[int, ...], torch.dtype]


def outputs(
    out: tuple[Tensor, Tensor] | None, first: _Spec, second: _Spec, x: Tensor
) -> tuple[Tensor, Tensor]:
    specs = (first, second)
    if out is None:
        made = [torch.empty(shape, dtype=dtype, device=x.device) for _, shape, dtype in specs]
        return made[0], made[1]
    _check_pair(out, f"({first[0]}, {second[0]})")
    for tensor, spec in zip(out, specs, strict=True):
        check_output(f"out {spec[0]}", tensor, spec[1], spec[2], x)
    refuse_overlap({"out weight": out[0], "out weight_scale": out[1]}, {"the input": x})
    return out


def _check_pair(out: object, expected: str) -> None:
    found = type(out).__name__
    if isinstance(out, tuple | list):
        if len(out) == 2:
            return
        found += f" of {len(out)}"
    raise ShapeError(f"out is a {found}, expected {expected}")


def float_output(
    out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, *inputs: Tensor
) -> Tensor:
    if dtype not in FLOATS:
        raise DtypeError(f"dtype is {dtype}, expected bfloat16, float16 or float32")
    if out is None:
        return torch.empty(shape, dtype=dtype, device=inputs[0].device)
    check_output("out", out, shape, dtype, inputs[0])
    refuse_overlap({"out": out}, dict(zip(("weight", "weight_scale"), inputs, strict=True)))
    return out


def check_output(
    name: str, out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, source: Tensor
) -> None:
    if dtype_of(out) != dtype:
        raise DtypeError(f"{name} is {dtype_of(out)}, expected {dtype}")
    if tuple(out.shape) != shape:
        raise ShapeError(f"{name} has shape {tuple(out.shape)}, expected {shape}")
    if out.requires_grad or out.is_neg():
        raise DtypeError(f"{name} requires grad or is lazily negated; pass a plain buffer")
    if not out.is_contiguous():
        raise ShapeError(f"{name} is not contiguous (strides {out.stride()}); pass a dense one")
    check_device(name, out, source)


def refuse_overlap(outputs: dict[str, Tensor], inputs: dict[str, Tensor]) -> None:
    """Chunks are written in any order, so an output must share no byte with another tensor."""
    spans = [(name, t.data_ptr(), t.data_ptr() + t.nbytes) for name, t in outputs.items()]
    others = spans + [(name, t.data_ptr(), t.data_ptr() + t.nbytes) for name, t in inputs.items()]
    for i, (name, start, end) in enumerate(spans):
        for other, other_start, other_end in others[i + 1 :]:
            if start < other_end and other_start < end:
                raise ShapeError(f"{name} overlaps {other} in memory; pass memory of its own")
