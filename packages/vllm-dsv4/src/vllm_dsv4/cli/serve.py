"""``vllm-dsv4 serve``: prints the ``vllm serve`` line that suits, and becomes it."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nvfp4_codec.cli_output import say

from ..errors import VersionError
from .common import OK, add_command, show_json
from .options import add_options, given_options

if TYPE_CHECKING:
    from .common import Commands

_log = logging.getLogger(__name__)


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands, "serve", "run `vllm serve` with the flags that suit the checkpoint and the GPUs"
    )
    parser.usage = "vllm-dsv4 serve [options] FOLDER [options] [any option of `vllm serve`]"
    parser.add_argument("folder", type=Path, help="a checkpoint folder")
    _add_own(parser)
    rest = parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rest.required = False  # in messages about what is missing
    parser.set_defaults(run=run)


def _add_own(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpus", metavar="KIND:COUNT", help="such as B200:8, of one node (default: those here)"
    )
    parser.add_argument("--nodes", type=int, default=1, help="nodes like this one (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="print the line only")
    parser.add_argument(
        "--skip-doctor",
        action="store_true",
        help="go on where names, shapes or config.json are not those of a sound checkpoint",
    )
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the line and replaces this process by it."""
    from ..gpus import parse_gpus
    from ..serve import serve_command

    rest = _after_the_folder(arguments)
    nodes = arguments.nodes
    gpus = parse_gpus(arguments.gpus, nodes) if arguments.gpus else None
    command = serve_command(
        arguments.folder,
        gpus,
        given_options(arguments),
        rest,
        nodes=nodes,
        skip_doctor=arguments.skip_doctor,
    )
    for note in command.notes:
        _log.info("%s", note)
    if arguments.json:
        show_json(
            {"command": list(command.argv), "line": command.line, "notes": list(command.notes),
             "plan": command.plan.as_json()}
        )  # fmt: skip
    else:
        say(command.line)
    if arguments.dry_run:
        return OK
    sys.stdout.flush()
    os.execv(_vllm(), command.argv)


def _after_the_folder(arguments: argparse.Namespace) -> list[str]:
    """Reads our own options that stand among vLLM's; returns vLLM's."""
    parser = argparse.ArgumentParser(
        prog="vllm-dsv4 serve", add_help=False, allow_abbrev=False, argument_default=None
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--debug", action="store_true")
    _add_own(parser)
    # What was given before the folder stays, unless it is given again.
    parser.set_defaults(**{name: value for name, value in vars(arguments).items()
                           if name not in ("rest", "folder")})  # fmt: skip
    found, rest = parser.parse_known_args(arguments.rest)
    for name, value in vars(found).items():
        setattr(arguments, name, value)
    return rest


def _vllm() -> str:
    """The vllm program of this Python's environment; raises VersionError where there is none."""
    from ..compat import require_tested_version

    try:
        require_tested_version()
    except ModuleNotFoundError:
        raise VersionError("vLLM is not installed here: pip install 'vllm==0.33.*'.") from None
    beside = Path(sys.executable).with_name("vllm")
    program = str(beside) if beside.exists() else shutil.which("vllm")
    if program is None:
        raise VersionError(f"there is no vllm program beside {sys.executable}. Reinstall vLLM.")
    return program
