"""Two E2M1 codes per byte: the even element in the low nibble."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import DtypeError, ShapeError
from .formats import as_bytes


def pack_e2m1(codes: Tensor) -> Tensor:
    """Pack E2M1 codes uint8 ``[..., K]`` (values 0..15) to bytes uint8 ``[..., K/2]``.

    Element 2j goes to the low nibble of byte j, element 2j+1 to the high nibble.
    Raises ShapeError if K is odd, DtypeError if codes are not uint8.
    """
    if codes.dtype != torch.uint8:
        raise DtypeError(f"codes are {codes.dtype}, expected torch.uint8 with values 0..15")
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise ShapeError(f"codes have shape {tuple(codes.shape)}, expected an even last dimension")
    return (codes[..., 0::2] & 0xF) | (codes[..., 1::2] << 4)


def unpack_e2m1(weight: Tensor) -> Tensor:
    """Unpack bytes ``[..., K/2]`` (uint8, int8 or float4_e2m1fn_x2) to codes uint8 ``[..., K]``."""
    weight = as_bytes(weight)
    if weight.ndim == 0:
        raise ShapeError("packed weights need at least one dimension, found a scalar")
    return torch.stack((weight & 0xF, weight >> 4), dim=-1).flatten(-2)
