"""The ``dsv4-quantize`` command. Exit codes: 0 fine, 1 findings, 2 bad input.

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

#: In the order in which a checkpoint passes through them.
COMMANDS = ("dequant", "calibrate", "export", "finalize", "validate", "patches", "demo")
#: Spellings that scripts written for other tools use.
ALIASES = {"--export-only": "export", "--validate-only": "validate"}


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    description = "DeepSeek-V4 to NVFP4."
    return command_parser(PROGRAM, description, __version__, __name__, COMMANDS)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Errors become one message, not a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in ALIASES:
        words[0] = ALIASES[words[0]]
    return run_command(PROGRAM, build_parser, words, errors=DSV4Error)


if __name__ == "__main__":
    sys.exit(main())
