"""An amax snapshot: usable numbers, names of this model, and how much of it was calibrated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nvfp4_codec.checkpoint.header import shown
from nvfp4_codec.checkpoint.reader import Checkpoint
from nvfp4_codec.checkpoint.verify import Finding
from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig, Role, Schema, to_official

from ..snapshot import FORMAT, Snapshot, config_sha256

#: What export may store as NVFP4, so what needs an input amax; wo_a and compressors do without.
_CALIBRATED: Final[tuple[Role, ...]] = (
    "wq_a", "wq_b", "wkv", "wo_b", "indexer_wq_b", "shared_expert", "routed_expert",
)  # fmt: skip
_QUANTIZER: Final = re.compile(
    r"(?P<module>.+?)(?:\.(?:input|weight|output)_quantizer|\.[qkv]_bmm_quantizer"
    r"|\.(?:gate_up|gate|up|down)_proj_(?:input|weight)_quantizers?(?:\.(?P<expert>[0-9]+))?)"
)
_AGAIN: Final = "Calibrate again."


@dataclass(frozen=True)
class Coverage:
    """Modules of a role whose input was calibrated, and the range of their amax."""

    role: str
    calibrated: int
    modules: int
    least: float | None
    largest: float | None


@dataclass(frozen=True)
class Calibration:
    """What was found in a snapshot."""

    findings: list[Finding]
    coverage: tuple[Coverage, ...]
    notes: tuple[str, ...]


def is_snapshot(path: Path) -> bool:
    """Whether a file says that it is a snapshot. Raises CheckpointError if it cannot be read."""
    if path.is_dir():
        return False
    with Checkpoint.open(path) as file:
        return file.headers[path.name].metadata.get("format") == FORMAT


def check_snapshot(path: Path, config: dict[str, Any] | None) -> Calibration:
    """Everything about a snapshot; ``config``: config.json of the model that it is of.

    Raises SnapshotError for a malformed one.
    """
    snapshot = Snapshot.load(path)
    findings = [*_numbers(snapshot, path.name)]
    if not snapshot.complete:
        findings.append(
            Finding(
                "incomplete",
                "metadata.complete",
                shown(path.name),
                "written while a layerwise calibration went on",
                "one of a calibration that ended",
                "Let it finish: `dsv4-quantize calibrate` continues from its checkpoints.",
            )
        )
    notes = []
    if unseen := len(snapshot.unseen_experts):
        notes.append(f"{unseen} expert{' was' if unseen == 1 else 's were'} never routed to")
    if config is None:
        notes.append("names and coverage need --against with the checkpoint that was calibrated")
        return Calibration(findings, (), tuple(notes))
    if snapshot.metadata["config_sha256"] != config_sha256(config):
        findings.append(
            Finding(
                "other-model",
                "metadata.config_sha256",
                shown(path.name),
                snapshot.metadata["config_sha256"],
                f"{config_sha256(config)}, of the config.json given",
                "Give the snapshot of this model, or calibrate it.",
            )
        )
    schema = Schema(ModelConfig.from_dict(config))
    findings += _names(snapshot, schema, path.name)
    coverage = tuple(_coverage(snapshot, schema))
    for row in coverage:
        if row.role == "routed_expert":
            if row.calibrated < row.modules:
                missing = row.modules - row.calibrated
                notes.append(f"{missing} expert matrices take their layer's maximum at export")
        elif not row.calibrated:
            notes.append(f"{row.role} was not calibrated: only presets without it can be exported")
        elif row.calibrated < row.modules:
            findings.append(_uncalibrated(snapshot, schema, row, path.name))
    return Calibration(findings, coverage, tuple(notes))


def _numbers(snapshot: Snapshot, file: str) -> Iterator[Finding]:
    for name, amax in snapshot.amax.items():
        if amax.numel() != 1:
            yield Finding(
                "amax-not-scalar",
                shown(name),
                shown(file),
                f"shape {list(amax.shape)}",
                "one value for each quantizer",
                "NVFP4 has one activation scale for each module: calibrate with an NVFP4 config.",
            )
        values = amax.flatten()
        bad = int((~(values.isfinite() & (values > 0))).sum())
        if bad:
            yield Finding(
                "bad-amax",
                shown(name),
                shown(file),
                f"{float(values.min()):g}" if values.numel() == 1 else f"{bad} bad values",
                "a positive finite number",
                "No token reached the module, or its output overflowed. Experts take their "
                "layer's maximum at export; calibrate others again.",
            )


def _names(snapshot: Snapshot, schema: Schema, file: str) -> Iterator[Finding]:
    for name in snapshot.amax:
        if not _is_known(name, schema):
            yield Finding(
                "unknown-tensor",
                shown(name),
                shown(file),
                "a quantizer of no module of this model",
                "only modules that config.json gives",
                f"The snapshot is of another model or version. {_AGAIN}",
            )


def _is_known(name: str, schema: Schema) -> bool:
    found = _QUANTIZER.fullmatch(name)
    if found is None:
        return False
    try:
        module = to_official(found["module"], "hf")
    except CheckpointError:
        return False
    if schema.find(module) is not None:
        return True
    # a container: experts as a whole, attention with its KV cache
    leaf = f"{found['expert'] or 0}.w1" if module.endswith(".experts") else "wkv"
    return schema.find(f"{module}.{leaf}") is not None


def _coverage(snapshot: Snapshot, schema: Schema) -> Iterator[Coverage]:
    found: dict[Role, list[float | None]] = {role: [] for role in _CALIBRATED}
    for entry in schema.entries():
        if entry.role in found and not entry.in_mtp:
            found[entry.role].append(snapshot.input_amax(entry.module()))
    for role, amaxes in found.items():
        known = [amax for amax in amaxes if amax is not None]
        limits = (min(known), max(known)) if known else (None, None)
        yield Coverage(role, len(known), len(amaxes), *limits)


def _uncalibrated(snapshot: Snapshot, schema: Schema, row: Coverage, file: str) -> Finding:
    missing = [
        entry.module()
        for entry in schema.entries()
        if entry.role == row.role
        and not entry.in_mtp
        and snapshot.input_amax(entry.module()) is None
    ]
    return Finding(
        "uncalibrated",
        missing[0],
        shown(file),
        f"no usable input amax, as for {len(missing)} of {row.modules} modules of role {row.role}",
        "one: every token passes these layers",
        f"{_AGAIN} Or keep the role in FP8 at export.",
    )
