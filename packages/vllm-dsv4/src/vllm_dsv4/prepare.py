"""Writes a checkpoint that vLLM serves as it comes: what the plugin does while loading, on disk.

Routed experts stay NVFP4, byte for byte, but for fused pairs whose scales disagree. Everything else
gets its official format: FP8 in 128x128 blocks with E8M0 scales for what DeepSeek has in FP8, BF16
for compressors. Names become official, config.json that of the experts-only layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nvfp4_codec.checkpoint.header import shown
from nvfp4_codec.checkpoint.job import Job, Outcome, json_bytes, run
from nvfp4_codec.checkpoint.reader import Checkpoint
from nvfp4_codec.checkpoint.rewrite import documents
from nvfp4_codec.checkpoint.writer import Advance, Fault, no_advance, no_fault
from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import Schema
from nvfp4_codec.schemas.deepseek_v4.encoding import encoding_files
from nvfp4_codec.schemas.deepseek_v4.experts_only import (
    experts_only_block,
    experts_only_layers,
    hf_quant_config,
)

from . import __version__
from .doctor import Diagnosis, examine, refuse
from .doctor.catalogue import CATALOGUE
from .errors import StoredError
from .kv_dtype import kv_cache_dtype
from .options import CALIBRATE
from .prepare_plan import Key, PreparePlan, formatted, target
from .stored import Stored, read_stored

MANIFEST: Final = "prepare_manifest.json"


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
    allow_suspected: bool = False,
    fault: Fault = no_fault,
    advance: Advance = no_advance,
) -> PrepareReport:
    """Writes the folder ``output``; a killed run is continued with ``resume`` to the same bytes.

    source: a checkpoint with NVFP4 experts, in any scheme of names. One linear is in memory at a
    time. allow_suspected: also of weights that the doctor only suspects. Raises CheckpointError for
    a source that is incomplete, or in which the doctor finds an error that the output would hide or
    keep, or suspects one in the weights; for an output that exists (unless ``resume``) or lies in
    the input, and a disk without room; StoredError for a source that needs no preparing, or cannot
    be prepared.
    """
    stored = read_stored(source)
    with Checkpoint.open(source) as checkpoint:
        job, linears = make_job(stored, checkpoint)
        standing = [found for found in examine(source, options=None).findings if _stands(found)]
        refuse(source, [found for found in standing if found.level == "error"])
        if not allow_suspected:
            suspected = [found for found in standing if found.level == "suspected"]
            refuse(source, suspected, " Or convert what is suspected: --allow-suspected.")
        with _removed_if_empty(output):
            outcome = run(job, output, resume=resume, fault=fault, advance=advance)
    requantized, unified = {}, {}
    for name, note in outcome.notes.items():
        module = name.rpartition(".")[0]
        if "sqnr_db" in note:
            requantized[module] = note
        else:
            unified[module] = note["inexact_blocks"]
    return PrepareReport(outcome, linears, requantized, unified, stored.unknown)


@contextmanager
def _removed_if_empty(output: Path) -> Iterator[None]:
    """Takes a new folder away again in which an error left nothing, such as for want of room."""
    existed = output.exists()
    try:
        yield
    except BaseException:
        if not existed:
            with suppress(OSError):  # it holds something: an interrupted run
                output.rmdir()
        raise


def make_job(stored: Stored, source: Checkpoint) -> tuple[Job, Mapping[Key, int]]:
    """The rewrite, and its linears by role and formats. Raises as `prepare_checkpoint` does."""
    _check(stored, source)
    plan = PreparePlan(stored, source)
    files = {**_documents(stored, source, plan.schema), **encoding_files(source.root)}
    job = Job("prepare", {}, source, plan.rewrite.shards(), files, manifest=MANIFEST)
    return job, plan.linears


def _check(stored: Stored, source: Checkpoint) -> None:
    if stored.missing:
        raise CheckpointError(
            f"{len(stored.missing)} tensors are missing. Fetch the checkpoint again; `vllm-dsv4 "
            "doctor` says more.",
            file=shown(str(source.root)),
            tensor=shown(stored.missing[0]),
        )
    experts = {m: own for m, own in stored.formats.items() if m.endswith(".ffn.experts")}
    other = sorted(module for module, own in experts.items() if own != "nvfp4")
    if other and all(module.startswith("mtp.") for module in other):
        raise StoredError(
            f"{other[0]} are stored as {experts[other[0]]}: stock vLLM reads MTP experts in the "
            "format of all others, NVFP4, which prepare does not make. Serve this checkpoint with "
            "the plugin, which goes by what is stored, or export it again with `dsv4-quantize "
            "export`, which casts MTP experts too, or leaves MTP blocks out (--mtp drop)."
        )
    if other:
        raise StoredError(
            f"{other[0]} are stored as {experts[other[0]]}; prepare keeps NVFP4 experts as they "
            "are and makes none. The official checkpoint is served as it comes; `dsv4-quantize "
            "export` makes one with NVFP4 experts."
        )
    if lacking := sorted(experts.keys() & stored.weight_only):
        raise StoredError(
            f"{lacking[0]} have no input_scale, which vLLM wants of NVFP4 experts. {CALIBRATE}"
        )
    if stored.scheme == "official" and all(
        own == target(entry)
        for entry in stored.schema.entries()
        if (own := stored.formats.get(formatted(entry))) is not None
    ):
        raise StoredError(
            "the checkpoint has the layout already that prepare writes: vLLM serves it as it comes."
        )


def _stands(found: Diagnosis) -> bool:
    """Whether a fault is in weights or config.json, and is none that this pass puts right."""
    row = CATALOGUE.get(found.code)
    is_handled = row is not None and row.handled != "no"
    return found.file.endswith((".safetensors", "config.json")) and not is_handled


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
