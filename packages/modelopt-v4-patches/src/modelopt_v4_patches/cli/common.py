"""What the commands share: option groups, tables, JSON, and one way to fail."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from nvfp4_codec import cli_frame
from nvfp4_codec.cli_frame import BAD_INPUT, FINDINGS, OK
from nvfp4_codec.cli_output import printable, show_table
from nvfp4_codec.cli_output import say_json as show_json

if TYPE_CHECKING:
    from nvfp4_codec.cli_frame import Commands

__all__ = [
    "BAD_INPUT",
    "FINDINGS",
    "OK",
    "Commands",
    "add_command",
    "fail",
    "printable",
    "show_json",
    "show_table",
]

PROGRAM = "dsv4-quantize"


def add_command(
    commands: Commands,
    name: str,
    help: str,
    *,
    writes: bool = False,
    spreads: bool = False,
) -> argparse.ArgumentParser:
    """Adds a command with --json and --debug.

    writes: INPUT, OUTPUT and --resume. spreads: --workers and --executor.
    """
    parser = cli_frame.add_command(commands, name, help)
    if writes:
        parser.add_argument("input", type=Path, help="a checkpoint folder")
        parser.add_argument("output", type=Path, help="a new folder")
        parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    if spreads:
        parser.add_argument("--workers", type=int, help="processes (default: one per core)")
        parser.add_argument(
            "--executor",
            choices=("local", "ray"),
            default="local",
            help="ray spreads the same tasks over a cluster (needs the extra [ray])",
        )
    return parser


def fail(message: str) -> int:
    """One line on standard error; returns the exit code."""
    return cli_frame.fail(PROGRAM, message)
