"""Shared experts under tensor parallelism: their inner dimension, made a multiple of all ranks'.

vLLM builds the shared experts of a block-FP8 model with an inner dimension that gives every rank
the same number of whole 128-blocks, and pads the weights while it loads them. It does so for FP8
only: packed columns and scalar scales it gets wrong. So the padding happens here, in every
format, before a loader cuts the shards; a rank's share is then a multiple of 128, and of NVFP4's
16. Padded rows and columns are zero and add nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
_ONE_E8M0 = 127


def padded_inner(inner: int, tp_size: int) -> int:
    """The inner dimension that tp_size ranks can share in whole blocks."""
    step = BLOCK * tp_size
    return -(-inner // step) * step


def pad_shared(tensor: Tensor, part: str, leaf: str, inner: int, padded: int) -> Tensor:
    """A tensor of a shared expert with its inner dimension widened; scalars as they are.

    leaf: w1, w3 ([inner, hidden]) or w2 ([hidden, inner]). The dimension counts elements, pairs
    of them, or blocks of 16 or 128, and grows by the same factor whichever it is.
    """
    if tensor.ndim < 2 or inner == padded:
        return tensor
    dim = 1 if leaf == "w2" else 0
    old = tensor.shape[dim]
    shape = list(tensor.shape)
    shape[dim] = padded * old // inner - old
    if tensor.dtype.itemsize > 1:
        filling = tensor.new_full(shape, 1.0 if part == "scale" else 0.0)
        return torch.cat([tensor, filling], dim=dim)
    # One-byte floats have no fill; a byte of zero is zero in all of them but E8M0.
    value = _ONE_E8M0 if tensor.dtype == torch.float8_e8m0fnu else 0
    as_bytes = tensor.view(torch.uint8)
    filling = torch.full(shape, value, dtype=torch.uint8, device=tensor.device)
    return torch.cat([as_bytes, filling], dim=dim).view(tensor.dtype)
