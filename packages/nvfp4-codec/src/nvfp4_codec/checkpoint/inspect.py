"""Describe a checkpoint: formats, shapes, scale ranges, amax, and SQNR against a reference."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import CodecError
from .families import Family, Kind, find_families, natural_key, pattern
from .heuristics import Floats, float_values
from .reader import Checkpoint
from .structure import problems
from .writer import Advance, no_advance


@dataclass(frozen=True)
class FamilyStats:
    """One weight. Ranges are (least, greatest); None where there is nothing to measure.

    scale_range: decoded block scales. amax: largest magnitude of the decoded weight.
    exponents: log2 of a scale, rounded down -> number of blocks.
    problem: why the weight could not be decoded.
    """

    family: Family
    scale_range: tuple[float, float] | None = None
    global_scale: float | None = None
    amax: float | None = None
    sqnr_db: float | None = None
    exponents: tuple[tuple[int, int], ...] = ()
    problem: str | None = None


@dataclass(frozen=True)
class Row:
    """Weights of one kind whose names differ in numbers only."""

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    count: int
    nbytes: int
    scale_range: tuple[float, float] | None
    global_range: tuple[float, float] | None
    amax: float | None
    sqnr_db: float | None
    exponents: tuple[tuple[int, int], ...]
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Stable keys; numbers that are not finite become strings."""
        return {
            "name": self.name,
            "format": self.kind,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "count": self.count,
            "bytes": self.nbytes,
            "scale_range": _finite(self.scale_range),
            "global_scale_range": _finite(self.global_range),
            "amax": _finite(self.amax),
            "sqnr_db": _finite(self.sqnr_db),
            "problems": list(self.problems),
        }


def _finite(value: float | tuple[float, float] | None) -> Any:
    if isinstance(value, tuple):
        return [_finite(part) for part in value]
    return value if value is None or math.isfinite(value) else str(value)


def inspect_checkpoint(
    source: Checkpoint,
    reference: Checkpoint | None = None,
    *,
    headers_only: bool = False,
    advance: Advance = no_advance,
) -> list[FamilyStats]:
    """Statistics of every weight, in natural name order, one tensor in memory at a time.

    headers_only: read no data; formats, shapes and sizes only.
    Raises CheckpointError if a file cannot be read; a faulty weight becomes a ``problem``.
    """
    found = []
    others = {} if reference is None else matching(find_families(reference.tensors))
    for family in find_families(source.tensors):
        if headers_only:
            wrong = problems(family)
            found.append(FamilyStats(family, problem=str(wrong[0]) if wrong else None))
        else:
            found.append(_measure(source, family, reference, others.get(family.module)))
        advance(family.nbytes)
    return found


def matching(families: Iterable[Family]) -> dict[str, Family]:
    """Families by module name, to pair two checkpoints whose formats differ."""
    return {family.module: family for family in families}


def _measure(
    source: Checkpoint, family: Family, reference: Checkpoint | None, other: Family | None
) -> FamilyStats:
    from ..sqnr import sqnr_db
    from .measure import amax
    from .values import is_numeric, load_values

    if not is_numeric(family) or not family.numel:
        return FamilyStats(family)
    wrong = problems(family)
    if wrong:
        return FamilyStats(family, problem=str(wrong[0]))
    try:
        values = load_values(source, family)
    except CodecError as error:
        return FamilyStats(family, problem=str(error))
    scales = scale_values(source, family)
    global_scale = None
    if family.global_scale is not None:
        global_scale = float(source.read(family.global_scale.name).view(np.float32)[0])
    noise = None
    if reference is not None and other is not None and other.shape == family.shape:
        noise = sqnr_db(load_values(reference, other), values)
    if scales is None:
        return FamilyStats(family, amax=amax(values), sqnr_db=noise)
    finite = scales[np.isfinite(scales)]
    return FamilyStats(
        family,
        (float(finite.min()), float(finite.max())) if finite.size else None,
        global_scale,
        amax(values),
        noise,
        _exponents(finite),
    )


def scale_values(source: Checkpoint, family: Family) -> Floats | None:
    """The decoded block scales, flat; None for a plain weight."""
    from .heuristics import e4m3_table

    if family.scale is None:
        return None
    raw = source.read(family.scale.name)
    if family.kind == "nvfp4":
        return e4m3_table()[raw]
    if family.kind == "mxfp4" or family.scale.dtype == "F8_E8M0":
        table = np.full(256, np.nan, dtype=np.float32)  # byte 255 stays NaN
        table[:255] = np.ldexp(1.0, np.arange(255) - 127)
        return np.asarray(table[raw])
    return float_values(raw, family.scale.dtype)


def _exponents(scales: Floats) -> tuple[tuple[int, int], ...]:
    _, exponents = np.frexp(np.abs(scales[scales != 0]))
    values, counts = np.unique(exponents - 1, return_counts=True)
    return tuple(zip(values.tolist(), counts.tolist(), strict=True))


def summarize(stats: Iterable[FamilyStats], *, each: bool = False) -> list[Row]:
    """One row per name pattern, format and shape; ``each``: one row per weight."""
    groups: dict[tuple[Any, ...], list[FamilyStats]] = {}
    for stat in stats:
        family = stat.family
        name = family.module if each else pattern(family.module)
        groups.setdefault((name, family.kind, family.weight.dtype, family.shape), []).append(stat)
    rows = []
    for (name, kind, dtype, shape), members in groups.items():
        ranges = [s.scale_range for s in members if s.scale_range is not None]
        globals_ = [s.global_scale for s in members if s.global_scale is not None]
        amaxes = [s.amax for s in members if s.amax is not None]
        sqnrs = [s.sqnr_db for s in members if s.sqnr_db is not None]
        exponents: dict[int, int] = {}
        for exponent, count in (pair for s in members for pair in s.exponents):
            exponents[exponent] = exponents.get(exponent, 0) + count
        rows.append(
            Row(
                name,
                kind,
                dtype,
                shape,
                len(members),
                sum(s.family.nbytes for s in members),
                (min(r[0] for r in ranges), max(r[1] for r in ranges)) if ranges else None,
                (min(globals_), max(globals_)) if globals_ else None,
                _worst(amaxes, max),
                _worst(sqnrs, min),
                tuple(sorted(exponents.items())),
                tuple(s.problem for s in members if s.problem is not None),
            )
        )
    return sorted(rows, key=lambda row: natural_key(row.name))


def _worst(values: list[float], choose: Any) -> float | None:
    """The extreme value; nan if any is nan, so that it cannot hide."""
    if any(math.isnan(value) for value in values):
        return math.nan
    return float(choose(values)) if values else None
