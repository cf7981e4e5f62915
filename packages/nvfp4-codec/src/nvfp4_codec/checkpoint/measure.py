"""Signal-to-quantization-noise ratio, summed in float64 over slices of bounded size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_SLICE = 1 << 22


@dataclass
class Noise:
    """Accumulates the energy of a signal and of the difference to its copy."""

    signal: float = 0.0
    noise: float = 0.0
    largest: float = 0.0

    def add(self, reference: Tensor, values: Tensor) -> None:
        """Adds two tensors of the same shape; slices keep the float32 copies small."""
        flat_a, flat_b = reference.reshape(-1), values.reshape(-1)
        for start in range(0, flat_a.numel(), _SLICE):
            a = flat_a[start : start + _SLICE].float()
            difference = flat_b[start : start + _SLICE].float() - a
            self.signal += float(a.double().square().sum())
            self.noise += float(difference.double().square().sum())
            self.largest = max(self.largest, float(difference.abs().max()))

    @property
    def sqnr_db(self) -> float:
        """10 log10(signal / noise); inf if equal, nan if something is not finite."""
        if self.noise == 0:
            return math.inf
        ratio = self.signal / self.noise
        return 10 * math.log10(ratio) if 0 < ratio < math.inf else math.nan


def sqnr_db(reference: Tensor, values: Tensor) -> float:
    """SQNR of ``values`` against ``reference`` in dB."""
    noise = Noise()
    noise.add(reference, values)
    return noise.sqnr_db


def amax(values: Tensor) -> float:
    """Largest magnitude without a copy of the tensor; nan if any value is NaN."""
    if values.numel() == 0:
        return 0.0
    low, high = torch.aminmax(values)
    return max(abs(float(low)), abs(float(high))) if low == low and high == high else math.nan
