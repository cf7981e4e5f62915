"""``vllm-dsv4 prepare``: a full-NVFP4 checkpoint to one that vLLM serves without the plugin."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from nvfp4_codec.cli_output import progress, say

from .common import OK, add_command, show_json, show_table

if TYPE_CHECKING:
    from ..prepare import PrepareReport
    from .common import Commands


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "prepare",
        "write a checkpoint that vLLM serves without the plugin: NVFP4 experts, FP8 for the rest",
    )
    parser.add_argument("input", type=Path, help="a checkpoint folder")
    parser.add_argument("output", type=Path, help="a new folder")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    parser.add_argument(
        "--allow-suspected",
        action="store_true",
        help="convert weights that the doctor suspects too; afterwards it no longer sees why",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Writes the checkpoint; shows what became of it."""
    from ..prepare import prepare_checkpoint

    files = [path for path in arguments.input.glob("*.safetensors") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    with progress("prepare", size) as advance:
        report = prepare_checkpoint(
            arguments.input,
            arguments.output,
            resume=arguments.resume,
            allow_suspected=arguments.allow_suspected,
            advance=advance,
        )
    if arguments.json:
        show_json(_document(report))
    else:
        _show(report)
    return OK


def _document(report: PrepareReport) -> dict[str, object]:
    outcome = report.outcome
    return {
        "linears": [
            {"role": role, "stored": own, "written": out, "count": count}
            for (role, own, out), count in sorted(report.linears.items())
        ],
        "bytes": outcome.nbytes,
        "written": list(outcome.written),
        "kept": list(outcome.kept),
        "complete_unchecked": outcome.complete_unchecked,
        "requantized": {module: dict(cost) for module, cost in report.requantized.items()},
        "unified": dict(report.unified),
        "unknown": list(report.unknown),
    }


def _show(report: PrepareReport) -> None:
    outcome = report.outcome
    rows = [
        [role, own, out, f"{count:,}"] for (role, own, out), count in sorted(report.linears.items())
    ]
    show_table(["linears", "stored as", "written as", "number"], rows, left=3)
    say(f"{len(outcome.written)} files written, {len(outcome.kept)} kept from before")
    if report.requantized:
        worst = min(report.requantized.values(), key=lambda cost: cost["sqnr_db"])
        say(
            f"{len(report.requantized)} linears rounded once more, at {worst['sqnr_db']:.1f} dB "
            "or better"
        )
    if report.unified:
        blocks = sum(report.unified.values())
        say(
            f"{len(report.unified)} expert matrices got the scale that they share: {blocks} blocks "
            "rounded"
        )
    if report.unknown:
        say(f"{len(report.unknown)} tensors left out that the model does not have")
