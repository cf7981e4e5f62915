"""What the commands share: tables, JSON, and one way to fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvfp4_codec import cli_frame
from nvfp4_codec.cli_frame import BAD_INPUT, FINDINGS, OK, add_command
from nvfp4_codec.cli_output import printable, show_table
from nvfp4_codec.cli_output import say_json as show_json

if TYPE_CHECKING:
    from nvfp4_codec.cli_frame import Commands

__all__ = [
    "BAD_INPUT",
    "FINDINGS",
    "OK",
    "PROGRAM",
    "Commands",
    "add_command",
    "fail",
    "printable",
    "show_json",
    "show_table",
]

PROGRAM = "vllm-dsv4"


def fail(message: str) -> int:
    """One line on standard error; returns the exit code."""
    return cli_frame.fail(PROGRAM, message)
