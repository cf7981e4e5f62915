"""What the weights hold: scales, and values against the source's, in tasks for any executor.

A unit is what loaders fuse, else one weight. Its scalars (weight_scale_2, input_scale) are always
read; its bytes are where the sample says so. A task opens only the files that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

from ..families import Family
from ..header import shown
from ..reader import Checkpoint
from ..structure import problems
from ..verify import (
    Finding,
    verify_family,
    verify_fused,
    verify_fused_scales,
    verify_global_scale,
)
from .activations import (
    AMAX_STORED,
    check_fused_input_scales,
    check_input_scale,
    input_scale,
)
from .against import Comparison, compare, floor, same_cast
from .names import fused_groups
from .stored import Model, Stored

#: "auto": everything of a small checkpoint, else a few weights of each role; or that many.
Sample: TypeAlias = Literal["auto", "all"] | int

_SMALL: Final = 2 << 30
_FEW: Final = 4
_TASK_BYTES, _TASK_UNITS = 1 << 29, 2048
_ENOUGH_ONES: Final = 8


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight to look at. ``reference``: the source's, and the SQNR in dB that there must be.

    requantized: blocks of 32 that the export says it could not cast exactly.
    """

    name: str
    family: Family
    reference: Family | None = None
    least: float = -math.inf
    requantized: int = 0


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that belong together, and whether their bytes are read."""

    weights: tuple[Weight, ...]
    whole: bool


@dataclass(frozen=True)
class Task:
    """Units, and the files (relative name, path) that hold them and their references."""

    root: Path
    units: tuple[Unit, ...]
    files: tuple[tuple[str, Path], ...]
    reference_root: Path | None = None
    reference_files: tuple[tuple[str, Path], ...] = ()

    def __str__(self) -> str:
        return f"{len(self.units)} weights from {self.units[0].weights[0].name} on"

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that are read as a whole."""
        return sum(w.family.nbytes for unit in self.units if unit.whole for w in unit.weights)


@dataclass
class Result:
    """What a task found; sqnr in dB by official name; bytes whose values were read."""

    findings: list[Finding] = field(default_factory=list)
    sqnr: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0
    input_scales: int = 0
    ones: int = 0

    def add(self, other: Result) -> None:
        """Takes over another task's."""
        self.findings += other.findings
        self.sqnr |= other.sqnr
        self.nbytes += other.nbytes
        self.input_scales += other.input_scales
        self.ones += other.ones


def collect(results: Iterable[Result], root: Path) -> Result:
    """Adds up the results of all tasks; ``root``: the checkpoint's folder."""
    total = Result()
    for result in results:
        total.add(result)
    if total.ones == total.input_scales >= _ENOUGH_ONES:
        total.findings = [f for f in total.findings if f.code != AMAX_STORED]
        total.findings.append(
            Finding(
                "input-scales-all-ones",
                "*.input_scale",
                shown(str(root)),
                f"all {total.input_scales} are exactly 1.0",
                "amax / 2688 of the activations that calibration saw",
                "The real ones were lost: export with the calibration snapshot.",
                "high",
            )
        )
    return total


def sampled(model: Model, sample: Sample) -> set[str]:
    """Official names of the weights whose bytes are read: spread evenly over each kind."""
    if sample == "auto":
        total = sum(info.nbytes for info in model.checkpoint)
        sample = "all" if total <= _SMALL else _FEW
    kinds: dict[tuple[str, bool, str], list[str]] = {}
    for name, stored in model.tensors.items():
        key = (stored.entry.role, stored.entry.in_mtp, stored.format)
        kinds.setdefault(key, []).append(name)
    if sample == "all":
        return set(model.tensors)
    chosen: set[str] = set()
    for names in kinds.values():
        count = min(sample, len(names))
        chosen.update(names[i * len(names) // count] for i in range(count))
    return chosen


def plan(
    model: Model, against: Model | None, chosen: set[str], requantized: Mapping[str, int]
) -> Iterator[Task]:
    """Tasks by file, each of bounded size."""
    by_file: dict[str, list[Unit]] = {}
    for unit in units(model, against, chosen, requantized):
        by_file.setdefault(unit.weights[0].family.weight.file, []).append(unit)
    for of_file in by_file.values():
        batch: list[Unit] = []
        size = 0
        for unit in of_file:
            batch.append(unit)
            size += sum(w.family.nbytes for w in unit.weights) if unit.whole else 0
            if size >= _TASK_BYTES or len(batch) == _TASK_UNITS:
                yield _task(model, against, batch)
                batch, size = [], 0
        if batch:
            yield _task(model, against, batch)


def units(
    model: Model, against: Model | None, chosen: set[str], requantized: Mapping[str, int]
) -> Iterator[Unit]:
    """All weights of which something is read, grouped as loaders fuse them."""
    groups = [tuple(stored.entry.name() for stored in group) for group in fused_groups(model)]
    grouped = {name for group in groups for name in group}
    groups += [(name,) for name in model.tensors if name not in grouped]
    for group in groups:
        weights = []
        for name in group:
            stored = model.tensors[name]
            family = model.families.get(stored.first.name)
            if family is not None and not problems(family):
                other = None if against is None else against.tensors.get(name)
                weights.append(_weight(stored, family, against, other, requantized.get(name, 0)))
        whole = any(weight.name in chosen for weight in weights)
        if whole or any(weight.family.kind == "nvfp4" for weight in weights):
            yield Unit(tuple(weights), whole)


def _weight(
    stored: Stored, family: Family, against: Model | None, other: Stored | None, requantized: int
) -> Weight:
    weight = Weight(stored.entry.name(), family, requantized=requantized)
    if against is None or other is None:
        return weight
    reference = against.families.get(other.first.name)
    if reference is None or problems(reference):
        return weight
    return replace(weight, reference=reference, least=floor(stored, other))


def _task(model: Model, against: Model | None, batch: Sequence[Unit]) -> Task:
    weights = [weight for unit in batch for weight in unit.weights]
    whole = [weight for unit in batch if unit.whole for weight in unit.weights]
    references = [weight.reference for weight in whole if weight.reference is not None]
    files = _files(model.checkpoint, [weight.family for weight in weights])
    if against is None:
        return Task(model.checkpoint.root, tuple(batch), files)
    return Task(
        model.checkpoint.root,
        tuple(batch),
        files,
        against.checkpoint.root,
        _files(against.checkpoint, references),
    )


def _files(checkpoint: Checkpoint, families: Sequence[Family]) -> tuple[tuple[str, Path], ...]:
    files = {info.file for family in families for info in family.members}
    return tuple((file, checkpoint.paths[file].absolute()) for file in sorted(files))


def work(task: Task) -> Result:
    """One task, in any process that sees the files."""
    with ExitStack() as stack:
        source = stack.enter_context(Checkpoint(task.root, dict(task.files)))
        reference = None
        if task.reference_root is not None and task.reference_files:
            files = dict(task.reference_files)
            reference = stack.enter_context(Checkpoint(task.reference_root, files))
        return check_units(source, reference, task.units)


def check_units(
    source: Checkpoint,
    reference: Checkpoint | None,
    units: Iterable[Unit],
    limit: int | None = None,
) -> Result:
    """Looks at units of open checkpoints.

    limit: bytes that are looked at of an FP8 or plain weight; None is all. What is compared with
    the reference is read as a whole in any case.
    """
    result = Result()
    for unit in units:
        _check_unit(source, reference, unit, limit, result)
    return result


def _check_unit(
    source: Checkpoint,
    reference: Checkpoint | None,
    unit: Unit,
    limit: int | None,
    result: Result,
) -> None:
    findings: list[Finding] = []
    compared: list[Comparison] = []
    guess = False
    for weight in unit.weights:
        family = weight.family
        result.nbytes += _bytes_read(weight, limit) if unit.whole else 0
        if unit.whole and reference is not None and same_cast(source, reference, weight):
            # every code and scale is right: nothing is left to guess from statistics
            compared.append(Comparison(shown(family.weight.name), math.inf))
            result.sqnr[weight.name] = math.inf
        elif unit.whole:
            guess = True
            found = verify_family(source, family, limit)
            if reference is not None and weight.reference is not None:
                compared.append(compare(source, reference, weight, found))
                result.sqnr[weight.name] = compared[-1].sqnr_db
            findings += found
        elif family.global_scale is not None:
            findings += verify_global_scale(source, family)
        if (stored := input_scale(source, family)) is not None:
            result.input_scales += 1
            result.ones += stored[1] == 1.0
            findings += check_input_scale(*stored)
    if len(unit.weights) > 1:
        fused = verify_fused if guess else verify_fused_scales
        families = [weight.family for weight in unit.weights]
        findings += fused(source, families, findings)
        findings += check_fused_input_scales(source, families)
    result.findings += _merged(findings, compared)


def _bytes_read(weight: Weight, limit: int | None) -> int:
    family = weight.family
    if weight.reference is not None or limit is None:
        return family.nbytes
    # the codes of a packed weight are not read, or not all of them
    values = 0 if family.kind in ("nvfp4", "mxfp4") else min(family.weight.nbytes, limit)
    return family.nbytes - family.weight.nbytes + values


def _merged(findings: list[Finding], compared: list[Comparison]) -> list[Finding]:
    """One finding per cause: a guess from bytes alone yields to what the source shows."""
    if not compared:
        return findings
    from ..against import Compared, merged

    made = Compared([c.finding for c in compared if c.finding is not None])
    made.fine = {c.tensor for c in compared if c.finding is None and not math.isnan(c.sqnr_db)}
    return merged(findings, made)
