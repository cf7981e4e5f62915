"""What only bytes show: every scalar scale, and the values of a sample of all kinds of weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from nvfp4_codec.checkpoint.deepseek_v4.against import compare, same_cast
from nvfp4_codec.checkpoint.deepseek_v4.stored import Model
from nvfp4_codec.checkpoint.deepseek_v4.values import (
    Result,
    Unit,
    check_units,
    collect,
    sampled,
    units,
)
from nvfp4_codec.checkpoint.header import shown
from nvfp4_codec.checkpoint.reader import Checkpoint
from nvfp4_codec.checkpoint.verify import Finding

#: A checkpoint of this size is read as a whole, or compared as a whole.
_SMALL, _SMALL_COMPARED = 2 << 30, 64 << 20
#: Weights of each kind otherwise; fewer where each is dequantized twice to be compared.
_FEW, _FEW_COMPARED = 4, 2
#: Bytes of an FP8 or plain weight that are searched for NaN.
_LIMIT: Final = 4 << 20


@dataclass(frozen=True)
class Values:
    """Findings; SQNR in dB by official name where compared; weights and bytes that were read."""

    findings: list[Finding]
    sqnr: Mapping[str, float]
    weights: int
    nbytes: int


NOTHING_READ: Final = Values([], {}, 0, 0)


def look_at_values(model: Model, reference: Model | None) -> Values:
    """Reads scalars and samples, and holds them against the reference's if there is one."""
    total = sum(info.nbytes for info in model.checkpoint)
    small, few = (_SMALL, _FEW) if reference is None else (_SMALL_COMPARED, _FEW_COMPARED)
    chosen = sampled(model, "all" if total <= small else few)
    other = None if reference is None else reference.checkpoint
    swapped: list[Finding] = []
    read = 0

    def results() -> Iterable[Result]:
        nonlocal read
        for unit in units(model, reference, chosen, {}):
            read += len(unit.weights) if unit.whole else 0
            result = check_units(model.checkpoint, other, [unit], _LIMIT)
            if other is not None and _is_swapped(model.checkpoint, other, unit, result):
                swapped.append(_gate_up(unit))
                result.findings = []
            yield result

    result = collect(results(), model.checkpoint.root)
    findings = [
        _as_factor(model, finding, result.sqnr)
        for finding in result.findings
        if not _is_rescaled_cast(model, finding)
    ]
    return Values(findings + swapped, result.sqnr, read, result.nbytes)


def _is_rescaled_cast(model: Model, finding: Finding) -> bool:
    """Whether scales that look like E8M0 by their equal pairs are E4M3 after all.

    A cast from MXFP4 has such pairs too, and one mantissa, by which the codec tells it apart; but
    a second one where scales were clamped at 448 and then got their pair's weight_scale_2. E8M0
    exponents fill consecutive bytes, E4M3 powers of two lie eight apart, with one mantissa or two.
    """
    family = model.families.get(finding.tensor)
    if finding.code != "e8m0-read-as-e4m3" or finding.confidence == "certain":
        return False
    if family is None or family.kind != "nvfp4" or family.scale is None:
        return False
    counts = np.bincount(model.checkpoint.read(family.scale.name), minlength=256)
    beside = (np.roll(counts, 1) > 0) | (np.roll(counts, -1) > 0)
    mantissas = np.unique(np.flatnonzero(counts) % 8)
    return bool(2 * counts[beside].sum() < counts.sum() and len(mantissas) <= 2)


def _as_factor(model: Model, finding: Finding, sqnr: Mapping[str, float]) -> Finding:
    """A factor of four is a wrong bias of E8M0 only where scales are E8M0, written two too low.

    sqnr: in dB against the reference by official name. Values four times too large have an error
    above the signal, a quarter of them one below it.
    """
    if finding.code != "e8m0-bias":
        return finding
    entry, family = model.schema.find(finding.tensor, model.scheme), model.families[finding.tensor]
    assert entry is not None  # it was compared with the reference's by this entry
    too_large = sqnr[entry.name()] < 0
    if family.scale is not None and family.scale.dtype == "F8_E8M0" and not too_large:
        return finding
    scaled = "the weight" if family.scale is None else "its scales"
    if family.global_scale is not None:
        scaled = "its weight_scale_2"
    return replace(
        finding,
        code="constant-factor",
        found=f"all values {'four times' if too_large else 'a quarter of'} the reference's, "
        f"{finding.found}",
        fix=f"{'Divide' if too_large else 'Multiply'} {scaled} by 4, or export again: a scale was "
        "applied twice, not at all, or is another weight's.",
    )


def _is_swapped(source: Checkpoint, reference: Checkpoint, unit: Unit, result: Result) -> bool:
    """Whether w1 is the reference's w3 and the other way round."""
    if len(unit.weights) != 2 or not unit.whole or not result.findings:
        return False
    first, second = unit.weights
    if not first.name.endswith(".w1.weight"):
        return False
    if first.family.shape != second.family.shape:
        return False
    crossed = (
        replace(first, reference=second.reference),
        replace(second, reference=first.reference),
    )
    for weight in crossed:
        if weight.reference is None:
            return False
        if same_cast(source, reference, weight):
            continue
        if compare(source, reference, weight, ()).finding is not None:
            return False
    return True


def _gate_up(unit: Unit) -> Finding:
    first, second = (weight.family.weight for weight in unit.weights)
    return Finding(
        "gate-up-swapped",
        shown(first.name),
        shown(first.file),
        f"the reference's w3 (up), and {shown(second.name)} its w1 (gate)",
        "w1 is gate, w3 is up",
        "Exchange the two names, or export again.",
    )
