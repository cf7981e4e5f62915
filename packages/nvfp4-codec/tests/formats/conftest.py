"""The float32 numbers at which an encoder can go wrong, and the exact answer for each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_codec.formats import ElementFormat


def _neighbours(x: np.ndarray) -> np.ndarray:
    """x and the next float32 on either side, of both signs."""
    x = x.astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        down, up = np.nextafter(x, np.float32(-np.inf)), np.nextafter(x, np.float32(np.inf))
    near = np.concatenate((down, x, up))
    return np.concatenate((near, -near))


@pytest.fixture(scope="session")
def critical() -> Callable[[ElementFormat], Tensor]:
    """Every value of a format, every midpoint, one past the range, and float32's own edges."""

    def make(fmt: ElementFormat) -> Tensor:
        values = np.array([fmt.value(code) for code in range(fmt.max_code + 1)])
        values = np.append(values, 2 * values[-1] - values[-2])  # the first number out of range
        middles = (values[1:] + values[:-1]) / 2
        info = np.finfo(np.float32)
        edges = np.array([info.smallest_subnormal, info.tiny, 1.0, info.max])
        x = _neighbours(np.concatenate((values, middles, edges)))
        return torch.from_numpy(np.append(x, np.array([np.inf, -np.inf], dtype=np.float32)))

    return make


@pytest.fixture(scope="session")
def nearest() -> Callable[[ElementFormat, Tensor, str], Tensor]:
    """Magnitude codes by searching the format's value table in float64, where all is exact.

    The table goes on one code past the largest finite one, so that overflow is seen.
    """

    def find(fmt: ElementFormat, x: Tensor, rounding: str) -> Tensor:
        values = np.array([fmt.value(code) for code in range(fmt.max_code + 1)])
        values = np.append(values, 2 * values[-1] - values[-2])
        magnitude = np.minimum(np.abs(x.numpy().astype(np.float64)), values[-1])
        below = np.searchsorted(values, magnitude, side="right") - 1
        above = np.minimum(below + (values[below] < magnitude), len(values) - 1)
        low, high = magnitude - values[below], values[above] - magnitude
        even = np.where(below % 2 == 0, below, above)
        tie = {"nearest_even": even, "ties_to_zero": below, "ties_away": above}
        if rounding == "toward_zero":
            code = below
        elif rounding == "away":
            code = above
        else:
            code = np.where(low < high, below, np.where(low > high, above, tie[rounding]))
        return torch.from_numpy(code.astype(np.int32))

    return find
