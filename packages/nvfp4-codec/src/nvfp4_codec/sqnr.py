"""Signal-to-quantization-noise ratio, summed in float64 over slices of bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_SLICE = 1 << 22


def sqnr_db(reference: Tensor, values: Tensor) -> float:
    """10 log10(signal / noise) of two tensors, over their finite values.

    inf if equal; -inf if the shapes differ, if NaN or Inf are at other places, if no value is
    finite (nothing was compared), or if only the noise is not zero.
    """
    if reference.shape != values.shape:
        return -math.inf
    flat_a, flat_b = reference.reshape(-1), values.reshape(-1)
    starts = range(0, flat_a.numel(), _SLICE)
    return sqnr_of_pieces((flat_a[i : i + _SLICE], flat_b[i : i + _SLICE]) for i in starts)


def sqnr_of_pieces(pieces: Iterable[tuple[Tensor, Tensor]]) -> float:
    """``sqnr_db`` of a tensor that comes in (reference, values) pieces of bounded size."""
    signal = noise = 0.0
    compared = False
    for reference, values in pieces:
        a, b = reference.double(), values.double()
        finite = a.isfinite()
        if not torch.equal(finite, b.isfinite()):
            return -math.inf
        compared = compared or bool(finite.any())
        a = torch.where(finite, a, 0.0)
        signal += float(a.square().sum())
        noise += float(torch.where(finite, b, 0.0).sub_(a).square_().sum())
    if not compared:
        return -math.inf
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
