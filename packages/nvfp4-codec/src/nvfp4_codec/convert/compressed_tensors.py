"""The boundary to compressed-tensors, which stores the reciprocal of weight_scale_2.

A checkpoint of that library has ``weight_packed``, ``weight_scale`` and
``weight_global_scale``; decoding divides by the last. Only this file knows these names.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import CodecError, DtypeError, ScaleError, ShapeError
from ..scales import BLOCK_SIZE
from ..tensors import Divisor, NVFP4Tensor, dtype_of
from .inputs import nvfp4_bytes, nvfp4_tensor


def divisor_to_multiplier(weight_global_scale: Tensor) -> Tensor:
    """weight_scale_2 (float32 ``[]``) of a compressed-tensors weight_global_scale.

    The reciprocal rounded to float32. Raises ScaleError if either is not a positive,
    finite, normal number; DtypeError or ShapeError if it is no float32 of one element.
    """
    return _checked_reciprocal(Divisor(weight_global_scale).to_multiplier(), weight_global_scale)


def multiplier_to_divisor(weight_scale_2: Tensor) -> Divisor:
    """The compressed-tensors weight_global_scale of a weight_scale_2; errors as its inverse."""
    divisor = Divisor.from_multiplier(weight_scale_2)
    _checked_reciprocal(divisor.value, weight_scale_2)
    return divisor


def from_compressed_tensors(tensors: Mapping[str, Tensor], prefix: str = "") -> NVFP4Tensor:
    """Read one linear layer's tensors under compressed-tensors' names.

    weight_packed: uint8 ``[..., N, K/2]``; weight_scale: float8_e4m3fn ``[..., N, K/16]``;
    weight_global_scale: float32 of one element. It stays a Divisor: dividing by it and
    multiplying by its rounded reciprocal can differ in the last bit.
    Raises CodecError if a name is missing, DtypeError or ShapeError for other contents,
    ScaleError as divisor_to_multiplier does.
    """
    if not isinstance(tensors, Mapping):
        raise DtypeError(
            f"tensors is a {type(tensors).__name__}, expected a mapping of names to tensors"
        )
    names = [f"{prefix}{name}" for name in ("weight_packed", "weight_scale", "weight_global_scale")]
    missing = [name for name in names if name not in tensors]
    if missing:
        raise CodecError(f"missing {', '.join(missing)}; found {', '.join(sorted(tensors))}")
    weight, weight_scale, global_scale = (tensors[name] for name in names)
    for name, tensor, dtype in (
        (names[0], weight, torch.uint8),
        (names[1], weight_scale, torch.float8_e4m3fn),
    ):
        if dtype_of(tensor) != dtype:
            raise DtypeError(f"{name} is {dtype_of(tensor)}, expected {dtype}")
    if weight.ndim == 0 or 2 * weight.shape[-1] % BLOCK_SIZE:
        raise ShapeError(
            f"{names[0]} has shape {tuple(weight.shape)}, expected [..., K/2] with K a multiple "
            f"of {BLOCK_SIZE}"
        )
    expected = (*weight.shape[:-1], 2 * weight.shape[-1] // BLOCK_SIZE)
    if tuple(weight_scale.shape) != expected:
        raise ShapeError(
            f"{names[1]} has shape {tuple(weight_scale.shape)}, expected {expected} for "
            f"{names[0]} of shape {tuple(weight.shape)}"
        )
    divisor_to_multiplier(global_scale)  # for its checks
    return NVFP4Tensor(weight, weight_scale, Divisor(global_scale.reshape(())))


def to_compressed_tensors(tensor: NVFP4Tensor, prefix: str = "") -> dict[str, Tensor]:
    """One linear layer's tensors under compressed-tensors' names (weight_global_scale ``[1]``).

    Raises DtypeError, ShapeError or LayoutError (a SwizzledScale) if tensor is no NVFP4Tensor
    of linear scales, ScaleError as multiplier_to_divisor does.
    """
    nvfp4_bytes(nvfp4_tensor(tensor, "tensor").weight, tensor.weight_scale)  # for its checks
    scale = tensor.weight_scale_2
    divisor = scale if isinstance(scale, Divisor) else multiplier_to_divisor(scale)
    return {
        f"{prefix}weight_packed": tensor.weight,
        f"{prefix}weight_scale": tensor.weight_scale,
        f"{prefix}weight_global_scale": divisor.value.reshape(1),
    }


def _checked_reciprocal(result: Tensor, source: Tensor) -> Tensor:
    tiny = torch.finfo(torch.float32).tiny
    for value in (float(source), float(result)):
        if not tiny <= value < float("inf"):
            raise ScaleError(
                f"global scale {float(source)!r} has the reciprocal {float(result)!r}, expected "
                "two positive normal float32 numbers; the tensor was all zero or not calibrated"
            )
    return result
