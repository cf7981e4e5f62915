"""``dsv4-quantize calibrate``: a BF16 checkpoint and texts to an amax snapshot."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CalibrationError
from .common import OK, add_command, show_json, show_table

if TYPE_CHECKING:
    from ..calibrate import CalibrationOptions, CalibrationReport
    from .common import Commands


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "calibrate",
        "run nvidia-modelopt's calibration on a BF16 checkpoint; leaves its amax snapshot, "
        "from which export can be repeated",
    )
    parser.add_argument("input", type=Path, help="a BF16 checkpoint (dsv4-quantize dequant)")
    parser.add_argument("output", type=Path, help="the snapshot, a .safetensors file")
    parser.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help='a jsonl file: {"text": ...} or {"messages": [{"content": ...}]} in each line',
    )
    parser.add_argument("--samples", type=int, metavar="N", default=128, help="texts (%(default)s)")
    parser.add_argument(
        "--sequence-length",
        type=int,
        metavar="N",
        default=512,
        help="tokens that are kept of each (%(default)s)",
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", default=1, help="texts at once (%(default)s)"
    )
    parser.add_argument(
        "--memory-fraction",
        type=float,
        metavar="F",
        default=0.7,
        help="of each device's free memory, for weights (%(default)s)",
    )
    parser.add_argument(
        "--kv-cache",
        choices=("fp8_cast", "none"),
        default="fp8_cast",
        help="fp8_cast: calibrate with the KV cache cast to FP8, without scales (%(default)s)",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu"), default="auto", help="auto: all GPUs, if there are any"
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        default=1234,
        help="of torch's random numbers (%(default)s); not passed on to hf_ptq.py",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a complete snapshot")
    parser.add_argument(
        "--layerwise",
        action="store_true",
        help="one decoder layer after the other; the snapshot grows with each",
    )
    parser.add_argument(
        "--checkpoint-dir",
        type=Path,
        metavar="FOLDER",
        help="where modelopt keeps what an interrupted --layerwise run continues from",
    )
    script = parser.add_argument_group("modelopt's own script")
    script.add_argument(
        "--modelopt-repo",
        type=Path,
        metavar="FOLDER",
        help="a checkout of Model-Optimizer: EXECUTES its hf_ptq.py, with the options above",
    )
    script.add_argument(
        "--modelopt-export",
        type=Path,
        metavar="FOLDER",
        help="go on to modelopt's own export after the snapshot",
    )
    script.add_argument(
        "--hf-ptq",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="...",
        help="last: everything after it goes to hf_ptq.py as it is",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Calibrates; shows what the snapshot holds and what calibration did not reach."""
    from ..calibrate import CalibrationOptions

    options = CalibrationOptions(
        num_samples=arguments.samples,
        sequence_length=arguments.sequence_length,
        batch_size=arguments.batch_size,
        memory_fraction=arguments.memory_fraction,
        kv_cache=arguments.kv_cache,
        device=arguments.device,
        layerwise=arguments.layerwise,
        checkpoint_dir=arguments.checkpoint_dir,
        seed=arguments.seed,
    )
    with redirect_stdout(sys.stderr):  # modelopt prints as it goes
        report = _calibrate(arguments, options)
    snapshot = report.snapshot
    if arguments.json:
        show_json(
            {
                "snapshot": str(arguments.output),
                "quantizers": len(snapshot.amax),
                "samples": report.num_samples,
                "seconds": round(report.seconds, 1),
                "uncalibrated": list(report.uncalibrated),
                "unseen_experts": list(report.unseen_experts),
            }
        )
        return OK
    show_table(
        ["snapshot", "quantizers", "uncalibrated", "unseen experts", "samples", "seconds", "kB"],
        [
            [
                str(arguments.output),
                str(len(snapshot.amax)),
                str(len(report.uncalibrated)),
                str(len(report.unseen_experts)),
                str(report.num_samples),
                f"{report.seconds:.0f}",
                f"{arguments.output.stat().st_size / 1e3:.0f}",
            ]
        ],
        left=1,
    )
    return OK


def _calibrate(arguments: argparse.Namespace, options: CalibrationOptions) -> CalibrationReport:
    if arguments.modelopt_repo is not None:
        from ..hf_ptq import calibrate_with_repo

        return calibrate_with_repo(
            arguments.modelopt_repo,
            arguments.input,
            arguments.output,
            arguments.dataset,
            options,
            arguments.hf_ptq,
            modelopt_export=arguments.modelopt_export,
            overwrite=arguments.overwrite,
        )
    if arguments.hf_ptq or arguments.modelopt_export is not None:
        raise CalibrationError("--hf-ptq and --modelopt-export go with --modelopt-repo FOLDER.")
    if arguments.dataset is None:
        raise CalibrationError("--dataset FILE.jsonl is missing: what to calibrate on.")
    from ..calibrate import calibrate

    return calibrate(
        arguments.input,
        arguments.output,
        arguments.dataset,
        options,
        overwrite=arguments.overwrite,
    )
