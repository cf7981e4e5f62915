"""Two E2M1 codes per byte: the even element in the low nibble."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import CodecError, DtypeError, ShapeError
from .formats import as_bytes
from .tensors import dtype_of

_PACKED_DTYPES = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Pack E2M1 codes uint8 ``[..., K]`` (values 0..15) to bytes uint8 ``[..., K/2]``.

    Element 2j goes to the low nibble of byte j, element 2j+1 to the high nibble.
    Raises ShapeError if K is odd, DtypeError if codes are not uint8, CodecError for a code
    above 15 (such codes are usually packed bytes already).
    """
    if dtype_of(codes) != torch.uint8:
        raise DtypeError(f"codes are {dtype_of(codes)}, expected torch.uint8 with values 0..15")
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise ShapeError(f"codes have shape {tuple(codes.shape)}, expected an even last dimension")
    largest = int(codes.max()) if codes.numel() else 0
    if largest > 0xF:
        raise CodecError(
            f"the largest code is {largest}, expected values 0..15; bytes with two codes each "
            "are packed already (unpack_e2m1 takes them apart)"
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(weight: Tensor) -> Tensor:
    """Unpack bytes ``[..., K/2]`` (uint8, int8 or float4_e2m1fn_x2) to codes uint8 ``[..., K]``.

    Raises DtypeError for any other dtype (one-byte floats are scales or FP8 weights, not
    pairs of codes), ShapeError for a scalar.
    """
    if dtype_of(weight) not in _PACKED_DTYPES:
        raise DtypeError(
            f"packed weights are {dtype_of(weight)}, expected torch.uint8, torch.int8 or "
            "torch.float4_e2m1fn_x2 with two E2M1 codes per byte"
        )
    weight = as_bytes(weight)
    if weight.ndim == 0:
        raise ShapeError("packed weights need at least one dimension, found a scalar")
    return torch.stack((weight & 0xF, weight >> 4), dim=-1).flatten(-2)
