"""The ``vllm-dsv4`` command. Exit codes: 0 fine, 1 findings, 2 bad input.

One file per command; each registers its parser here. ``common`` has what they share.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from nvfp4_codec.cli_frame import command_parser, run_command

from .. import __version__
from ..errors import DSV4Error
from .common import PROGRAM

#: In the order in which somebody needs them.
COMMANDS = ("doctor", "plan", "serve", "prepare")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    return command_parser(
        PROGRAM, "Serves full-NVFP4 DeepSeek-V4 with vLLM.", __version__, __name__, COMMANDS
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Errors become one message, not a traceback."""
    return run_command(PROGRAM, build_parser, argv, errors=DSV4Error)


if __name__ == "__main__":
    sys.exit(main())
