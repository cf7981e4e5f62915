"""``dsv4-quantize dequant``: the official checkpoint to BF16."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .common import OK, add_command, show_json, show_table

if TYPE_CHECKING:
    from .common import Commands


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "dequant",
        "the official mixed checkpoint (FP8, MXFP4) to BF16, which calibration starts from",
        writes=True,
        spreads=True,
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Dequantizes; shows how many weights of each format there were."""
    from ..dequantize import dequantize_checkpoint
    from ..executor import make_executor

    executor = make_executor(arguments.executor, arguments.workers)
    done = dequantize_checkpoint(
        arguments.input, arguments.output, executor=executor, resume=arguments.resume
    )
    outcome = done.outcome
    if arguments.json:
        show_json(
            {
                "weights": dict(done.weights),
                "bytes": outcome.nbytes,
                "written": list(outcome.written),
                "kept": list(outcome.kept),
                "complete_unchecked": outcome.complete_unchecked,
            }
        )
        return OK
    copied = ("bf16", "fp32", "int64")
    rows = [
        [name, str(count), "copied" if name in copied else "BF16"]
        for name, count in sorted(done.weights.items())
    ]
    show_table(["official format", "weights", "now"], rows, left=1)
    show_table(
        ["output", "files written", "files kept", "GB"],
        [
            [
                str(arguments.output),
                str(len(outcome.written)),
                str(len(outcome.kept)),
                f"{outcome.nbytes / 1e9:.2f}",
            ]
        ],
        left=1,
    )
    return OK
