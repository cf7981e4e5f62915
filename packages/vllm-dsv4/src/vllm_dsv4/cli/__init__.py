"""The ``vllm-dsv4`` command. Exit codes: 0 fine, 1 findings, 2 bad input.

One file per command; each registers its parser here. ``common`` has what they share.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from nvfp4_codec.cli_frame import run_command

from .. import __version__
from ..errors import DSV4Error
from .common import PROGRAM

#: In the order in which somebody needs them.
COMMANDS = ("doctor", "plan", "serve", "prepare")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Serves full-NVFP4 DeepSeek-V4 with vLLM.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        import_module(f".{name}", __package__).register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Errors become one message, not a traceback."""
    return run_command(PROGRAM, build_parser, argv, errors=DSV4Error)


if __name__ == "__main__":
    sys.exit(main())
