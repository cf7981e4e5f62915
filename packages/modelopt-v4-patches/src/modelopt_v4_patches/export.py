"""The official checkpoint and a snapshot make the NVFP4 checkpoint: on the CPU, tensor by tensor.

Routed experts keep every nibble and get other scales. What else becomes NVFP4 is dequantized from
its FP8 and quantized with a weight_scale_2 from its own amax, fused projections with a common one.
The rest is copied byte for byte. Names, and the files they lie in, stay the official ones.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from nvfp4_codec.checkpoint.cast import FamilyCaster, check_castable
from nvfp4_codec.checkpoint.families import Family
from nvfp4_codec.checkpoint.header import TensorSpec, shown
from nvfp4_codec.checkpoint.job import Job, Outcome, Step, run
from nvfp4_codec.checkpoint.rewrite import Rewrite
from nvfp4_codec.checkpoint.structure import located
from nvfp4_codec.checkpoint.writer import ShardWriter
from nvfp4_codec.errors import CheckpointError, CodecError
from nvfp4_codec.schemas.deepseek_v4 import Entry, Layout, Parsed, fused_with, parse

from .config import export_documents
from .errors import SnapshotError
from .executor import Executor, spread_with
from .input_scales import InputScale, input_scales
from .official import Official, open_official
from .policy import ExportOptions, check_exact
from .progress import progress
from .snapshot import Snapshot, config_sha256

if TYPE_CHECKING:
    import torch

__all__ = ["ExportOptions", "ExportReport", "export_checkpoint", "make_job"]

MANIFEST: Final = "export_manifest.json"
_FORMATS: Final = {"U8": "NVFP4", "F8_E4M3": "FP8"}  # by the weight's dtype

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stored:
    """One line of the result: tensors of a role in one format, and their bytes, scales included."""

    role: str
    format: str
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    requantized: blocks of routed experts outside the exact window, by module.
    borrowed: the modules whose input_scale is not their own calibration's, and whose it is.
    disagreeing: fused modules whose own scale was smaller than the one they share.
    """

    stored: tuple[Stored, ...]
    outcome: Outcome
    requantized: Mapping[str, int] = field(default_factory=dict)
    borrowed: Mapping[str, str] = field(default_factory=dict)
    disagreeing: tuple[str, ...] = ()


def export_checkpoint(
    source: Path,
    snapshot: Path,
    output: Path,
    options: ExportOptions | None = None,
    *,
    executor: Executor | None = None,
    resume: bool = False,
) -> ExportReport:
    """Writes the NVFP4 checkpoint to the folder ``output``.

    source: the official mixed checkpoint. snapshot: of the same model (see ``Snapshot``).
    executor: who writes the shards; None writes them here, one after the other. A killed run is
    continued with ``resume`` and ends with the same bytes.

    Raises CheckpointError for a source that is not the official checkpoint, an output that exists
    (unless ``resume``) or a disk without room; SnapshotError for a snapshot of another model, or
    one without the input amax of what is to be NVFP4; PolicyError for FP8 experts.
    """
    options = options or ExportOptions()
    if output.suffix == ".safetensors":
        raise CheckpointError(
            "an export is a folder: shards, config.json and tokenizer. Give a folder's name.",
            file=shown(str(output)),
        )
    if options.storage("compressor") == "nvfp4":
        _log.warning(
            "--compressor nvfp4: loaders keep compressors in BF16, and stock vLLM refuses packed "
            "ones; it saves little and costs accuracy."
        )
    make = partial(make_job, source.absolute(), snapshot.absolute(), options)
    job = make()
    spread = None if executor is None else spread_with(executor, make)
    with job.source, progress("export", job.nbytes) as advance:
        outcome = run(job, output, resume=resume, advance=advance, spread=spread)
    return _report(job, outcome)


def make_job(source: Path, snapshot: Path, options: ExportOptions) -> Job:
    """The export as a job, the same in every process that makes it. Raises as the export does."""
    official = open_official(source)
    try:
        check_exact(official.schema.config)
        amax = Snapshot.load(snapshot)
        _check_snapshot(amax, official.config, snapshot)
        plan = _Plan(official, options, amax)
        arguments = {
            **asdict(options),
            "snapshot_sha256": hashlib.sha256(snapshot.read_bytes()).hexdigest(),
        }
        documents = export_documents(official.source, official.schema, options, plan.weight_only)
        shards = plan.rewrite.shards()
        return Job("export", arguments, official.source, shards, documents, manifest=MANIFEST)
    except BaseException:
        official.source.close()
        raise


def _check_snapshot(snapshot: Snapshot, config: Mapping[str, Any], path: Path) -> None:
    found, expected = snapshot.metadata["config_sha256"], config_sha256(config)
    if found != expected:
        raise SnapshotError(
            f"file {shown(path.name)}: taken of a model whose config.json has the SHA-256 "
            f"{found[:12]}..., this one's is {expected[:12]}...: another model. Give the snapshot "
            "of this model, or calibrate it."
        )
    if not snapshot.complete:
        raise SnapshotError(
            f"file {shown(path.name)}: written while a layerwise calibration went on, which did "
            "not finish. Let it finish: `dsv4-quantize calibrate` continues from its checkpoints."
        )


class _Plan:
    """Decides for every tensor, and lists the steps that write the shards."""

    def __init__(self, official: Official, options: ExportOptions, snapshot: Snapshot) -> None:
        self.rewrite = Rewrite(official.source)
        self._source = official.source
        self._schema = official.schema
        self._families = {family.module: family for family, _ in official.families}
        self._caster = FamilyCaster(official.source, "requantize")
        self._joint: dict[str, float] = {}
        layouts = {family.module: options.layout(entry) for family, entry in official.families}
        packed = {f.module: e for f, e in official.families if layouts[f.module] == "nvfp4"}
        # modelopt never quantizes wo_a's input, so no calibration can know it
        optional = [module for module, entry in packed.items() if entry.role == "wo_a"]
        self._scales = input_scales(snapshot, packed.values(), weight_only=optional)
        #: NVFP4 modules without an activation scale.
        self.weight_only = frozenset(packed.keys() - self._scales.keys())
        for family, entry in official.families:
            layout = layouts[family.module]
            if layout is not None:
                self._add(family, entry, layout)

    def _add(self, family: Family, entry: Entry, layout: Layout) -> None:
        if layout == "official":
            self.rewrite.keep(family.members)
            return
        specs = [TensorSpec(*spec) for spec in self._schema.stored(entry, layout)]
        if family.module in self.weight_only:
            specs = specs[:3]
        if layout == "plain":
            step = partial(self._dequantize, family, specs[0])
        elif family.kind == "mxfp4":
            check_castable(family)
            step = partial(self._cast, family, specs)
        else:
            step = partial(self._quantize, family, specs)
        self.rewrite.produce(
            family.weight.file, specs, _located(family, step), family.weight.offset
        )

    def _fused(self, family: Family) -> list[Family]:
        return [self._families[module] for module in fused_with(family.module)]

    def _dequantize(self, family: Family, spec: TensorSpec, writer: ShardWriter) -> None:
        import torch

        from nvfp4_codec.checkpoint.values import load_values

        writer.write_tensor(spec.name, load_values(self._source, family, torch.bfloat16))

    def _cast(self, family: Family, specs: list[TensorSpec], writer: ShardWriter) -> None:
        weight, scale, scale_2, input_scale = specs
        lossy = self._caster.write(writer, family, self._fused(family), (weight, scale, scale_2))
        if lossy:
            writer.note(weight.name, {"requantized_blocks": lossy})
        self._write_input_scale(family, input_scale, writer)

    def _quantize(self, family: Family, specs: list[TensorSpec], writer: ShardWriter) -> None:
        import torch

        from nvfp4_codec import quantize_nvfp4
        from nvfp4_codec.checkpoint.values import load_values

        # BF16 holds e4m3 times a power of two exactly
        values = load_values(self._source, family, torch.bfloat16)
        joint = torch.tensor(self._joint_amax(family, values), dtype=torch.float32)
        packed = quantize_nvfp4(values, weight_scale_2=joint / (6.0 * 448.0))
        assert isinstance(packed.weight_scale_2, torch.Tensor)
        writer.write_tensor(specs[0].name, packed.weight)
        writer.write_tensor(specs[1].name, packed.weight_scale)
        writer.write_tensor(specs[2].name, packed.weight_scale_2)
        for spec in specs[3:]:
            self._write_input_scale(family, spec, writer)

    def _joint_amax(self, family: Family, values: torch.Tensor) -> float:
        """The largest magnitude in the matrix and those fused with it, in whatever shard.

        values: the matrix itself, which is at hand.
        """
        import torch

        from nvfp4_codec.checkpoint.measure import amax
        from nvfp4_codec.checkpoint.values import load_values

        key = fused_with(family.module)[0]
        if key not in self._joint:
            others = (member for member in self._fused(family) if member is not family)
            amaxes = (amax(load_values(self._source, other, torch.bfloat16)) for other in others)
            self._joint[key] = max([amax(values), *amaxes])
        return self._joint[key]

    def _write_input_scale(self, family: Family, spec: TensorSpec, writer: ShardWriter) -> None:
        scale: InputScale = self._scales[family.module]
        writer.write(spec.name, np.float32(scale.value).tobytes())
        if scale.note is not None:
            writer.note(spec.name, scale.note)


def _located(family: Family, step: Step) -> Step:
    """The step with errors of the numeric code placed at the family's tensor and file."""

    def work(writer: ShardWriter) -> None:
        try:
            step(writer)
        except CheckpointError:
            raise
        except CodecError as error:
            raise located(error, family, "The official checkpoint is damaged here.") from None

    return work


def _report(job: Job, outcome: Outcome) -> ExportReport:
    """Adds up the headers of the output and the notes of its shards."""
    specs = [(_parsed(spec.name), spec) for shard in job.shards for spec in shard.specs]
    formats = {
        (parsed.template, parsed.indices): _FORMATS.get(spec.dtype, spec.dtype)
        for parsed, spec in specs
        if parsed.part in ("weight", "")
    }
    tensors: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    for (template, part, indices), spec in specs:
        assert template is not None
        key = (template.row.role, formats[template, indices])
        tensors[key] += part in ("weight", "")
        nbytes[key] += spec.nbytes
    lossy, borrowed, disagreeing = {}, {}, []
    for name, note in outcome.notes.items():
        module, _, part = name.rpartition(".")
        if part == "weight":
            lossy[module] = note["requantized_blocks"]
        elif note["input_scale_from"] == "largest":
            disagreeing.append(module)
        else:
            borrowed[module] = note["input_scale_from"]
    stored = tuple(Stored(*key, tensors[key], nbytes[key]) for key in sorted(tensors))
    return ExportReport(stored, outcome, lossy, borrowed, tuple(disagreeing))


def _parsed(name: str) -> Parsed:
    found = parse(name, "official")
    assert found is not None  # official, and exported under official names
    return found
