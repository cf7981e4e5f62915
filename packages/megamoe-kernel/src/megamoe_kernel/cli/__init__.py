"""The ``megamoe`` command. Exit codes: 0 fine, 1 findings, 2 bad input or no GPU.

One file per command; each registers its parser here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

from nvfp4_codec.cli_frame import run_command

from .. import __version__
from ..errors import MegaMoEError

PROGRAM = "megamoe"
#: In the order in which somebody needs them.
COMMANDS = ("buffer", "precompile", "verify")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="NVFP4 mixture-of-experts kernels.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        import_module(f".{name}", __package__).register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Errors become one message, not a traceback."""
    return run_command(PROGRAM, build_parser, argv, errors=MegaMoEError)
