"""Compare two checkpoints tensor by tensor: names, dtypes, shapes, bytes, and then values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np

from ..errors import CodecError
from .families import Family, find_families, natural_key
from .inspect import matching
from .reader import Bytes, Checkpoint, TensorInfo
from .writer import Advance, no_advance

Status = Literal["only-in-a", "only-in-b", "dtype", "shape", "bytes", "values"]
_CHUNK: Final = 1 << 26


@dataclass(frozen=True)
class Difference:
    """One difference. status "values" speaks of a weight whose two formats were decoded.

    sqnr_db: of b against a; explanation: the likely convention error.
    """

    name: str
    status: Status
    a: str
    b: str
    sqnr_db: float | None = None
    explanation: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object; a number that is not finite becomes a string."""
        fields = asdict(self)
        if self.sqnr_db is not None and not np.isfinite(self.sqnr_db):
            fields["sqnr_db"] = str(self.sqnr_db)
        return fields


def diff_checkpoints(
    a: Checkpoint, b: Checkpoint, *, explain: bool = True, advance: Advance = no_advance
) -> list[Difference]:
    """Differences in natural name order; empty if every tensor has the same bytes.

    Weights present in both under one module name but stored differently are decoded and
    compared by value, so that a BF16 model and its NVFP4 copy can be told apart from a
    broken copy. ``explain``: name the likely convention error where values are far off.
    """
    found = []
    for name in sorted(a.tensors.keys() | b.tensors.keys(), key=natural_key):
        first, second = a.tensors.get(name), b.tensors.get(name)
        if first is None or second is None:
            side: Status = "only-in-b" if first is None else "only-in-a"
            found.append(Difference(name, side, _describe(first), _describe(second)))
        elif first.dtype != second.dtype:
            found.append(Difference(name, "dtype", _describe(first), _describe(second)))
        elif first.shape != second.shape:
            found.append(Difference(name, "shape", _describe(first), _describe(second)))
        else:
            differing = _count_differing(a, b, name)
            if differing:
                text = f"{differing} of {first.nbytes} bytes differ"
                found.append(Difference(name, "bytes", _describe(first), text))
        advance(sum(info.nbytes for info in (first, second) if info is not None))
    touched = {difference.name for difference in found}
    found += [d for d in _value_differences(a, b, touched, explain) if d is not None]
    return found


def _describe(info: TensorInfo | None) -> str:
    return "absent" if info is None else f"{info.dtype} {list(info.shape)}"


def _count_differing(a: Checkpoint, b: Checkpoint, name: str) -> int:
    nbytes, differing = a.info(name).nbytes, 0
    for start in range(0, nbytes, _CHUNK):
        size = min(_CHUNK, nbytes - start)
        left: Bytes = np.empty(size, dtype=np.uint8)
        right: Bytes = np.empty(size, dtype=np.uint8)
        a.read_into(name, left, start)
        b.read_into(name, right, start)
        differing += int(np.count_nonzero(left != right))
    return differing


def _value_differences(
    a: Checkpoint, b: Checkpoint, touched: set[str], explain: bool
) -> Iterator[Difference]:
    others = matching(find_families(b.tensors))
    for family in find_families(a.tensors):
        other = others.get(family.module)
        if other is None:
            continue
        names = {info.name for member in (family, other) for info in member.members}
        if names & touched and family.shape == other.shape:
            difference = _compare_values(a, family, b, other, explain)
            if difference is not None:
                yield difference


def _compare_values(
    a: Checkpoint, family: Family, b: Checkpoint, other: Family, explain: bool
) -> Difference | None:
    from .against import explain_families
    from .measure import sqnr_db
    from .values import is_numeric, load_values

    if not (is_numeric(family) and is_numeric(other)):
        return None
    try:
        first, second = load_values(a, family), load_values(b, other)
    except CodecError as error:
        return Difference(family.module, "values", family.kind, other.kind, None, str(error))
    quality = sqnr_db(first, second)
    report = explain_families(b, other, a, family) if explain and not quality >= 15 else None
    words = None if report is None else str(report)
    return Difference(family.module, "values", family.kind, other.kind, quality, words)
