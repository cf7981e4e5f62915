"""The ``nvfp4`` command: look at checkpoints, check, quantize, convert and compare them.

Exit codes: 0 fine, 1 findings (``verify``) or differences (``diff``, ``explain``), 2 bad
input. Progress goes to standard error, if that is a terminal. ``--json`` prints one object
on standard output; numbers that are not finite become strings, and these keys are stable:

- inspect: files, bytes, families [{name, format, dtype, shape, count, bytes, scale_range,
  global_scale_range, amax, sqnr_db, problems}]
- verify: findings [{code, tensor, file, found, expected, fix, confidence}], checked {format:
  count}, needs_reference [what cannot be seen without one]
- quantize: tensors [{name, shape, quantized, reason, and if measured in this run amax,
  weight_scale_2, sqnr_db}], input_bytes, output_bytes, written, kept
- convert: to, converted, copied, remarks {weight: text}, output_bytes, written, kept
- both: complete_unchecked (--resume found a complete output, made from whatever input)
- diff: differences [{name, status, a, b, sqnr_db, explanation, members}]; status "values" is a
  decoded weight, whose tensors are its members; explanation is the likely cause
- explain: verdict, sqnr_db, explanations [{name, meaning, fix, detail, sqnr_after_db}], notes
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .cli_frame import run_command


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON object")
    common.add_argument("--debug", action="store_true", help="show a traceback on errors")

    writing = argparse.ArgumentParser(add_help=False)
    writing.add_argument("input", type=Path, help="a .safetensors file or a checkpoint folder")
    writing.add_argument("output", type=Path, help="a new folder, or a new .safetensors file")
    writing.add_argument("--resume", action="store_true", help="continue an interrupted run")
    writing.add_argument(
        "--include", action="append", default=[], metavar="GLOB", help="only these weights"
    )
    writing.add_argument(
        "--exclude", action="append", default=[], metavar="GLOB", help="keep these as they are"
    )

    parser = argparse.ArgumentParser(
        prog="nvfp4", description="NVFP4, MXFP4 and block-FP8 checkpoints.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"nvfp4 {__version__}")
    parser.set_defaults(run=_run)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    inspect = commands.add_parser(
        "inspect", parents=[common], help="formats, shapes, scale ranges, amax, SQNR"
    )
    inspect.add_argument("input", type=Path)
    inspect.add_argument("--reference", type=Path, help="measure SQNR against this checkpoint")
    inspect.add_argument("--each", action="store_true", help="one row per weight")
    inspect.add_argument("--headers-only", action="store_true", help="read no data: instant")
    inspect.add_argument("--plot", type=Path, metavar="OUT.html", help="write one HTML page")

    verify = commands.add_parser("verify", parents=[common], help="find what is wrong, by name")
    verify.add_argument("input", type=Path)
    verify.add_argument("--reference", type=Path, help="the checkpoint it was made from")

    quantize = commands.add_parser(
        "quantize", parents=[common, writing], help="BF16, FP16 or FP32 to NVFP4"
    )
    quantize.add_argument("--profile", default="modelopt", help="whose bytes to reproduce")
    quantize.add_argument("--zero-amax", choices=("error", "one"), default="error")
    quantize.add_argument("--nonfinite", choices=("error", "saturate"), default="error")
    quantize.add_argument(
        "--quant-algo",
        choices=("NVFP4", "W4A16_NVFP4"),
        default="W4A16_NVFP4",
        help="what config.json announces; NVFP4 makes loaders expect activation scales",
    )
    quantize.add_argument("--dry-run", action="store_true", help="print the plan, write nothing")

    convert = commands.add_parser(
        "convert", parents=[common, writing], help="between quantized formats"
    )
    convert.add_argument(
        "--to", required=True, choices=("nvfp4", "compressed-tensors", "bf16", "fp8-block")
    )
    convert.add_argument(
        "--allow-lossy", action="store_true", help="requantize blocks that no exact cast can hold"
    )
    convert.add_argument("--scale-fmt", choices=("fp32", "ue8m0"), default="fp32")

    diff = commands.add_parser("diff", parents=[common], help="two checkpoints, by tensor")
    diff.add_argument("a", type=Path)
    diff.add_argument("b", type=Path)

    explain = commands.add_parser(
        "explain", parents=[common], help="the likely convention error between two weights"
    )
    explain.add_argument("trusted", type=Path)
    explain.add_argument("suspect", type=Path)
    explain.add_argument("tensor", help="name of the weight, or of its module")
    explain.add_argument("--suspect-tensor", help="its name in the suspect, if it differs")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Errors become one message, not a traceback."""
    return run_command("nvfp4", build_parser, argv, level=logging.WARNING)


def _run(arguments: argparse.Namespace) -> int:
    from . import cli_commands  # torch, which `--help` must not wait for

    return cli_commands.COMMANDS[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(main())
