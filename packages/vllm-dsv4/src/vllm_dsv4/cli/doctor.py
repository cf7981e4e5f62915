"""``vllm-dsv4 doctor``: what would keep a checkpoint from being served, before a GPU is touched.

``--json``: folder, kind, scheme, serving, healthy, findings [{code, level, evidence, tensor, file,
found, expected, effect, fix, sentence}], open_questions, looked {files, tensors, weights,
weights_read, nbytes, nbytes_read}, seconds. The exit code is 1 for errors and suspicions, not for
what the plugin puts right while loading.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from nvfp4_codec.checkpoint.families import pattern
from nvfp4_codec.cli_output import say

from .common import FINDINGS, OK, add_command, show_json, show_table

if TYPE_CHECKING:
    from ..doctor import Diagnosis, Examination
    from .common import Commands

_MEANING = {
    "error": "serving fails or is wrong",
    "suspected": "statistics, not certain: --reference OFFICIAL decides",
    "handled": "the plugin handles this, or nothing stumbles over it",
}


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands, "doctor", "check a DeepSeek-V4 checkpoint before serving it; no GPU, in seconds"
    )
    parser.add_argument("folder", type=Path, help="a checkpoint folder; nothing in it is changed")
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="OFFICIAL",
        help="the official checkpoint that it was made from: samples are compared by value",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from ..doctor import examine

    made = examine(arguments.folder, arguments.reference)
    if arguments.json:
        show_json(made.to_json())
    else:
        _show(made)
    return OK if made.healthy else FINDINGS


def _show(made: Examination) -> None:
    say(f"{made.folder}: {made.kind}, {made.scheme} names")
    say(f"served by {made.serving}")
    kinds: dict[tuple[str, str, str], list[Diagnosis]] = {}
    codes: dict[tuple[str, str], list[Diagnosis]] = {}
    for found in made.findings:
        kinds.setdefault((found.level, found.code, pattern(found.tensor)), []).append(found)
        codes.setdefault((found.level, found.code), []).append(found)
    if kinds:
        rows = [
            (members[0].tensor, members[0].code, members[0].level, members[0].evidence,
             str(len(members)))
            for members in kinds.values()
        ]  # fmt: skip
        heads = ("first tensor", "finding", "level", "evidence", "times")
        show_table(heads, rows, left=4, optional=("evidence",))
    for members in codes.values():
        first = members[0]
        say(f"{first.code} ({first.level}: {_MEANING[first.level]})")
        more = f", and {len(members) - 1} more" if len(members) > 1 else ""
        say(f"    where     {first.tensor} in {first.file}{more}")
        say(f"    found     {first.found}")
        say(f"    expected  {first.expected}")
        say(f"    effect    {first.effect}")
        say(f"    fix       {first.fix}")
    for question in made.open_questions:
        say(f"not told: {question}")
    looked = made.looked
    say(
        f"looked at {looked.tensors} tensors of {looked.files} files by header and at "
        f"{looked.weights_read} of {looked.weights} weights by value "
        f"({looked.nbytes_read / 1e6:.1f} of {looked.nbytes / 1e6:.1f} MB), "
        f"{made.seconds:.1f} s"
    )
    counts = ", ".join(
        f"{made.count(level)} {level}" for level in ("error", "suspected", "handled")
    )
    say(f"{'healthy' if made.healthy else 'NOT healthy'}: {counts}")
