"""The ``dsv4-quantize`` command. Exit codes: 0 fine, 1 findings, 2 bad input.

One file per command; each registers its parser here. ``common`` has what they share.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib import import_module

from nvfp4_codec.cli_output import reader_left
from nvfp4_codec.errors import CodecError

from .. import __version__
from ..errors import DSV4Error
from .common import BAD_INPUT, fail

#: In the order in which a checkpoint passes through them.
COMMANDS = ("dequant", "calibrate", "export", "finalize", "validate", "patches", "demo")
#: Spellings that scripts written for other tools use.
ALIASES = {"--export-only": "export", "--validate-only": "validate"}


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="dsv4-quantize", description="DeepSeek-V4 to NVFP4.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"dsv4-quantize {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        import_module(f".{name}", __package__).register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Errors become one message, not a traceback."""
    arguments = argparse.Namespace(debug=False)
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in ALIASES:
        words[0] = ALIASES[words[0]]
    try:
        arguments = build_parser().parse_args(words)
        logging.basicConfig(format="dsv4-quantize: %(message)s", level=logging.INFO)
        result: int = arguments.run(arguments)
        return result
    except (CodecError, DSV4Error) as error:
        if arguments.debug:
            raise
        return fail(str(error))
    except BrokenPipeError:
        return reader_left()
    except OSError as error:
        if arguments.debug:
            raise
        where = f"file {error.filename}: " if error.filename else ""
        return fail(f"{where}{error.strerror or error}. Check the path and its permissions.")
    except KeyboardInterrupt:
        hint = "; --resume continues it" if hasattr(arguments, "resume") else ""
        fail(f"interrupted{hint}")
        return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
