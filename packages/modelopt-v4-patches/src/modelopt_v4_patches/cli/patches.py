"""``dsv4-quantize patches``: what would be patched here, and why."""

from __future__ import annotations

import argparse
import logging
import sys
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

from .common import FINDINGS, OK, add_command, printable, show_json, show_table

if TYPE_CHECKING:
    from .common import Commands

_WIDTH = 80
_LEGEND = (
    "needed: apply_patches() replaces the function; fixed upstream: it stays as it is; not loaded: "
    "only a running hf_ptq.py has it."
)

_log = logging.getLogger(__name__)


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(commands, "patches", "show the patches of modelopt and transformers")
    parser.add_argument(
        "--apply", action="store_true", help="apply them in this process and check that they take"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 if something is not installed or of an unknown version."""
    from ..registry import apply_patches, report_patches

    _log.info("importing modelopt and transformers")
    report = apply_patches() if arguments.apply else report_patches()
    if arguments.json:
        show_json({"patches": [asdict(row) for row in report]})
    else:
        found = [
            f"{row.package.removeprefix('nvidia-')} {row.version or 'is missing'}" for row in report
        ]
        show_table(
            ["patch", "state", "target", "found"],
            [
                [row.patch, row.state, row.target, version]
                for row, version in zip(report, found, strict=True)
            ],
            left=4,
            optional=("found", "target"),
        )
        for row in report:
            line = f"{row.patch}: {printable(row.detail)}"
            sys.stdout.write(textwrap.fill(line, _WIDTH, subsequent_indent="  ") + "\n")
        sys.stdout.write(textwrap.fill(_LEGEND, _WIDTH) + "\n")
    trouble = report.in_state("unknown version") + report.in_state("not installed")
    return FINDINGS if trouble else OK
