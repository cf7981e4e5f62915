"""Compare the values of a checkpoint with those of the one it was made from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from ..errors import CodecError
from ..explain import DiffReport, explain_diff
from .families import Family, find_families
from .header import shown
from .inspect import matching
from .measure import sqnr_db
from .reader import Checkpoint
from .structure import problems
from .values import is_numeric, load_subject, load_values

if TYPE_CHECKING:
    from .verify import Finding

#: Block formats keep more than this of any weight; wrong conventions leave far less.
_POOR_DB: Final = 10.0
#: explain_diff's names where verify has its own for the same fault
_CODES: Final = {
    "nibble-order": "swapped-nibbles",
    "swizzled-scales": "swizzled-scale",
    "missing-global-scale": "missing-weight-scale-2",
    "unit-scales": "scales-all-ones",
    "scale-format": "e8m0-read-as-e4m3",
}


def compare_with_reference(
    source: Checkpoint, families: Iterable[Family], reference: Checkpoint
) -> list[Finding]:
    """Findings for weights that are absent, reshaped, or whose values are far off."""
    from .verify import Finding

    others = matching(find_families(reference.tensors))
    present = {family.module for family in families}
    findings = []
    for family in others.values():
        if family.module not in present:
            findings.append(
                Finding(
                    "missing-tensor",
                    shown(family.weight.name),
                    shown(str(source.root)),
                    "absent",
                    f"a weight of shape {list(family.shape)}, as in the reference",
                    "Convert again from the whole reference.",
                )
            )
    for family in families:
        other = others.get(family.module)
        if other is None or not is_numeric(family) or not is_numeric(other) or problems(family):
            continue
        finding = _compare(source, family, reference, other)
        if finding is not None:
            findings.append(finding)
    return findings


def _compare(
    source: Checkpoint, family: Family, reference: Checkpoint, other: Family
) -> Finding | None:
    from .verify import Finding

    name, file = shown(family.weight.name), shown(family.weight.file)
    if family.shape != other.shape:
        return Finding(
            "shape-mismatch",
            name,
            file,
            f"logical shape {list(family.shape)}",
            f"{list(other.shape)}, as in the reference",
            "The weight was read in the wrong format, or comes from another model.",
        )
    try:
        values, expected = load_values(source, family), load_values(reference, other)
    except CodecError:
        return None  # reported without the reference already
    quality = sqnr_db(expected, values)
    if quality >= _POOR_DB or not bool(expected.any()):
        return None
    report = explain_families(source, family, reference, other)
    best = report.best if report is not None else None
    code = "differs-from-reference" if best is None else _CODES.get(best.name, best.name)
    cause = "No known convention error explains it" if best is None else best.meaning
    fix = "quantize it again from the reference" if best is None else best.fix
    shown_quality = "not a number" if math.isnan(quality) else f"{quality:.1f} dB"
    return Finding(
        code,
        name,
        file,
        f"SQNR {shown_quality} against the reference",
        f"at least {_POOR_DB:g} dB",
        f"{cause}: {fix}.",
    )


def explain_families(
    suspect: Checkpoint, family: Family, trusted: Checkpoint, other: Family
) -> DiffReport | None:
    """explain_diff of a weight in two checkpoints; None if one of them cannot be read."""
    try:
        return explain_diff(load_subject(trusted, other), load_subject(suspect, family))
    except CodecError:
        return None
