"""``megamoe verify``: correct on this GPU? how fast? One file to send back."""

from __future__ import annotations

import argparse
import errno
from pathlib import Path
from typing import TYPE_CHECKING

from nvfp4_codec.cli_frame import FINDINGS, OK, add_command
from nvfp4_codec.cli_output import say, say_json, show_table

if TYPE_CHECKING:
    from nvfp4_codec.cli_frame import Commands

    from ..verify.report import Report


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands, "verify", "compare the kernels with the reference on this GPU and time them"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("megamoe-verify.json"),
        help="the report to send back (default: megamoe-verify.json)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny layers only, and no timings: half a minute"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        help="GPUs of this host to run as expert-parallel ranks too (default: 1, none beside it)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 if a result is wrong, 2 without a GPU that there are kernels for."""
    # Before minutes of work, not after.
    if not arguments.out.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(arguments.out.parent))
    if arguments.out.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder", str(arguments.out))
    from ..buffer_sizes import check_num_ranks
    from ..verify.run import run_all

    check_num_ranks(arguments.ranks)
    report = run_all(quick=arguments.quick, num_ranks=arguments.ranks)
    report.write(arguments.out)
    if arguments.json:
        say_json(report.as_json())
    else:
        _show(report)
        say(f"report: {arguments.out}; it names the GPU and versions, no host, user or folder")
    return OK if report.passed else FINDINGS


def _show(report: Report) -> None:
    machine = report.machine
    title = f"{machine['gpu']}, {machine['target']}, torch {machine['torch']}"
    rows = [
        [
            finding.check,
            finding.case,
            finding.status,
            "" if finding.error is None else f"{finding.error:.3g}",
            "" if finding.bound is None else f"{finding.bound:.3g}",
        ]
        for finding in report.findings
    ]
    show_table(["check", "case", "", "error", "allowed"], rows, left=3, title=title)
    for finding in report.findings:
        if finding.note:
            say(f"{finding.check}, {finding.case}: {finding.note}")
    if report.timings:
        rows = [
            [
                timing.what,
                timing.case,
                f"{timing.microseconds:.1f}",
                f"{timing.spread:.0%}",
                f"{timing.gigabytes_per_second:,.0f}",
            ]
            for timing in report.timings
        ]
        show_table(["time", "case", "us", "spread", "GB/s"], rows, left=2)
    say("passed" if report.passed else "FAILED: please send the report")
