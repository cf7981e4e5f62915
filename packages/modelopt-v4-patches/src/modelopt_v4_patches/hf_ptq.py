"""Drives the hf_ptq.py of a Model-Optimizer checkout, and takes the snapshot before its export.

The script is run, not imitated: its own ``__main__`` block is executed in its own module, so all
conversions between parse_args and main happen as in that release. Three functions are hooked:

parse_args        its result is checked, and skip_generate forced
load_model        the model is watched from here on (capture.Recorder)
export_quantized  the snapshot is written; the script ends, or goes on to modelopt's own export

This executes code of that checkout. `check_script` reads it first, without executing anything.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .calibrate import CalibrationOptions, CalibrationReport, check_fits, check_output, finish
from .calibration.bf16_source import check_source
from .calibration.capture import Facts, Recorder
from .calibration.checkout import Script, check_release, check_script, refuse_arguments
from .calibration.samples import dataset_name
from .errors import CalibrationError

logger = logging.getLogger(__name__)

#: Arguments that break DeepSeek-V4 or a snapshot of it: attribute, the harmless value, why.
_HARMFUL: Final = (
    ("low_memory_mode", False, "weights are compressed while loading and NVFP4 comes out broken"),
    ("use_fsdp2", False, "quantizers find their expert by its weight's place in memory, which "
     "sharding changes"),
    ("cast_mxfp4_to_nvfp4", False, "it wants an MXFP4 source; our export casts exactly"),
    ("auto_quantize_bits", None, "what the search leaves unquantized has no amax"),
    ("sparsity_fmt", "dense", "nothing is calibrated"),
)  # fmt: skip


def calibrate_with_repo(
    repo: Path,
    source: Path,
    output: Path,
    dataset: Path | None,
    options: CalibrationOptions,
    arguments: Sequence[str] = (),
    *,
    modelopt_export: Path | None = None,
    overwrite: bool = False,
) -> CalibrationReport:
    """Runs the checkout's hf_ptq.py on ``source`` and writes its snapshot to the file ``output``.

    dataset: a jsonl file; None leaves the choice to ``arguments`` or to the script, which downloads
    one. arguments: further options of hf_ptq.py; they win over ``options``. modelopt_export: the
    folder for modelopt's own export, which then follows the snapshot.
    Raises CalibrationError for what would break, before anything is executed where that can be
    known; VersionError if the checkout is not of the installed modelopt's release.
    """
    started = time.monotonic()
    script = check_script(repo)
    check_release(script)
    refuse_arguments(arguments)
    if options.layerwise:
        raise CalibrationError("hf_ptq.py takes layerwise calibration from a --recipe; name one.")
    check_output(output, overwrite=overwrite)
    config = check_source(source)
    if "auto_map" in config:
        raise CalibrationError(
            "file config.json: auto_map names code in the checkpoint, which hf_ptq.py "
            "would execute instead of transformers' DeepSeek-V4. Remove it."
        )
    if not _offloads(arguments):
        room = check_fits(source, config, options)
        if room.kind == "cpu" and options.device == "auto":
            raise CalibrationError(
                "hf_ptq.py needs a GPU and there is none. Leave --modelopt-repo out: the library "
                "route runs on the CPU and gives the same snapshot."
            )
    logger.info("executing %s of modelopt %s", script.path, script.release)

    from .registry import apply_patches

    apply_patches()  # before the script imports modelopt's functions by name
    reports: list[CalibrationReport] = []
    with tempfile.TemporaryDirectory() as scratch, _loaded(script) as module:
        run = _Run(module, config, source, output, modelopt_export is not None, started, reports)
        run.hook()
        words = _words(source, dataset, options, str(modelopt_export or scratch))
        words.append("--trust_remote_code")  # it loads no Deepseek* without; see auto_map above
        if options.device == "auto" and not _offloads(arguments):
            words.append("--use_seq_device_map")  # or the memory fraction is ignored
        _execute(script, module, [*words, *arguments])
    if not reports:
        raise CalibrationError(
            f"{script.path} ended without exporting, so there is no snapshot; its output says why."
        )
    return reports[0]


@dataclass(frozen=True)
class _Run:
    """One execution of the script: the hooks and what they share."""

    module: Any
    config: dict[str, Any]
    source: Path
    output: Path
    exports: bool
    started: float
    reports: list[CalibrationReport]

    def hook(self) -> None:
        """Replaces the three functions in the script's module."""
        parse_args, load_model = self.module.parse_args, self.module.load_model
        export_quantized = self.module.export_quantized
        recorders: list[Recorder] = []

        def checked_parse_args() -> argparse.Namespace:
            from .patches.skip_generate import force_skip_generate

            try:
                args: argparse.Namespace = force_skip_generate(parse_args())
            except SystemExit:
                raise CalibrationError(
                    "hf_ptq.py refused its arguments; its own message is above."
                ) from None
            self._check(args)
            return args

        def watched_load_model(args: argparse.Namespace) -> Any:
            loaded = load_model(args)
            recorders.append(Recorder(loaded[0], self._facts(args)))
            return loaded

        def snapshot_then_export(args: argparse.Namespace, *rest: Any, **named: Any) -> None:
            recorder = recorders[0]
            recorder.close()
            report = finish(recorder, self.started)
            report.snapshot.save(self.output)
            logger.info("%s: %d amax", self.output, len(report.snapshot.amax))
            self.reports.append(report)
            if self.exports:
                export_quantized(args, *rest, **named)

        self.module.parse_args = checked_parse_args
        self.module.load_model = watched_load_model
        self.module.export_quantized = snapshot_then_export

    def _check(self, args: argparse.Namespace) -> None:
        if Path(args.pyt_ckpt_path).absolute() != self.source.absolute():
            raise CalibrationError("--pyt_ckpt_path: the source is given to calibrate itself.")
        for name, harmless, why in _HARMFUL:
            if getattr(args, name, harmless) != harmless:
                raise CalibrationError(f"--{name} is refused: {why}.")
        plain = args.qformat.startswith("nvfp4") and "awq" not in args.qformat
        if args.recipe is None and (not plain or "svdquant" in args.qformat):
            raise CalibrationError(
                f"--qformat {args.qformat} is refused: export needs the amax of plain nvfp4."
            )

    def _facts(self, args: argparse.Namespace) -> Facts:
        names = args.dataset if isinstance(args.dataset, list) else [str(args.dataset)]
        return Facts(
            self.config,
            "; ".join(dataset_name(Path(n)) if Path(n).is_file() else n for n in names),
            sum(args.calib_size),
            args.calib_seq,
            args.kv_cache_qformat,
            args.recipe or args.qformat,
        )


def _words(
    source: Path, dataset: Path | None, options: CalibrationOptions, export_path: str
) -> list[str]:
    """Our options in hf_ptq's words; of what is said twice, the last counts there."""
    words = [
        "--pyt_ckpt_path", str(source),
        "--export_path", export_path,
        "--qformat", "nvfp4",
        "--kv_cache_qformat", options.kv_cache,
        "--calib_size", str(options.num_samples),
        "--calib_seq", str(options.sequence_length),
        "--batch_size", str(options.batch_size),
        "--gpu_max_mem_percentage", str(options.memory_fraction),
    ]  # fmt: skip
    if dataset is not None:
        words += ["--dataset", str(dataset)]
    if options.device == "cpu":
        words += ["--device", "cpu"]
    return words


def _offloads(arguments: Sequence[str]) -> bool:
    return any(word.partition("=")[0] == "--offload_folder" for word in arguments)


@contextmanager
def _loaded(script: Script) -> Iterator[Any]:
    """The script as a module, found by its siblings; nothing of it stays imported."""
    folder = str(script.path.parent)
    if "hf_ptq" in sys.modules:
        raise CalibrationError("a module named hf_ptq is already loaded; use a fresh process.")
    before = set(sys.modules)
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("hf_ptq")
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(folder):
                del sys.modules[name]


def _execute(script: Script, module: Any, words: Sequence[str]) -> None:
    code = compile(ast.Module(list(script.block), []), str(script.path), "exec")
    program = sys.argv
    sys.argv = [str(script.path), *words]
    try:
        exec(code, vars(module))
    finally:
        sys.argv = program
