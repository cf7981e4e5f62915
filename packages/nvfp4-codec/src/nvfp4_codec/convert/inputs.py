"""What every conversion checks about packed weights, their block scales and global scale."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from ..checks import linear_scale, packed_weight
from ..errors import DtypeError, NonFiniteError, ScaleError
from ..formats import E2M1, E4M3
from ..scales import BLOCK_SIZE, MX_BLOCK_SIZE
from ..tensors import GlobalScale, NVFP4Tensor, global_scale_value

E8M0_DTYPES = (torch.float8_e8m0fnu, torch.uint8)

# Above it the largest code at the largest block scale is no finite float32 any more.
_LARGEST_MULTIPLIER = Fraction(torch.finfo(torch.float32).max) / Fraction(
    E2M1.max_value * E4M3.max_value
)


def nvfp4_bytes(weight: Tensor, weight_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[..., K/2]`` and E4M3 bytes ``[..., K/16]``, contiguous and of matching shapes."""
    return _bytes(weight, weight_scale, (torch.float8_e4m3fn,), BLOCK_SIZE)


def mxfp4_bytes(weight: Tensor, weight_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[..., K/2]`` and E8M0 bytes ``[..., K/32]``, contiguous and of matching shapes."""
    return _bytes(weight, weight_scale, E8M0_DTYPES, MX_BLOCK_SIZE)


def nvfp4_tensor(value: object, name: str) -> NVFP4Tensor:
    """Refuse anything but an NVFP4Tensor: a tuple does not say what its parts are."""
    if not isinstance(value, NVFP4Tensor):
        raise DtypeError(
            f"{name} is a {type(value).__name__}, expected "
            "NVFP4Tensor(weight, weight_scale, weight_scale_2)"
        )
    return value


def exact_multiplier(scale: GlobalScale, name: str = "weight_scale_2") -> Fraction:
    """The number by which decoding multiplies, exact also for a Divisor.

    Raises ScaleError unless it is positive and small enough that every code at every block
    scale decodes to a finite float32.
    """
    value, divides = global_scale_value(scale, name)
    if 0 < value < float("inf"):
        multiplier = 1 / Fraction(value) if divides else Fraction(value)
        if multiplier <= _LARGEST_MULTIPLIER:
            return multiplier
    kind = "divisor" if divides else "multiplier"
    raise ScaleError(
        f"{name} is the {kind} {value!r}, expected a positive number that decodes to finite "
        f"values (a multiplier of at most {float(_LARGEST_MULTIPLIER):.4g}); the tensor was not "
        "calibrated, or the scale is in the wrong direction (Divisor)"
    )


def refuse_nan_scales(scale: Tensor, name: str = "weight_scale") -> None:
    """Refuse E4M3 bytes 0x7F and 0xFF."""
    num_nan = int(((scale & 0x7F) == 0x7F).sum())
    if num_nan:
        raise NonFiniteError(
            f"{name} has {num_nan} NaN bytes of {scale.numel()}, expected none; "
            "quantize this tensor again"
        )


def _bytes(
    weight: Tensor, weight_scale: Tensor, dtypes: tuple[torch.dtype, ...], block_size: int
) -> tuple[Tensor, Tensor]:
    codes = packed_weight(weight)
    k = 2 * codes.shape[-1]
    shape = (*codes.shape[:-1], k // block_size)
    return codes, linear_scale(weight_scale, dtypes, shape, k % block_size)
