"""Says whether a checkpoint or a snapshot is what it claims, and what is wrong where.

Three looks of growing cost: headers, configs and small files; every scalar scale; the weights,
sampled or all, alone and against the source. What loaders would read wrongly without an error is
a finding like what they would refuse.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from nvfp4_codec.checkpoint.deepseek_v4.folder import check_files
from nvfp4_codec.checkpoint.deepseek_v4.names import (
    check_headers,
    check_names,
    check_packing,
    match,
)
from nvfp4_codec.checkpoint.deepseek_v4.quantization import (
    check_entries,
    check_older,
    check_promises,
)
from nvfp4_codec.checkpoint.deepseek_v4.stored import Model
from nvfp4_codec.checkpoint.deepseek_v4.structure import check_same_model
from nvfp4_codec.checkpoint.deepseek_v4.values import (
    Result,
    Sample,
    collect,
    plan,
    sampled,
    work,
)
from nvfp4_codec.checkpoint.families import natural_key
from nvfp4_codec.checkpoint.header import shown
from nvfp4_codec.checkpoint.rewrite import read_config
from nvfp4_codec.checkpoint.verify import Finding
from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import Entry, Role
from nvfp4_codec.schemas.deepseek_v4.names import TEMPLATES

from .checks.calibration import Coverage, check_snapshot, is_snapshot
from .checks.manifest import Manifest
from .progress import progress

if TYPE_CHECKING:
    from nvfp4_codec.checkpoint.writer import Advance

    from .executor import Executor

__all__ = ["Coverage", "Finding", "Row", "Sample", "Validation", "examine", "validate"]

_MTP: Final = " (mtp)"
#: Stored as NVFP4, these need more than stock vLLM.
_UNUSUAL: Final[dict[Role, str]] = {
    "compressor": "stock vLLM keeps compressors in BF16 and refuses packed ones",
    "wo_a": "stock vLLM loads a packed wo_a and fails at the first token",
}


@dataclass(frozen=True)
class Row:
    """Tensors of one role in one format. SQNR in dB over the compared ones, None if none was."""

    role: str
    format: str
    tensors: int
    nbytes: int
    compared: int
    sqnr_min: float | None
    sqnr_median: float | None
    findings: int

    def to_json(self) -> dict[str, Any]:
        """The fields; a number that is not finite becomes a string."""
        fields = asdict(self)
        for key in ("sqnr_min", "sqnr_median"):
            if fields[key] is not None and not math.isfinite(fields[key]):
                fields[key] = str(fields[key])
        return fields


@dataclass(frozen=True)
class Validation:
    """What was looked at and found.

    notes: what is legal and worth knowing. rows: of a checkpoint; coverage: of a snapshot.
    names: all missing, unknown and duplicate names. nbytes: of weights that were read.
    """

    kind: Literal["checkpoint", "snapshot"]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    coverage: tuple[Coverage, ...] = ()
    names: Mapping[str, tuple[str, ...]] | None = None
    nbytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Stable keys."""
        return {
            "kind": self.kind,
            "findings": [finding.to_json() for finding in self.findings],
            "notes": list(self.notes),
            "rows": [row.to_json() for row in self.rows],
            "coverage": [asdict(row) for row in self.coverage],
            "names": {kind: list(names) for kind, names in (self.names or {}).items()},
            "bytes_read": self.nbytes,
        }


def validate(
    path: str | Path,
    *,
    against: str | Path | None = None,
    sample: Sample = "auto",
    executor: Executor | None = None,
) -> list[Finding]:
    """The findings of ``examine``, which also says what was looked at."""
    return list(examine(path, against=against, sample=sample, executor=executor).findings)


def examine(
    path: str | Path,
    *,
    against: str | Path | None = None,
    sample: Sample = "auto",
    executor: Executor | None = None,
) -> Validation:
    """Looks at a snapshot file or a checkpoint folder, with names in any of the three schemes.

    against: the checkpoint that it was made from. sample: whose values are read: "auto" takes
    everything up to 2 GiB, else a few weights of each role; a number takes that many, and 0 reads
    headers only; "all" also recomputes the manifest's SHA-256. Scalar scales are read in any case
    but 0.

    Raises CheckpointError or SnapshotError for what cannot be read, or is no DeepSeek-V4.
    """
    path, source = Path(path), None if against is None else Path(against)
    if path.exists() and is_snapshot(path):
        config = None if source is None else _config(source)
        calibration = check_snapshot(path, config)
        findings = _sorted(calibration.findings)
        return Validation(
            "snapshot", findings, notes=calibration.notes, coverage=calibration.coverage
        )
    with ExitStack() as stack:
        model = stack.enter_context(Model.open(path))
        other = None if source is None else stack.enter_context(Model.open(source))
        return _checkpoint(model, other, sample, executor)


def _config(source: Path) -> dict[str, Any]:
    config = read_config(source if source.is_dir() else source.parent)
    if config is None:
        raise CheckpointError(
            "has no config.json. Give the folder of the checkpoint that was calibrated.",
            file=shown(str(source)),
        )
    return config


def _checkpoint(
    model: Model, source: Model | None, sample: Sample, executor: Executor | None
) -> Validation:
    findings = list(model.findings)
    packing = check_packing(model)
    findings += [finding for found in packing.values() for finding in found]
    report = match(model)
    findings += check_names(model, packing, report) + check_headers(model, packing)
    findings += check_promises(model) + check_older(model)
    of_entries, notes = check_entries(model)
    findings += of_entries
    findings += check_files(model.checkpoint, None if source is None else source.checkpoint)
    if source is not None:
        findings += check_same_model(model.config, source.config)
    manifest = Manifest.of(model.checkpoint.root)
    if manifest is not None:
        findings += manifest.check(model.checkpoint.root, sample == "all", executor)
    result = Result()
    if sample != 0:
        requantized = {} if manifest is None else manifest.requantized
        result = _values(model, source, sample, requantized, executor)
    findings += result.findings
    names = {
        "missing": report.missing,
        "unknown": report.unknown,
        "duplicate": report.duplicate,
    }
    rows = tuple(_rows(model, result, findings))
    return Validation(
        "checkpoint",
        _sorted(findings),
        (*notes, *_notes(model, source, manifest, result)),
        rows,
        names=names,
        nbytes=result.nbytes,
    )


def _values(
    model: Model,
    source: Model | None,
    sample: Sample,
    requantized: Mapping[str, int],
    executor: Executor | None,
) -> Result:
    tasks = list(plan(model, source, sampled(model, sample), requantized))
    results = map(work, tasks) if executor is None else executor.map(work, tasks)
    with progress("validate", sum(task.nbytes for task in tasks)) as advance:
        return collect(_told(results, advance), model.checkpoint.root)


def _told(results: Iterable[Result], advance: Advance) -> Iterable[Result]:
    for result in results:
        advance(result.nbytes)
        yield result


def _sorted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(dict.fromkeys(findings), key=lambda f: (natural_key(f.tensor), f.code)))


def _rows(model: Model, result: Result, findings: Iterable[Finding]) -> list[Row]:
    faults: Counter[tuple[str, str]] = Counter()
    for finding in findings:
        entry = model.schema.find(finding.tensor, model.scheme)
        if entry is not None:
            stored = model.tensors.get(entry.name())
            faults[_role(entry), "absent" if stored is None else stored.format] += 1
    members: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for name, stored in model.tensors.items():
        members.setdefault((_role(stored.entry), stored.format), []).append((name, stored.nbytes))
    order: dict[str, int] = {
        template.row.role: i for i, template in reversed([*enumerate(TEMPLATES)])
    }
    keys = sorted(
        {*members, *faults},
        key=lambda key: (key[0].endswith(_MTP), order[key[0].removesuffix(_MTP)], key[1]),
    )
    rows = []
    for key in keys:
        found = members.get(key, [])
        sqnr = sorted(result.sqnr[name] for name, _ in found if name in result.sqnr)
        least = (math.nan if any(map(math.isnan, sqnr)) else sqnr[0]) if sqnr else None
        rows.append(
            Row(
                *key,
                len(found),
                sum(nbytes for _, nbytes in found),
                len(sqnr),
                least,
                statistics.median_low(sqnr) if sqnr else None,
                faults[key],
            )
        )
    return rows


def _role(entry: Entry) -> str:
    return entry.role + _MTP if entry.in_mtp else entry.role


def _notes(
    model: Model, source: Model | None, manifest: Manifest | None, result: Result
) -> Iterable[str]:
    packed = Counter(s.entry.role for s in model.tensors.values() if s.layout == "nvfp4")
    for role, why in _UNUSUAL.items():
        if packed[role]:
            yield f"{packed[role]} {role} matrices are NVFP4: {why}"
    rope = model.config.get("rope_parameters")
    if isinstance(rope, dict) and "main" in rope and "rope_scaling" not in model.config:
        yield "rope_parameters is nested as transformers writes it; older readers want it flat"
    if manifest is not None and manifest.borrowed:
        yield f"{len(manifest.borrowed)} matrices have an input_scale that is not their own"
    if manifest is not None and (lossy := manifest.requantized):
        yield f"{sum(lossy.values())} blocks of {len(lossy)} experts could not be cast exactly"
    if source is None:
        yield "nibbles swapped in all weights alike, and a factor common to all, need --against"
    elif absent := len(model.tensors.keys() - source.tensors.keys()):
        yield f"{absent} tensors have no counterpart in the source"
    if result.nbytes:
        total = sum(info.nbytes for info in model.checkpoint)
        yield f"values of {min(1.0, result.nbytes / total):.0%} of the bytes were read"
