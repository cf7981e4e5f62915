"""What the commands share: option groups, tables, JSON, and one way to fail."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from nvfp4_codec.cli_output import printable, show_table

if TYPE_CHECKING:
    Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

__all__ = [
    "BAD_INPUT",
    "FINDINGS",
    "OK",
    "add_command",
    "fail",
    "printable",
    "show_json",
    "show_table",
]

OK, FINDINGS, BAD_INPUT = 0, 1, 2


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
    parser = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
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
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    return parser


def show_json(document: dict[str, Any]) -> None:
    """Prints one JSON object; numbers that are not finite must have become strings."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def fail(message: str) -> int:
    """One line on standard error; control characters cannot reach the terminal."""
    sys.stderr.write(f"dsv4-quantize: error: {printable(message)}\n")
    return BAD_INPUT
