"""``dsv4-quantize validate``: what is wrong with a checkpoint or a snapshot, by name.

``--json``: kind, findings [{code, tensor, file, found, expected, fix, confidence}], notes, rows
[{role, format, tensors, nbytes, compared, sqnr_min, sqnr_median, findings}] of a checkpoint,
coverage [{role, calibrated, modules, least, largest}] of a snapshot, names {missing, unknown,
duplicate}, bytes_read.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from nvfp4_codec.checkpoint.families import pattern
from nvfp4_codec.cli_output import say

from .common import FINDINGS, OK, add_command, show_json, show_table

if TYPE_CHECKING:
    from ..validate import Finding, Row, Sample, Validation
    from .common import Commands

_SHOWN = 3


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "validate",
        "check an amax snapshot, an export, or any NVFP4 DeepSeek-V4 checkpoint",
        spreads=True,
    )
    parser.add_argument("path", type=Path, help="a checkpoint folder, or a snapshot file")
    parser.add_argument(
        "--against", type=Path, metavar="SOURCE", help="the checkpoint that it was made from"
    )
    parser.add_argument(
        "--sample",
        type=_sample,
        default="auto",
        metavar="auto|all|N",
        help="whose values are read: all of a small checkpoint, else a few weights of each role; "
        "all, and the manifest's hashes as well; N of each role; 0 for headers only",
    )
    parser.set_defaults(run=_run)


def _sample(text: str) -> Sample:
    if text in ("auto", "all"):
        return text  # type: ignore[return-value]
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is none of auto, all and a number")
    return int(text)


def _run(arguments: argparse.Namespace) -> int:
    from ..executor import make_executor
    from ..validate import examine

    made = examine(
        arguments.path,
        against=arguments.against,
        sample=arguments.sample,
        executor=make_executor(arguments.executor, arguments.workers),
    )
    if arguments.json:
        show_json(made.to_json())
    else:
        _show(made)
    return FINDINGS if made.findings else OK


def _show(made: Validation) -> None:
    if made.rows:
        heads = ("role", "format", "tensors", "MB", "compared", "SQNR min", "median", "findings")
        show_table(heads, [_cells(row) for row in made.rows], left=2)
    if made.coverage:
        rows = [
            (c.role, f"{c.calibrated} of {c.modules}", _number(c.least), _number(c.largest))
            for c in made.coverage
        ]
        show_table(("role", "calibrated", "amax from", "to"), rows, left=1)
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in made.findings:
        groups.setdefault((finding.code, pattern(finding.tensor)), []).append(finding)
    for (code, _), members in groups.items():
        first = members[0]
        say(f"{code} ({first.confidence})  {first.file}: {first.tensor}")
        if len(members) > 1:
            others = ", ".join(finding.tensor for finding in members[1 : _SHOWN + 1])
            rest = " ..." if len(members) > _SHOWN + 1 else ""
            say(f"    and       {len(members) - 1} more such: {others}{rest}")
        say(f"    found     {first.found}")
        say(f"    expected  {first.expected}")
        say(f"    fix       {first.fix}")
    for note in made.notes:
        say(f"note: {note}")
    say(f"{len(made.findings)} findings")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.role,
        row.format,
        str(row.tensors),
        f"{row.nbytes / 1e6:.2f}",
        str(row.compared or ""),
        _decibel(row.sqnr_min),
        _decibel(row.sqnr_median),
        str(row.findings or ""),
    )


def _decibel(value: float | None) -> str:
    if value is None:
        return ""
    return "equal" if value == float("inf") else f"{value:.1f} dB"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
