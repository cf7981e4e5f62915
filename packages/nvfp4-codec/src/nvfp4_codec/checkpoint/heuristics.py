"""Statistical traces of wrongly stored scales and codes. Pure numpy, no files.

Thresholds are set so that random and trained weights pass (tests/checkpoint); each test
says what it needs to see a fault at all.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

#: No weight of a network is this large; its reciprocal convention gives 10^6 and more.
LARGEST_WEIGHT: Final = 1e4
#: Nor is the largest weight of a tensor this small, unless all are zero: weight decay of 2e-5 a
#: step leaves 1e-11 of 0.01 after a million steps.
SMALLEST_WEIGHT: Final = 1e-15
#: MXFP4 exponents of one weight lie within this many powers of two (98 % of them).
LARGEST_SPREAD: Final = 24
_ENOUGH_BLOCKS: Final = 32
#: Block maxima of one weight fill a few octaves: so many exponents, but 8 E4M3 bytes each.
_FEW_BYTES, _ENOUGH_FOR_FEW = 8, 256
_MATRICES: Final = 4  # of a stack of experts, to look at
_ROWS: Final = 1024  # of a matrix, as many whole tiles of 128

Bytes = NDArray[np.uint8]
Counts = NDArray[np.integer[Any]]
Floats = NDArray[np.float32]


def float_values(raw: Bytes, dtype: str) -> Floats:
    """Little-endian F32, BF16 or F16 bytes as float32."""
    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "F16":
        return raw.view(np.float16).astype(np.float32)
    return raw.view(np.float32)


@cache
def e4m3_table() -> Floats:
    """The value of every E4M3 byte; as `formats.decode_e4m3` has it, without importing torch."""
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    values = np.where(exponent == 0, mantissa, 8 + mantissa) * 2.0 ** (np.maximum(exponent, 1) - 10)
    values[0x7F] = np.nan
    table: Floats = np.concatenate([values, -values]).astype(np.float32)
    return table


def largest_e4m3(raw: Bytes) -> float:
    """The largest finite magnitude among E4M3 bytes, 0 if there is none."""
    magnitude = raw & 0x7F
    finite = magnitude[magnitude != 0x7F]
    return float(e4m3_table()[int(finite.max())]) if finite.size else 0.0


def looks_like_e8m0(raw: Bytes, counts: Counts, *, own_range: bool) -> tuple[str, bool] | None:
    """(what betrays E8M0 exponents among bytes that claim to be E4M3, is it strong), or None.

    Exponents of neighbouring blocks of 16 come in equal pairs (one E8M0 scale covers 32
    values) and fill few consecutive bytes. E4M3 scales of an exact cast from MXFP4 come in
    pairs too, but are powers of two apart: one mantissa. A genuine tensor with its own
    global scale (``own_range``) reaches 448 (0x7E).
    """
    used = np.flatnonzero(counts)
    powers = len({byte % 8 for byte in used.tolist() if byte >= 8}) == 1
    if raw.size < _ENOUGH_BLOCKS or powers or used[-1] >= 0x7E or used[0] < 0x40 or len(used) < 2:
        return None
    where = f"values {used[0]}..{used[-1]}"
    if raw.size % 2 == 0:
        pairs = raw.reshape(-1, 2)
        if bool((pairs[:, 0] == pairs[:, 1]).all()):
            return f"all {len(pairs)} pairs of neighbouring scale bytes are equal, {where}", True
    few = int(used[-1] - used[0]) < _FEW_BYTES
    if own_range and few and raw.size >= _ENOUGH_FOR_FEW:
        return f"{raw.size} scale bytes have only {len(used)} values, {where}, none is 448", False
    return None


def exponent_spread(counts: Counts) -> int:
    """Distance between the 1st and 99th percentile of a byte histogram."""
    total = int(counts.sum())
    if not total:
        return 0
    cumulated = np.cumsum(counts)
    low = int(np.searchsorted(cumulated, 0.01 * total))
    high = int(np.searchsorted(cumulated, 0.99 * total))
    return high - low


def unswizzled(scales: Bytes) -> Bytes:
    """Reads [R, C] bytes (R % 128 == 0, C % 4 == 0) as a 128x4-swizzled buffer of that shape."""
    rows, columns = scales.shape
    tiles = scales.reshape(rows // 128, columns // 4, 32, 4, 4)  # tile row, tile column, r, r/32, c
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(rows, columns)


def swizzle_evidence(scales: Bytes) -> float | None:
    """How many times better rows or columns agree once [E, R, C] scales are unswizzled.

    None if there is no evidence: sizes that padding would change, or weights whose rows
    and columns are all alike (random numbers), where the layout leaves no trace.
    """
    scales = scales[:, : _ROWS if scales.shape[1] % 128 == 0 else None]
    _, rows, columns = scales.shape
    if rows % 128 or columns % 4 or rows * columns < 2048:
        return None
    noise = np.sqrt(2 * (rows + columns)) / (rows * columns)
    ratios = []
    for matrix in scales[:_MATRICES]:
        stored, unrolled = _explained(matrix), _explained(unswizzled(matrix))
        ratios.append(unrolled / stored if unrolled > stored + 8 * noise else 0.0)
    ratio = float(np.median(ratios))
    return ratio if ratio > 1.35 else None


def _explained(matrix: Bytes) -> float:
    """The share of the variance that row means and column means explain.

    Real weights have strong rows and columns. Measured on all-MiniLM-L6-v2: in 36 of 37
    matrices linear scales explain more than their misreading does, and swizzled ones explain
    1.5 to 10 times more once unswizzled; the pooler looks like random numbers either way.
    """
    values = matrix.astype(np.float64)  # E4M3 bytes grow like a logarithm
    total = float(values.var())
    explained = float(values.mean(axis=1).var() + values.mean(axis=0).var())
    return explained / total if total > 0 else 1.0


def pair_contrast(energy: NDArray[np.float64]) -> NDArray[np.float64]:
    """log energy of column 2j minus that of column 2j + 1, for each j; an odd last one is left."""
    even = energy.size - energy.size % 2
    logs = np.log(energy[:even] + 1e-300)
    return np.asarray(logs[0::2] - logs[1::2])


def opposed(a: NDArray[np.float64], b: NDArray[np.float64]) -> float | None:
    """The correlation of two contrasts if it is significantly negative, else None."""
    if a.size != b.size or a.size < 32 or a.std() == 0 or b.std() == 0:
        return None
    correlation = float(np.corrcoef(a, b)[0, 1])
    return correlation if correlation < min(-0.3, -6 / np.sqrt(a.size)) else None
