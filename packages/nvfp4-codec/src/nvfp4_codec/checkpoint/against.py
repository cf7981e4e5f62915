"""Compare the values of a checkpoint with those of the one it was made from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from ..errors import CodecError
from ..explain import DiffReport, explain_diff
from ..sqnr import sqnr_db
from .families import Family, find_families
from .header import shown
from .inspect import matching
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


#: findings after which some values, or all, are known to be no numbers or no weights
_SOME_LOST: Final = ("nan-scale", "nonfinite-weight", "negative-scale", "bad-scale")
_ALL_LOST: Final = ("bad-global-scale",)


@dataclass
class Compared:
    """The findings of a comparison, and the names of weights whose values are as they should."""

    findings: list[Finding] = field(default_factory=list)
    fine: set[str] = field(default_factory=set)


def compare_with_reference(
    source: Checkpoint,
    families: Iterable[Family],
    reference: Checkpoint,
    known: Iterable[Finding] = (),
) -> Compared:
    """Findings for weights that are absent, reshaped, or whose values are far off.

    ``known``: what was found without the reference; values lost by that are not compared.
    """
    from .verify import Finding

    codes: dict[str, set[str]] = {}
    for finding in known:
        codes.setdefault(finding.tensor, set()).add(finding.code)
    families = list(families)
    others = matching(find_families(reference.tensors))
    present = {family.module for family in families}
    compared = Compared()
    for family in others.values():
        if family.module not in present:
            compared.findings.append(
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
        found = codes.get(shown(family.weight.name), set())
        if not found & set(_ALL_LOST):
            _compare(source, family, reference, other, found, compared)
    return compared


def merged(findings: Iterable[Finding], compared: Compared) -> list[Finding]:
    """Both lists, with one finding per cause: the reference confirms, refutes or replaces guesses.

    What was certain or likely without the reference stays and is not said twice.
    """
    by_name = {finding.tensor: finding for finding in compared.findings}
    swapped = any(finding.code == "swapped-nibbles" for finding in compared.findings)
    kept, said = [], set()
    for finding in findings:
        new = by_name.get(finding.tensor)
        guess = finding.confidence in ("medium", "low")
        if new is not None and new.code == finding.code:
            finding = replace(finding, confidence="certain")
            said.add(finding.tensor)
        elif new is not None and finding.confidence == "high":
            said.add(finding.tensor)
        elif guess and (
            new is not None
            or finding.tensor in compared.fine
            or (swapped and finding.code == "swapped-nibbles")
        ):
            continue
        kept.append(finding)
    return kept + [finding for finding in compared.findings if finding.tensor not in said]


def _compare(
    source: Checkpoint,
    family: Family,
    reference: Checkpoint,
    other: Family,
    known: set[str],
    compared: Compared,
) -> None:
    from .verify import Finding

    name, file = shown(family.weight.name), shown(family.weight.file)
    if family.shape != other.shape:
        compared.findings.append(
            Finding(
                "shape-mismatch",
                name,
                file,
                f"logical shape {list(family.shape)}",
                f"{list(other.shape)}, as in the reference",
                "The weight was read in the wrong format, or comes from another model.",
            )
        )
        return
    if not family.numel:
        return
    try:
        values, expected = load_values(source, family), load_values(reference, other)
    except CodecError:
        return  # reported without the reference already
    partly = bool(known & set(_SOME_LOST))
    if partly:  # the rest may still be right
        finite = values.isfinite()
        values, expected = values[finite], expected[finite]
    quality = sqnr_db(expected, values)
    if quality >= _POOR_DB or not bool(expected.any()):
        if quality >= _POOR_DB:
            compared.fine.add(name)
        return
    if partly and "nan-scale" not in known and "nonfinite-weight" not in known:
        return  # scales of the wrong sign explain it
    compared.findings.append(
        too_far(source, family, reference, other, quality, _POOR_DB, explain=not partly)
    )


def too_far(
    source: Checkpoint,
    family: Family,
    reference: Checkpoint,
    other: Family,
    quality: float,
    least: float,
    *,
    explain: bool = True,
) -> Finding:
    """The finding that values are further from the reference's than ``least`` dB, and why.

    ``explain``: look for a convention error; else, or if there is none, none is named.
    """
    from .verify import Finding

    report = explain_families(source, family, reference, other) if explain else None
    best = report.best if report is not None else None
    code = "differs-from-reference" if best is None else _CODES.get(best.name, best.name)
    cause = "No known convention error explains it" if best is None else best.meaning
    fix = "quantize it again from the reference" if best is None else best.fix
    shown_quality = "not a number" if math.isnan(quality) else f"{quality:.1f} dB"
    return Finding(
        code,
        shown(family.weight.name),
        shown(family.weight.file),
        f"SQNR {shown_quality} against the reference",
        f"at least {least:g} dB",
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
