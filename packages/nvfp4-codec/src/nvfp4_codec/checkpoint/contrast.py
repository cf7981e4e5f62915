"""How loud the columns of a weight are, from a sample of its rows, so that memory stays small."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from . import heuristics
from .families import FLOATS, Family
from .reader import Bytes, Checkpoint, TensorInfo

#: values of one weight that are looked at, in so many runs of rows
_SAMPLE: Final = 1 << 22
_RUNS: Final = 16


def can_contrast(family: Family) -> bool:
    """True for matrices of NVFP4, of FP8 or of plain floats that have pairs of columns."""
    if len(family.shape) != 2 or family.numel == 0:
        return False
    if family.kind == "nvfp4":
        return family.shape[1] % 16 == 0
    if family.kind == "fp8-block":
        return family.block is not None and family.block[1] % 2 == 0
    return family.kind == "plain" and family.weight.dtype in FLOATS


def contrast(source: Checkpoint, family: Family, sample: int = _SAMPLE) -> NDArray[np.float64]:
    """log energy of column 2j minus that of column 2j + 1; NaN and Inf count as 0.

    The global scale, common to all columns, is left out. ``sample``: values to look at.
    """
    rows, columns = family.shape
    energy = np.zeros(columns)
    for start, count in _runs(rows, columns, sample):
        weight = _rows(source, family.weight, rows, start, count)
        if family.kind == "plain":
            values = heuristics.float_values(weight, family.weight.dtype).reshape(count, columns)
            values = np.where(np.isfinite(values), values, np.float32(0))
            energy += np.square(values, dtype=np.float64).sum(axis=0)
            continue
        if family.kind == "fp8-block":
            # the columns of a pair have the same scales
            energy += _e4m3_squared()[weight.reshape(count, columns)].sum(axis=0)
            continue
        assert family.scale is not None
        scale = _rows(source, family.scale, rows, start, count).reshape(count, columns // 16)
        squares = _e4m3_squared()[scale]
        codes = weight.reshape(count, columns // 16, 8)
        for parity, nibbles in enumerate((codes & 7, (codes >> 4) & 7)):
            parts = (_E2M1_SQUARED[nibbles] * squares[:, :, None]).sum(axis=0, dtype=np.float64)
            energy[parity::2] += parts.reshape(-1)
    return heuristics.pair_contrast(energy)


@cache
def _e4m3_squared() -> NDArray[np.float64]:
    return np.asarray(np.nan_to_num(np.square(heuristics.e4m3_table(), dtype=np.float64)))


_E2M1_SQUARED: Final = np.square(np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32))


def _runs(rows: int, columns: int, sample: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of runs that are spread evenly over the matrix."""
    wanted = max(sample // columns, 1)
    if wanted >= rows:
        yield 0, rows
        return
    runs = min(_RUNS, wanted)
    for i in range(runs):
        yield i * rows // runs, wanted // runs


def _rows(source: Checkpoint, info: TensorInfo, rows: int, start: int, count: int) -> Bytes:
    size = info.nbytes // rows
    data: Bytes = np.empty(count * size, dtype=np.uint8)
    source.read_into(info.name, data, start * size)
    return data
