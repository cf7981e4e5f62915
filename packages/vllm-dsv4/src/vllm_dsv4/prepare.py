"""Writes a checkpoint that vLLM serves as it comes: what the plugin does while loading, on disk.

Routed experts stay NVFP4, byte for byte, but for fused pairs whose scales disagree. Everything else
gets its official format: FP8 in 128x128 blocks with E8M0 scales for what DeepSeek has in FP8, BF16
for compressors. Names become official, config.json that of the experts-only layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from nvfp4_codec.checkpoint.header import TensorSpec, shown
from nvfp4_codec.checkpoint.job import Job, Outcome, Step, json_bytes, run
from nvfp4_codec.checkpoint.reader import Checkpoint, TensorInfo
from nvfp4_codec.checkpoint.rewrite import Rewrite, documents
from nvfp4_codec.checkpoint.writer import Advance, Fault, ShardWriter, no_advance, no_fault
from nvfp4_codec.errors import CheckpointError, CodecError
from nvfp4_codec.schemas.deepseek_v4 import Entry, Layout, Schema, fused_with
from nvfp4_codec.schemas.deepseek_v4.encoding import encoding_files
from nvfp4_codec.schemas.deepseek_v4.experts_only import (
    experts_only_block,
    experts_only_layers,
    hf_quant_config,
)

from . import __version__
from .doctor import Diagnosis, examine
from .doctor.catalogue import CATALOGUE
from .errors import StoredError
from .kv_dtype import kv_cache_dtype
from .stored import Format, Stored, list_of_experts, read_stored
from .transform.fused import with_one_scale
from .transform.values import NEEDED, to_bf16, to_fp8
from .weight_map import WeightMap

MANIFEST: Final = "prepare_manifest.json"
_SCALES: Final = ("weight_scale", "weight_scale_2", "input_scale")

Key = tuple[str, Format, Format]


@dataclass(frozen=True)
class PrepareReport:
    """What was written.

    linears: by (role, stored format, written format). requantized: what a second rounding cost, by
    module: sqnr_db and max_relative_error. unified: experts that got their partner's
    weight_scale_2 or input_scale, and how many of their blocks were rounded. unknown: tensors that
    the model does not have, left out.
    """

    outcome: Outcome
    linears: Mapping[Key, int]
    requantized: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    unified: Mapping[str, int] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


def prepare_checkpoint(
    source: Path,
    output: Path,
    *,
    resume: bool = False,
    fault: Fault = no_fault,
    advance: Advance = no_advance,
) -> PrepareReport:
    """Writes the folder ``output``; a killed run is continued with ``resume`` to the same bytes.

    source: a checkpoint with NVFP4 experts, in any scheme of names. One linear is in memory at a
    time. Raises CheckpointError for a source that is incomplete, or in whose weights the doctor
    finds an error, which converting would hide; for an output that exists (unless ``resume``) or
    lies in the input, and a disk without room; StoredError for a source that needs no preparing,
    or cannot be prepared.
    """
    stored = read_stored(source)
    with Checkpoint.open(source) as checkpoint:
        job, linears = make_job(stored, checkpoint)
        _check_weights(source)
        outcome = run(job, output, resume=resume, fault=fault, advance=advance)
    requantized, unified = {}, {}
    for name, note in outcome.notes.items():
        module = name.rpartition(".")[0]
        if "sqnr_db" in note:
            requantized[module] = note
        else:
            unified[module] = note["inexact_blocks"]
    return PrepareReport(outcome, linears, requantized, unified, stored.unknown)


def make_job(stored: Stored, source: Checkpoint) -> tuple[Job, Mapping[Key, int]]:
    """The rewrite, and its linears by role and formats. Raises as `prepare_checkpoint` does."""
    _check(stored)
    plan = _Plan(stored, source)
    files = {**_documents(stored, source, plan.schema), **encoding_files(source.root)}
    job = Job("prepare", {}, source, plan.rewrite.shards(), files, manifest=MANIFEST)
    return job, plan.linears


def _check(stored: Stored) -> None:
    if stored.missing:
        raise CheckpointError(
            f"{len(stored.missing)} tensors are missing. Fetch the checkpoint again; `vllm-dsv4 "
            "doctor` says more.",
            tensor=shown(stored.missing[0]),
        )
    experts = {m: own for m, own in stored.formats.items() if m.endswith(".ffn.experts")}
    if other := sorted(module for module, own in experts.items() if own != "nvfp4"):
        raise StoredError(
            f"{other[0]} are stored as {experts[other[0]]}; prepare keeps NVFP4 experts as they "
            "are and makes none. The official checkpoint is served as it comes; `dsv4-quantize "
            "export` makes one with NVFP4 experts."
        )
    if lacking := sorted(experts.keys() & stored.weight_only):
        raise StoredError(
            f"{lacking[0]} have no input_scale, which vLLM wants of NVFP4 experts. Export the "
            "model again with a calibration of its activations."
        )
    if stored.scheme == "official" and all(
        own == _target(entry)
        for entry in stored.schema.entries()
        if (own := stored.formats.get(_formatted(entry))) is not None
    ):
        raise StoredError(
            "the checkpoint has the layout already that prepare writes: vLLM serves it as it comes."
        )


def _check_weights(source: Path) -> None:
    """Refuses what the doctor finds in weights, but for what this pass puts right."""
    wrong = [found for found in examine(source).findings if _stands(found)]
    if wrong:
        first = wrong[0]
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise CheckpointError(
            f"{first.found}; expected {first.expected} ({first.code}{more}). {first.fix} "
            "`vllm-dsv4 doctor` on this folder says more.",
            file=first.file,
            tensor=first.tensor,
        )


def _stands(found: Diagnosis) -> bool:
    row = CATALOGUE.get(found.code)
    is_handled = row is not None and row.handled != "no"
    return found.level == "error" and found.file.endswith(".safetensors") and not is_handled


def _target(entry: Entry) -> Format:
    """What stock vLLM builds for a linear."""
    if entry.role == "routed_expert":
        return "nvfp4"
    return "fp8_block" if entry.format == "fp8_block" else "bf16"


def _formatted(entry: Entry) -> str:
    return list_of_experts(entry.module()) if entry.role == "routed_expert" else entry.module()


class _Plan:
    """Decides for every tensor of the model, and lists the steps that write the shards."""

    def __init__(self, stored: Stored, source: Checkpoint) -> None:
        # Scales of FP8 are E8M0 in what is written, whatever they were.
        config = replace(stored.schema.config, scale_dtype="F8_E8M0")
        self.schema = Schema(config)
        self.rewrite = Rewrite(source)
        self.linears: Counter[Key] = Counter()
        self._source = source
        self._infos = _official(stored, source)
        for entry in self.schema.entries():
            if entry.template.row.linear:
                own, out = stored.formats[_formatted(entry)], _target(entry)
                self.linears[entry.role, own, out] += 1
                self._linear(entry, own, out)
            else:
                self._copy(entry.name())

    def _linear(self, entry: Entry, own: Format, out: Format) -> None:
        module = entry.module()
        if out == "nvfp4":
            self._expert(module)
        elif own == out == "bf16":
            self._copy(f"{module}.weight")
        elif own == out and self._infos[f"{module}.scale"].dtype == "F8_E8M0":
            self._copy(f"{module}.weight")
            self._copy(f"{module}.scale")
        else:
            layout: Layout = "official" if out == "fp8_block" else "plain"
            specs = [TensorSpec(*spec) for spec in self.schema.stored(entry, layout)]
            self._produce(module, specs, partial(self._convert, module, own, out))

    def _expert(self, module: str) -> None:
        self._copy(f"{module}.weight")
        if len(fused_with(module)) == 1:
            for part in _SCALES:
                self._copy(f"{module}.{part}", scalar=part != "weight_scale")
            return
        infos = [self._infos[f"{module}.{part}"] for part in _SCALES]
        specs = [
            TensorSpec(f"{module}.{part}", info.dtype, info.shape if part == "weight_scale" else ())
            for part, info in zip(_SCALES, infos, strict=True)
        ]
        self._produce(module, specs, partial(self._one_scale, module))

    def _copy(self, name: str, *, scalar: bool = False) -> None:
        info = self._infos[name]
        shape = () if scalar else info.shape
        self.rewrite.copy(info, TensorSpec(name, info.dtype, shape), info.file)

    def _produce(self, module: str, specs: list[TensorSpec], step: Step) -> None:
        info = self._infos[f"{module}.weight"]
        self.rewrite.produce(info.file, specs, _located(step, info), info.offset)

    def _tensor(self, name: str) -> Tensor:
        return self._source.tensor(self._infos[name].name)

    def _convert(self, module: str, own: Format, out: Format, writer: ShardWriter) -> None:
        parts = {part: self._tensor(f"{module}.{part}") for part in NEEDED[own]}
        report = None
        if out == "fp8_block":
            made, report = to_fp8(parts, own, e8m0=True)
        else:
            made = to_bf16(parts, own)
        for part, tensor in made.items():
            writer.write_tensor(f"{module}.{part}", tensor)
        if report is not None and report.inexact_values:
            cost = {"sqnr_db": report.sqnr_db, "max_relative_error": report.max_relative_error}
            writer.note(f"{module}.weight", cost)

    def _one_scale(self, module: str, writer: ShardWriter) -> None:
        """An expert's w1 or w3 with the weight_scale_2 and input_scale that it shares."""
        pair = fused_with(module)
        scales = {
            one: {part: self._tensor(f"{one}.{part}").reshape(()) for part in _SCALES[1:]}
            for one in pair
        }
        first, second = scales.values()
        if all(bool(first[part] == second[part]) for part in _SCALES[1:]):
            for part in _SCALES:
                info = self._infos[f"{module}.{part}"]
                writer.copy(f"{module}.{part}", self._source, info)
            return
        for one in pair:
            scales[one]["weight_scale"] = self._tensor(f"{one}.weight_scale")
        codes = {module: self._tensor(f"{module}.weight")}
        made, report = with_one_scale(scales, codes)
        for part in _SCALES:
            writer.write_tensor(f"{module}.{part}", made[module][part])
        inexact = report[pair.index(module)].inexact_blocks if report else 0
        writer.note(f"{module}.weight_scale", {"inexact_blocks": inexact})


def _official(stored: Stored, source: Checkpoint) -> dict[str, TensorInfo]:
    """The tensors by official name; unknown ones are not among them."""
    places, doubled = WeightMap(stored.schema, stored.scheme), frozenset(stored.unknown)
    found = {}
    for name, info in source.tensors.items():
        placed = places.place(name)
        if placed is not None and name not in doubled:
            found[placed.name] = info
    return found


def _located(step: Step, info: TensorInfo) -> Step:
    """The step with errors of the numeric code placed at its tensor and file."""

    def work(writer: ShardWriter) -> None:
        try:
            step(writer)
        except CheckpointError:
            raise
        except CodecError as error:
            raise CheckpointError(
                f"{error}. The checkpoint is damaged here.",
                file=shown(info.file),
                tensor=shown(info.name),
            ) from None

    return work


def _documents(stored: Stored, source: Checkpoint, schema: Schema) -> dict[str, bytes]:
    producer = {"name": "vllm-dsv4", "version": __version__}
    fp8_cache = kv_cache_dtype(stored.config) == "fp8"

    def change(config: dict[str, Any]) -> None:
        config.clear()
        config.update(stored.config)
        config.setdefault("expert_dtype", "fp4")
        if not stored.has_mtp:
            config["num_nextn_predict_layers"] = 0
        config["quantization_config"] = experts_only_block(
            schema, config.get("quantization_config") or {}, producer, fp8_cache=fp8_cache
        )

    found = documents(source, change)
    layers, ignore = experts_only_layers(schema)
    found["hf_quant_config.json"] = json_bytes(
        hf_quant_config(layers, ignore, producer, fp8_cache=fp8_cache)
    )
    return found
