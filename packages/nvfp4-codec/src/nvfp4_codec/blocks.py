"""Matrices in rectangular blocks, whose edge blocks may be ragged."""

from __future__ import annotations

import torch
from torch import Tensor


def as_blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """View ``[N, K]``, padded with zeros, as ``[rows of blocks, block[0], columns, block[1]]``."""
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % block[1], 0, -rows % block[0]))
    return padded.view(-(-rows // block[0]), block[0], -(-columns // block[1]), block[1])


def expand_blocks(scale: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """One scale per element of a matrix of this shape."""
    full = scale.repeat_interleave(block[0], 0)[: shape[0]]
    return full.repeat_interleave(block[1], 1)[:, : shape[1]]
