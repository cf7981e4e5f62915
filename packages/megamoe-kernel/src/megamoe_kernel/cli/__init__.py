"""The ``megamoe`` command. Exit codes: 0 fine, 1 findings, 2 bad input or no GPU.

One file per command; each registers its parser here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from nvfp4_codec.cli_frame import command_parser, run_command

from .. import __version__
from ..errors import MegaMoEError

PROGRAM = "megamoe"
#: In the order in which somebody needs them.
COMMANDS = ("buffer", "precompile", "verify")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    return command_parser(
        PROGRAM, "NVFP4 mixture-of-experts kernels.", __version__, __name__, COMMANDS
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Errors become one message, not a traceback."""
    return run_command(PROGRAM, build_parser, argv, errors=MegaMoEError)
