"""How this project's commands start and end: exit codes, one-line errors, shared options."""

from __future__ import annotations

import argparse
import io
import logging
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

from .cli_output import printable, reader_left
from .errors import CodecError

if TYPE_CHECKING:
    Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

OK, FINDINGS, BAD_INPUT = 0, 1, 2


def add_command(commands: Commands, name: str, help: str) -> argparse.ArgumentParser:
    """Adds a subcommand with --json and --debug."""
    parser = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    return parser


def command_parser(
    program: str, description: str, version: str, package: str, commands: Sequence[str]
) -> argparse.ArgumentParser:
    """A parser with --version and one subcommand for each module ``package.COMMAND``.

    Such a module's ``register(commands)`` adds its parser.
    """
    parser = argparse.ArgumentParser(prog=program, description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{program} {version}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in commands:
        import_module(f".{name}", package).register(subparsers)
    return parser


def run_command(
    program: str,
    build_parser: Callable[[], argparse.ArgumentParser],
    argv: Sequence[str] | None,
    *,
    errors: type[Exception] = CodecError,
    level: int = logging.INFO,
) -> int:
    """Runs the ``run`` of the parsed subcommand; returns the exit code.

    ``CodecError``, ``errors`` and OSError become one message on standard error, or with --debug a
    traceback. ``level``: the least log level shown.
    """
    arguments = argparse.Namespace(debug=False)
    try:
        _write_anything()
        arguments = build_parser().parse_args(argv)
        logging.basicConfig(format=f"{program}: %(message)s", level=level)
        result: int = arguments.run(arguments)
        return result
    except (CodecError, errors) as error:
        if arguments.debug:
            raise
        return fail(program, str(error))
    except BrokenPipeError:
        return reader_left()
    except OSError as error:
        if arguments.debug:
            raise
        where = f"file {error.filename}: " if error.filename else ""
        return fail(
            program, f"{where}{error.strerror or error}. Check the path and its permissions."
        )
    except KeyboardInterrupt:
        hint = "; --resume continues it" if hasattr(arguments, "resume") else ""
        return fail(program, f"interrupted{hint}")


def fail(program: str, message: str) -> int:
    """One line on standard error; control characters cannot reach the terminal."""
    sys.stderr.write(f"{program}: error: {printable(message)}\n")
    return BAD_INPUT


def _write_anything() -> None:
    """A terminal that knows only ASCII gets escapes; work done is not lost over a character."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
