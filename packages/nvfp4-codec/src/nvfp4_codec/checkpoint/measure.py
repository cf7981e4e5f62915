"""The largest magnitude of a tensor, found without a copy of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def amax(values: Tensor) -> float:
    """Largest magnitude without a copy of the tensor; nan if any value is NaN."""
    if values.numel() == 0:
        return 0.0
    low, high = torch.aminmax(values)
    return max(abs(float(low)), abs(float(high))) if low == low and high == high else math.nan
