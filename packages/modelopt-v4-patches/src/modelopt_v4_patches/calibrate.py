"""Calibrates a BF16 DeepSeek-V4 with nvidia-modelopt and leaves its amax snapshot.

The library route: `mtq.quantize` with a forward loop over a local jsonl file or a list of texts.
modelopt's own script is driven by ``hf_ptq``.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from nvfp4_codec.checkpoint.header import shown, some_names
from nvfp4_codec.checkpoint.reader import Checkpoint
from nvfp4_codec.checkpoint.writer import write_small
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig

from .calibration.bf16_source import check_source, load_model
from .calibration.capture import Facts, Recorder
from .calibration.memory import Room, check_memory, measure_need, measure_room
from .calibration.samples import read_texts
from .errors import CalibrationError, SnapshotError, VersionError
from .snapshot import Snapshot

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_SNAPSHOT_BYTES: Final = 1 << 24  # DeepSeek-V4-Pro's has 12 MB

#: FP8 with a constant amax for the KV cache: modelopt's preset ``fp8_cast``.
_KV_FP8_CAST: Final = {
    "quantizer_name": "*[kv]_bmm_quantizer",
    "cfg": {"num_bits": (4, 3), "use_constant_amax": True},
}

_COUNTS: Final = {
    "num_samples": "--samples",
    "sequence_length": "--sequence-length",
    "batch_size": "--batch-size",
}


@dataclass(frozen=True)
class CalibrationOptions:
    """How to calibrate; the defaults calibrated the full-size model.

    memory_fraction: of each device's free memory, for weights. layerwise: one decoder layer after
    the other, with a snapshot of the finished ones after each; checkpoint_dir: where modelopt
    keeps its own state to resume a layerwise calibration from.
    """

    num_samples: int = 128
    sequence_length: int = 512
    batch_size: int = 1
    memory_fraction: float = 0.7
    kv_cache: Literal["fp8_cast", "none"] = "fp8_cast"
    device: Literal["auto", "cpu"] = "auto"
    layerwise: bool = False
    checkpoint_dir: Path | None = None
    seed: int = 1234

    def __post_init__(self) -> None:
        for name, flag in _COUNTS.items():
            if (count := getattr(self, name)) < 1:
                raise CalibrationError(f"{name} ({flag}) is {count}; at least 1 is needed.")
        if not 0 < self.memory_fraction < 1:
            raise CalibrationError(
                f"memory_fraction (--memory-fraction) is {self.memory_fraction}; weights may take "
                "a part of the memory, between 0 and 1, and work needs the rest."
            )
        if self.checkpoint_dir is not None and not self.layerwise:
            raise CalibrationError(
                "a checkpoint folder is for layerwise calibration (--layerwise)."
            )


@dataclass(frozen=True)
class CalibrationReport:
    """What a calibration left.

    uncalibrated: enabled quantizers without a usable amax. unseen_experts: official names of
    experts that no token reached; they use the input amax of their layer.
    """

    snapshot: Snapshot
    num_samples: int
    seconds: float
    uncalibrated: tuple[str, ...]
    unseen_experts: tuple[str, ...]


def calibrate(
    source: Path,
    output: Path,
    dataset: Path | Sequence[str],
    options: CalibrationOptions | None = None,
    *,
    overwrite: bool = False,
) -> CalibrationReport:
    """Calibrates the checkpoint in ``source`` and writes its snapshot to the file ``output``.

    dataset: a jsonl file of {"text": ...} or {"messages": [...]}, or texts.
    Raises CalibrationError before loading anything if the source is not BF16, memory does not
    suffice or the dataset is unusable; VersionError for versions that cannot do what is asked.
    """
    options = options or CalibrationOptions()
    earlier = check_output(output, overwrite=overwrite)

    def keep(snapshot: Snapshot) -> None:
        snapshot.save(output)
        logger.info(
            "%s: %d amax%s", output, len(snapshot.amax), "" if snapshot.complete else " so far"
        )

    _, report = calibrate_model(source, dataset, options, keep=keep, earlier=earlier)
    keep(report.snapshot)
    return report


def calibrate_model(
    source: Path,
    dataset: Path | Sequence[str],
    options: CalibrationOptions,
    *,
    keep: Callable[[Snapshot], None] | None = None,
    earlier: Snapshot | None = None,
) -> tuple[torch.nn.Module, CalibrationReport]:
    """Like `calibrate`, but returns the calibrated model as well and writes nothing itself.

    keep: called with the snapshot of the finished layers during a layerwise calibration.
    earlier: the incomplete snapshot of the run that ``checkpoint_dir`` resumes.
    """
    started = time.monotonic()
    config = check_source(source)
    texts, dataset_name = read_texts(dataset, options.num_samples)
    room = check_fits(source, config, options)
    algorithm = _algorithm(options)

    import modelopt.torch.quantization as mtq
    import torch

    from .registry import apply_patches

    apply_patches()
    torch.manual_seed(options.seed)
    model = load_model(source, room)
    batches = _tokenize(source, texts, options, "cuda" if room.kind == "gpu" else "cpu")
    facts = Facts(config, dataset_name, len(texts), options.sequence_length, options.kv_cache)
    recorder = Recorder(model, facts)
    if earlier is not None and options.checkpoint_dir is not None:
        recorder.resume(earlier)

    def forward_loop(module: Any) -> None:
        recorder.find_quantizers()
        if keep is not None and options.layerwise:
            partial = recorder.snapshot(complete=False)
            if partial.amax:
                keep(partial)
        for batch in batches:
            module(input_ids=batch, use_cache=False)

    quant_cfg = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG)
    quant_cfg["algorithm"] = algorithm
    if options.kv_cache == "fp8_cast":
        quant_cfg["quant_cfg"].append(dict(_KV_FP8_CAST))
    try:
        model = mtq.quantize(model, quant_cfg, forward_loop)
    finally:
        recorder.close()
    return model, finish(recorder, started)


def finish(recorder: Recorder, started: float) -> CalibrationReport:
    """Takes the complete snapshot and says aloud what calibration did not reach."""
    snapshot = recorder.snapshot()
    report = CalibrationReport(
        snapshot,
        recorder.facts.num_samples,
        time.monotonic() - started,
        tuple(recorder.uncalibrated()),
        snapshot.unseen_experts,
    )
    for one, many, names in (
        ("quantizer has no usable amax", "quantizers have no usable amax", report.uncalibrated),
        (
            "expert was reached by no token; its layer's amax stands in",
            "experts were reached by no token; their layer's amax stands in",
            report.unseen_experts,
        ),
    ):
        if names:
            what = one if len(names) == 1 else many
            logger.warning("%d %s: %s", len(names), what, some_names(names))
    return report


def check_output(output: Path, *, overwrite: bool) -> Snapshot | None:
    """The incomplete snapshot that is being replaced, if there is one.

    Raises CalibrationError for anything else under that name: hours of work may be in it.
    """
    if not output.parent.is_dir():
        raise CalibrationError(f"file {shown(str(output))}: its folder does not exist. Create it.")
    _check_room(output)
    if not output.exists() or overwrite:
        return None
    try:
        found = Snapshot.load(output)
    except SnapshotError:
        found = None
    if found is None or found.complete:
        what = "no snapshot" if found is None else "a complete snapshot"
        raise CalibrationError(
            f"file {shown(str(output))}: exists and is {what}. Choose another name, or say "
            "--overwrite."
        )
    return found


def _check_room(output: Path) -> None:
    """Writes as much as a snapshot needs and removes it: not after hours is the time to learn."""
    probe = output.with_name(f".{output.name}.probe")
    try:
        write_small(probe, bytes(_SNAPSHOT_BYTES))
    finally:
        probe.unlink(missing_ok=True)


def check_fits(source: Path, config: Mapping[str, Any], options: CalibrationOptions) -> Room:
    """Where the model will lie; CalibrationError, before anything is loaded, if it cannot."""
    room = measure_room(options.device, options.memory_fraction)
    with Checkpoint.open(source) as checkpoint:
        need = measure_need(
            checkpoint,
            ModelConfig.from_dict(config),
            batch_size=options.batch_size,
            sequence_length=options.sequence_length,
            layerwise_samples=options.num_samples if options.layerwise else 0,
        )
    check_memory(need, room, options.memory_fraction)
    return room


def _tokenize(
    source: Path, texts: Sequence[str], options: CalibrationOptions, device: str
) -> list[torch.Tensor]:
    """Batches of token ids [batch, length], each of texts of one length.

    Padding would be calibrated on like text, so there is none: texts are cut to the sequence
    length, and only equally long ones share a batch.
    """
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    rows: dict[int, list[list[int]]] = {}
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=options.sequence_length)["input_ids"]
        rows.setdefault(len(ids), []).append(ids)
    size = options.batch_size
    return [
        torch.tensor(same[start : start + size], device=device)
        for length, same in rows.items()
        if length > 0
        for start in range(0, len(same), size)
    ]


def _algorithm(options: CalibrationOptions) -> Any:
    """modelopt's ``algorithm`` entry: max calibration, layerwise or not."""
    if not options.layerwise:
        return "max"
    found = version("nvidia-modelopt")
    if found.startswith("0.45."):
        raise VersionError(
            f"nvidia-modelopt {found}: its layerwise calibration runs layers on quantized "
            "activations, so amax would differ. Use 0.46.1 or later, or leave --layerwise out."
        )
    layerwise: dict[str, Any] = {"enable": True, "calib_mutates_weights": False}
    if options.checkpoint_dir is not None:
        layerwise["checkpoint_dir"] = str(options.checkpoint_dir)
    return {"method": "max", "layerwise": layerwise}
