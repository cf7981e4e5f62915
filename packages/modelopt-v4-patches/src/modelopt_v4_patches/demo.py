"""The whole pipeline on one checkpoint, and what each way of storing it costs in quality.

From the official checkpoint: dequantize, calibrate, export in both presets, finalize an export of
modelopt's own, validate each, and measure all of them, with two wrong readings for comparison.

Ours, at modelopt's coverage, is held to be no worse than modelopt's own export in perplexity (the
95 % interval of the difference contains zero or lies below it), to be within a margin at the
interval's other end, and to be closer to the official model token by token.

Perplexity alone does not rank good checkpoints. On MXFP4 values modelopt's rounding makes experts
3.5 % smaller (of 3 times a block's scale it often makes 8/3), and a model that is too sure of
itself, having read its text several times, gains from smaller experts whatever else they lose.
Hence tools/settle_tiny_dsv4.py, which calibrates the trained model once on text of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nvfp4_codec.checkpoint.values import load_values

from .calibrate import CalibrationOptions, calibrate
from .dequantize import dequantize_checkpoint
from .errors import DSV4Error
from .export import ExportOptions, export_checkpoint
from .finalize import finalize_checkpoint
from .quality import text
from .quality.broken import e8m0_as_e4m3, scales_of_one
from .quality.evaluate import Losses, ReadWeight, load_model, perplexity, token_losses
from .quality.fidelity import MTP, Fidelity, compare_weights
from .quality.intervals import Difference, mean_difference, perplexity_difference
from .quality.modelopt_export import modelopt_export
from .validate import examine

_log = logging.getLogger(__name__)

#: What modelopt's default NVFP4 configuration quantizes, as far as our flags reach.
MODELOPT_COVERAGE = ExportOptions(preset="full", wo_a="bf16", compressor="nvfp4")
OFFICIAL, BF16, MODELOPT = "official mixed", "BF16", "modelopt's own export"
FULL, COVERAGE, EXPERTS = OURS = "full", "full, modelopt's coverage", "experts"
BROKEN = "broken: E8M0 read as E4M3", "broken: block scales of one"

#: Ours must not be above modelopt's perplexity by more, at the interval's upper end.
NO_WORSE = 0.005

_SNAPSHOT = "snapshot"
_CONTEXT = 4096  # beyond 2,048 tokens the indexer has to choose
_CALIBRATION_TEXTS = 16
_BROKEN_AT_LEAST = 3  # times the official perplexity; measured: 18 and 36 times


@dataclass(frozen=True)
class Variant:
    """A checkpoint and how its weights are read; ``sound`` False for a deliberate mistake."""

    name: str
    folder: Path
    read: ReadWeight = load_values
    sound: bool = True


@dataclass(frozen=True)
class Quality:
    """Perplexity on the held-out text, and how far that is from the official weight-only one.

    shift: mean of |change of a token's loss| in nats. It sees what a perplexity averages away:
    small errors make some tokens likelier and others less likely.
    """

    perplexity: float
    difference: Difference
    shift: float


@dataclass(frozen=True)
class Row:
    """One line of the table; findings of validate are None where it was not asked."""

    name: str
    nbytes: int
    weights: Fidelity
    weight_only: Quality
    activations: Quality
    findings: int | None


@dataclass(frozen=True)
class Comparison:
    """Ours at modelopt's coverage minus modelopt's own export, in perplexity and shift."""

    perplexity: Difference
    shift: Difference


@dataclass(frozen=True)
class Result:
    """The table, and the comparison with modelopt on the same linears.

    against_modelopt: by "weight-only" and "activations". uncovered: modules of the main model in
    NVFP4 in one of the two only. snapshot_findings: validate's, of the calibration. seconds: by
    step.
    """

    rows: tuple[Row, ...]
    against_modelopt: Mapping[str, Comparison]
    uncovered: tuple[str, ...]
    snapshot_findings: int
    num_tokens: int
    seconds: Mapping[str, float]

    def row(self, name: str) -> Row:
        """The line of that name."""
        return next(row for row in self.rows if row.name == name)


def run_demo(checkpoint: Path, folder: Path, *, num_windows: int = 6, threads: int = 2) -> Result:
    """Run the pipeline on ``checkpoint`` into the new folder ``folder`` and measure the results.

    checkpoint: official mixed format, with a byte-level tokenizer: the text is one token per byte.
    num_windows: of 4,096 tokens each; the broken variants are read on one of them. threads:
    models measured at a time.
    Raises DSV4Error for another tokenizer or too many windows, before anything is written.
    """
    seconds: dict[str, float] = {}
    _check_bytes(checkpoint)
    windows = text.held_out_windows(num_windows, _CONTEXT)
    folder.mkdir(parents=True)
    with _one_thread():
        variants, findings = _make(checkpoint, folder, seconds)
        with _timed("compare weights", seconds):
            weights = {v.name: compare_weights(v.folder, checkpoint, v.read) for v in variants}
        with _timed("measure perplexity", seconds):
            losses = _measure(variants, weights, windows, threads)
    reference = losses[OFFICIAL, False]
    rows = []
    for variant in variants:
        weight_only, activations = (
            _quality(losses[variant.name, mode], reference) for mode in (False, True)
        )
        nbytes = sum(file.stat().st_size for file in variant.folder.glob("*.safetensors"))
        fidelity, count = weights[variant.name], findings.get(variant.name)
        rows.append(Row(variant.name, nbytes, fidelity, weight_only, activations, count))
    against = {
        mode: _compare(losses[COVERAGE, on], losses[MODELOPT, on], reference)
        for mode, on in (("weight-only", False), ("activations", True))
    }
    uncovered = weights[COVERAGE].nvfp4 ^ weights[MODELOPT].nvfp4
    return Result(
        tuple(rows),
        against,
        tuple(sorted(module for module in uncovered if not module.startswith("mtp."))),
        findings[_SNAPSHOT],
        windows[:, 1:].size,
        seconds,
    )


def faults(result: Result) -> list[str]:
    """What the result does not hold of what the pipeline promises, a sentence each."""
    official = result.row(OFFICIAL)
    found = []
    if result.snapshot_findings:
        found.append(f"the snapshot: validate has {result.snapshot_findings} findings")
    for name in OURS:
        row = result.row(name)
        for part in ("experts", MTP):
            if error := row.weights.error(part):
                found.append(f"{name}: {part} differ from the official ones by {error:.3g}")
        if row.findings:
            found.append(f"{name}: validate has {row.findings} findings; run it on --out's folder")
    if result.row(BF16).weights.digest != official.weights.digest:
        found.append("BF16: its weights are not the official ones")
    for row in result.rows:
        limit = _BROKEN_AT_LEAST * official.weight_only.perplexity
        if row.name in BROKEN and not row.weight_only.perplexity > limit:
            found.append(f"{row.name}: a perplexity below {limit:.3g} does not tell it from sound")
    margin = NO_WORSE * official.weight_only.perplexity
    for mode, comparison in result.against_modelopt.items():
        if not comparison.perplexity.low <= 0:
            found.append(f"{COVERAGE}, {mode}: perplexity is worse than modelopt's own export's")
        if not comparison.perplexity.high <= margin:
            found.append(f"{COVERAGE}, {mode}: perplexity may be {NO_WORSE:.1%} above modelopt's")
        if not comparison.shift.high < 0:
            found.append(f"{COVERAGE}, {mode}: not closer to the official model than modelopt's")
    return found


def _check_bytes(checkpoint: Path) -> None:
    from tokenizers import Tokenizer

    sample = "def f(x):\n\treturn x"
    path = checkpoint / "tokenizer.json"
    ids = Tokenizer.from_file(str(path)).encode(sample).ids if path.is_file() else None
    if ids != list(sample.encode()):
        problem = "is missing" if ids is None else "does not make one token of each byte"
        raise DSV4Error(
            f"{path} {problem}: the demo measures models of bytes, such as tests/assets/tiny-dsv4"
        )


def _make(
    checkpoint: Path, folder: Path, seconds: dict[str, float]
) -> tuple[list[Variant], dict[str, int]]:
    """Every checkpoint of the table, and the number of validate's findings for what was made."""
    bf16, snapshot, raw = folder / "bf16", folder / "amax.safetensors", folder / "modelopt-export"
    texts = text.calibration_texts(_CALIBRATION_TEXTS)
    with _timed("dequant", seconds):
        dequantize_checkpoint(checkpoint, bf16)
    # Before calibrate, which patches modelopt: its own export is to be its own.
    with _timed("modelopt's own quantization and export", seconds):
        modelopt_export(bf16, raw, texts, with_mtp=True)
    with _timed("calibrate", seconds):
        calibrate(bf16, snapshot, texts, CalibrationOptions(num_samples=len(texts), device="cpu"))
    made = {
        FULL: ExportOptions(),
        COVERAGE: MODELOPT_COVERAGE,
        EXPERTS: ExportOptions(preset="experts"),
    }
    variants = [Variant(OFFICIAL, checkpoint), Variant(BF16, bf16)]
    with _timed("export", seconds):
        for name, options in made.items():
            target = folder / name.replace(", ", "-").replace(" ", "-").replace("'", "")
            export_checkpoint(checkpoint, snapshot, target, options)
            variants.append(Variant(name, target))
    with _timed("finalize", seconds):
        finalize_checkpoint(raw, folder / "modelopt", reference_config=checkpoint)
        variants.append(Variant(MODELOPT, folder / "modelopt"))
    with _timed("validate", seconds):
        paths = {_SNAPSHOT: snapshot, **{variant.name: variant.folder for variant in variants}}
        findings = {
            name: len(examine(path, against=checkpoint, sample="all").findings)
            for name, path in paths.items()
        }
    full = next(variant.folder for variant in variants if variant.name == FULL)
    variants += [
        Variant(BROKEN[0], checkpoint, e8m0_as_e4m3, sound=False),
        Variant(BROKEN[1], full, scales_of_one, sound=False),
    ]
    return variants, findings


def _measure(
    variants: Sequence[Variant],
    weights: Mapping[str, Fidelity],
    windows: NDArray[np.int64],
    threads: int,
) -> dict[tuple[str, bool], Losses]:
    """Losses by variant and whether activations are quantized; equal models are run once."""
    keys = {}
    for variant in variants:
        fidelity = weights[variant.name]
        for activations in (False, True):
            rounding = variant.name if activations and fidelity.quantized else ""
            keys[variant.name, activations] = (fidelity.digest, rounding)
    tasks = {
        keys[variant.name, activations]: (variant, activations)
        for activations in (True, False)
        for variant in variants
    }

    def run(task: tuple[Variant, bool]) -> Losses:
        variant, activations = task
        model = load_model(variant.folder, activations=activations, read=variant.read)
        return token_losses(model, windows if variant.sound else windows[:1])

    with ThreadPoolExecutor(threads) as pool:
        found = dict(zip(tasks, pool.map(run, tasks.values()), strict=True))
    return {name: found[key] for name, key in keys.items()}


def _quality(losses: Losses, reference: Losses) -> Quality:
    reference = reference[: len(losses)]  # broken variants read fewer windows
    difference = perplexity_difference(losses, reference)
    return Quality(perplexity(losses), difference, float(np.abs(losses - reference).mean()))


def _compare(ours: Losses, theirs: Losses, reference: Losses) -> Comparison:
    shifts = (np.abs(losses - reference) for losses in (ours, theirs))
    return Comparison(perplexity_difference(ours, theirs), mean_difference(*shifts))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute on the calling thread only.

    On a model this small its threads wait for each other, and for whatever else the machine runs;
    whole models side by side use the cores better.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _timed(step: str, seconds: dict[str, float]) -> Iterator[None]:
    _log.info("%s", step)
    started = time.perf_counter()
    yield
    seconds[step] = time.perf_counter() - started
