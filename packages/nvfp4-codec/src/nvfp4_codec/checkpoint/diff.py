"""Compare two checkpoints tensor by tensor: names, dtypes, shapes, bytes, and then values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np

from ..errors import CodecError
from .families import Family, find_families, natural_key
from .inspect import matching
from .reader import Bytes, Checkpoint, TensorInfo
from .writer import Advance, no_advance

Status = Literal["only-in-a", "only-in-b", "dtype", "shape", "bytes", "values"]
ABSENT: Final = "absent"
_CHUNK: Final = 1 << 26
#: What rounding leaves of a weight, in dB: E2M1 with block scales, E4M3, BF16 and better.
_FOUR_BITS, _EIGHT_BITS, _SIXTEEN_BITS, _FLOAT32 = (15.0, 25.0), (25.0, 45.0), 50.0, 120.0


@dataclass(frozen=True)
class Difference:
    """One difference. status "values" speaks of a weight with its scales, decoded.

    a, b: what each side holds; sqnr_db: of b against a, if decoded; explanation: the likely
    cause, a convention error or rounding; members: the tensors that a decoded weight stands for.
    """

    name: str
    status: Status
    a: str
    b: str
    sqnr_db: float | None = None
    explanation: str | None = None
    members: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The difference in a few words."""
        if self.status in ("only-in-a", "only-in-b"):
            return f"only in {self.status[-1]}: {self.b if self.a == ABSENT else self.a}"
        return self.b if self.status == "bytes" or self.a == self.b else f"{self.a} -> {self.b}"

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object; a number that is not finite becomes a string."""
        fields = {**asdict(self), "members": list(self.members)}
        if self.sqnr_db is not None and not np.isfinite(self.sqnr_db):
            fields["sqnr_db"] = str(self.sqnr_db)
        return fields


def diff_checkpoints(
    a: Checkpoint, b: Checkpoint, *, explain: bool = True, advance: Advance = no_advance
) -> list[Difference]:
    """Differences in natural name order; empty if every tensor has the same bytes.

    Weights present in both under one module name but stored differently are decoded and
    compared by value, so that a BF16 model and its NVFP4 copy can be told apart from a
    broken copy; one difference then stands for the weight and its scales. ``explain``: name
    the likely convention error where values are far off.
    """
    found: list[Difference] = []
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
    values = list(_value_differences(a, b, {d.name: d for d in found}, explain))
    # an error says that nothing was decoded: then the members' rows are all there is
    folded = {name for d in values if d.sqnr_db is not None for name in d.members}
    found = [d for d in found if d.name not in folded] + values
    return sorted(found, key=lambda difference: natural_key(difference.name))


def rounding(a: Family, b: Family, sqnr_db: float) -> str | None:
    """What an SQNR in dB says about two storages of one weight, if rounding explains it."""
    kinds, dtypes = {a.kind, b.kind}, {a.weight.dtype, b.weight.dtype}
    if sqnr_db == np.inf:
        return "the same values, stored differently"
    if _storage(a) != _storage(b) and sqnr_db >= _FLOAT32:
        return "the same values but for float32 rounding"
    if kinds & {"nvfp4", "mxfp4"} and _FOUR_BITS[0] <= sqnr_db <= _FOUR_BITS[1]:
        return "consistent with 4-bit rounding"
    if "fp8-block" in kinds and _EIGHT_BITS[0] <= sqnr_db <= _EIGHT_BITS[1]:
        return "consistent with 8-bit rounding"
    if _storage(a) != _storage(b) and dtypes & {"BF16", "F16"} and sqnr_db >= _SIXTEEN_BITS:
        return "consistent with 16-bit rounding"
    return None


def _storage(family: Family) -> str:
    """The format as a person calls it."""
    if family.kind == "plain":
        return family.weight.dtype
    return family.kind.upper() + (" (compressed-tensors)" if family.divides else "")


def _describe(info: TensorInfo | None) -> str:
    return ABSENT if info is None else f"{info.dtype} {list(info.shape)}"


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
    a: Checkpoint, b: Checkpoint, touched: Mapping[str, Difference], explain: bool
) -> Iterator[Difference]:
    others = matching(find_families(b.tensors))
    for family in find_families(a.tensors):
        other = others.get(family.module)
        if other is None or family.shape != other.shape:
            continue
        names = [info.name for member in (family, other) for info in member.members]
        members = [touched[name] for name in dict.fromkeys(names) if name in touched]
        if members:
            difference = _compare_values(a, family, b, other, explain, members)
            if difference is not None:
                yield difference


def _compare_values(
    a: Checkpoint,
    family: Family,
    b: Checkpoint,
    other: Family,
    explain: bool,
    members: Sequence[Difference],
) -> Difference | None:
    from ..sqnr import sqnr_db
    from .values import is_numeric, load_values

    if not (is_numeric(family) and is_numeric(other) and family.numel):
        return None
    names = tuple(member.name for member in members)
    before, after = _storage(family), _storage(other)
    try:
        first, second = load_values(a, family), load_values(b, other)
    except CodecError as error:
        return Difference(family.module, "values", before, after, None, str(error), names)
    quality = sqnr_db(first, second)
    if all(member.status == "bytes" for member in members):
        parts = (m.name.removeprefix(family.module).lstrip("._") or "weight" for m in members)
        after = f"{after}, other bytes in {', '.join(parts)}"
    cause = rounding(family, other, quality)
    if cause is None and explain and not quality >= _FOUR_BITS[0]:
        cause = _convention_error(a, family, b, other)
    return Difference(family.module, "values", before, after, quality, cause, names)


def _convention_error(a: Checkpoint, family: Family, b: Checkpoint, other: Family) -> str | None:
    from .against import explain_families

    report = explain_families(b, other, a, family)
    if report is None:
        return None
    best = report.best
    if best is None:
        return "no known convention error explains it: other weights, or quantized wrongly"
    return f"{best.name}: {best.meaning} ({best.detail}). Fix: {best.fix}"
