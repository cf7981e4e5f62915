"""One weight against the source's: how close it must be, how close it is, and what explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from ...errors import CodecError
from ..families import Family
from ..header import shown
from ..heuristics import e4m3_table
from ..reader import Bytes, Checkpoint
from ..verify import Finding, global_value
from .stored import Stored, fault

if TYPE_CHECKING:
    from torch import Tensor

    from .values import Weight

#: SQNR in dB that rounding leaves at least: to E2M1 in blocks of 16, to E4M3, to BF16. Trained
#: weights measure about 20, 31 and 56; a convention error leaves less than 10.
FLOORS: Final = {"NVFP4": 15.0, "MXFP4": 12.0, "FP8": 25.0, "BF16": 45.0, "F16": 45.0}
#: From here down a convention error may explain the difference.
_EXPLAIN_DB: Final = 15.0
_CHUNK: Final = 1 << 24
#: findings after which no values can be compared
_LOST: Final = {"nan-scale", "nonfinite-weight", "negative-scale", "bad-scale", "bad-global-scale"}


@dataclass(frozen=True)
class Comparison:
    """A weight's SQNR in dB, inf if equal, and the finding if that is less than it must be."""

    tensor: str
    sqnr_db: float
    finding: Finding | None = None


def floor(stored: Stored, source: Stored) -> float:
    """The least SQNR in dB, inf where nothing may be lost.

    Nothing is lost in an unchanged format, by the exact cast of experts, and by writing E2M1 or
    E4M3 times a power of two as BF16.
    """
    before, after = source.format, stored.format
    scale = source.parts.get("scale")
    powers = before == "MXFP4" or (scale is not None and scale.dtype == "F8_E8M0")
    exact = (
        before == after
        or (before == "MXFP4" and stored.layout in ("nvfp4", "plain"))
        or (before == "FP8" and powers and stored.layout == "plain")
        or (before == "BF16" and after == "F32")
    )
    return math.inf if exact else FLOORS.get(after, FLOORS["BF16"])


def compare(
    source: Checkpoint, reference: Checkpoint, weight: Weight, known: Sequence[Finding]
) -> Comparison:
    """Holds a weight against the reference's; ``known``: what its bytes alone have shown."""
    from ...sqnr import sqnr_db
    from ..values import is_numeric, load_values

    family, other = weight.family, weight.reference
    assert other is not None
    name = shown(family.weight.name)
    if _same_bytes(source, family, reference, other):
        return Comparison(name, math.inf)
    if not (is_numeric(family) and is_numeric(other)) or family.shape != other.shape:
        return Comparison(name, -math.inf, _differs(family, "other bytes", "the source's"))
    if _LOST & {finding.code for finding in known}:
        return Comparison(name, math.nan)
    try:
        values, expected = load_values(source, family), load_values(reference, other)
    except CodecError as error:
        return Comparison(name, math.nan, _differs(family, str(error), "readable values"))
    quality = sqnr_db(expected, values)
    wrong = f"SQNR {quality:.1f} dB"
    if weight.requantized and other.kind == "mxfp4" and family.kind == "nvfp4":
        admitted = _against_cast(source, reference, weight, values)
        if admitted is None:
            return Comparison(name, quality)
        wrong = admitted
    elif quality >= weight.least or not family.numel:
        return Comparison(name, quality)
    if quality < _EXPLAIN_DB:
        from ..against import too_far

        found = too_far(source, family, reference, other, quality, weight.least)
        if math.isinf(weight.least):
            found = replace(found, expected="equal values")
        return Comparison(name, quality, found)
    least = "equal values" if math.isinf(weight.least) else f"at least {weight.least:g} dB"
    return Comparison(name, quality, _differs(family, wrong, least))


def _differs(family: Family, found: str, expected: str) -> Finding:
    exact = expected.startswith("equal")
    return fault(
        family.weight,
        "not-exact" if exact else "differs-from-reference",
        f"{found} against the source",
        expected,
        "The values were rounded once more on their way: export from the official checkpoint, "
        "which casts experts exactly and copies what stays."
        if exact
        else "Export again from this source; if it is the right one, the file is damaged.",
    )


def _same_bytes(source: Checkpoint, a: Family, reference: Checkpoint, b: Family) -> bool:
    """Whether all tensors of the two families have the same dtypes, shapes and bytes."""
    pairs = [(a.weight, b.weight), (a.scale, b.scale), (a.global_scale, b.global_scale)]
    for first, second in pairs:
        if first is None or second is None:
            if first is not second:
                return False
            continue
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
    return all(
        _equal_data(source, x.name, reference, y.name, x.nbytes) for x, y in pairs if x and y
    )


def _equal_data(a: Checkpoint, first: str, b: Checkpoint, second: str, nbytes: int) -> bool:
    for start in range(0, nbytes, _CHUNK):
        size = min(_CHUNK, nbytes - start)
        left: Bytes = np.empty(size, dtype=np.uint8)
        right: Bytes = np.empty(size, dtype=np.uint8)
        a.read_into(first, left, start)
        b.read_into(second, right, start)
        if not np.array_equal(left, right):
            return False
    return True


def same_cast(source: Checkpoint, reference: Checkpoint, weight: Weight) -> bool:
    """Whether an NVFP4 weight has its MXFP4 reference's codes, and scales of the same values.

    Decides the usual case 20 times faster than decoding both; a difference is left to ``compare``.
    """
    a, b = weight.family, weight.reference
    if b is None or weight.requantized:
        return False
    if (a.kind, b.kind) != ("nvfp4", "mxfp4") or a.shape != b.shape or a.divides:
        return False
    assert a.scale is not None
    assert b.scale is not None
    if not _equal_data(source, a.weight.name, reference, b.weight.name, a.weight.nbytes):
        return False
    exponents = reference.read(b.scale.name)
    if exponents.size and int(exponents.max()) == 255:
        return False
    scales = source.read(a.scale.name).reshape(-1, 2)
    if not np.array_equal(scales[:, 0], scales[:, 1]):
        return False
    with np.errstate(over="ignore"):
        values = e4m3_table() * np.float32(global_value(source, a))
    powers = np.ldexp(np.float32(1), np.arange(255) - 127)
    return bool(np.array_equal(values[scales[:, 0]], powers[exponents]))


def _against_cast(
    source: Checkpoint, reference: Checkpoint, weight: Weight, values: Tensor
) -> str | None:
    """How a weight differs from the cast that rounds what it cannot hold; None if it does not.

    That cast is made again with the stored weight_scale_2. Equal are the values of all blocks,
    and the number of rounded ones to what the export says.
    """
    import torch

    from ... import dequantize_nvfp4, mxfp4_to_nvfp4
    from ..values import load_mxfp4, load_nvfp4

    assert weight.reference is not None
    packed, scale = load_mxfp4(reference, weight.reference)
    scale_2 = load_nvfp4(source, weight.family)[2]
    try:
        made = mxfp4_to_nvfp4(packed, scale, weight_scale_2=scale_2, outside="requantize")
    except CodecError as error:
        return f"no cast of the source has this weight_scale_2 ({error}):"
    cast = dequantize_nvfp4(
        made.weight, made.weight_scale, made.weight_scale_2, dtype=torch.float32
    )
    wrong = int((cast != values).reshape(-1, 32).any(dim=1).sum())
    if wrong:
        return f"{wrong} block(s) of 32 other than the cast makes them,"
    lossy = int((~made.lossless_mask).sum())
    if lossy != weight.requantized:
        return f"{lossy} rounded block(s) of 32 where the manifest says {weight.requantized},"
    return None
