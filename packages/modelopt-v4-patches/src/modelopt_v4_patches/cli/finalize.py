"""``dsv4-quantize finalize``: official names and a complete config for a modelopt export."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvfp4_codec.cli_output import say

from ..errors import PolicyError
from .common import FINDINGS, OK, add_command, show_json, show_table

if TYPE_CHECKING:
    from ..finalize import Report
    from .common import Commands


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands, "finalize", "give an existing modelopt export official names and a full config"
    )
    parser.add_argument("input", type=Path, help="the folder that modelopt wrote")
    parser.add_argument("output", type=Path, nargs="?", help="a new folder; none with --in-place")
    parser.add_argument(
        "--reference-config",
        "--reference",
        type=Path,
        metavar="PATH",
        help="the official config.json; or the official checkpoint's folder, from which missing "
        "tokenizer files are then copied",
    )
    parser.add_argument(
        "--unify",
        action="store_true",
        help="give fused projections one weight_scale_2, rescaling their block scales",
    )
    parser.add_argument(
        "--flat-rope",
        action="store_true",
        help="also write rope_parameters as one flat dictionary, for older readers",
    )
    parser.add_argument(
        "--in-place",
        action="store_true",
        help="write new headers into INPUT itself, behind a journal; no data moves",
    )
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    parser.add_argument(
        "--undo", action="store_true", help="take back an interrupted --in-place run"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from ..finalize import finalize_checkpoint, undo_in_place

    _check(arguments)
    if arguments.undo:
        undo_in_place(arguments.input)
        if arguments.json:
            show_json({"undone": True})
        else:
            say("undone: the folder is as it was before the interrupted run")
        return OK
    report = finalize_checkpoint(
        arguments.input,
        arguments.output,
        reference_config=arguments.reference_config,
        in_place=arguments.in_place,
        unify=arguments.unify,
        flat_rope=arguments.flat_rope,
        resume=arguments.resume,
    )
    if arguments.json:
        show_json(_document(report))
    else:
        _show(report)
    return FINDINGS if report.findings else OK


def _check(arguments: argparse.Namespace) -> None:
    if arguments.undo and (arguments.output is not None or arguments.reference_config is not None):
        raise PolicyError("--undo takes INPUT only")
    if not arguments.undo and arguments.reference_config is None:
        raise PolicyError(
            "--reference-config is missing: an export has lost keys that only the official "
            "config.json has"
        )
    if not arguments.undo and arguments.in_place == (arguments.output is not None):
        raise PolicyError("give either OUTPUT or --in-place")


def _show(report: Report) -> None:
    config, written = report.config, report.written
    say(f"{report.num_tensors} tensors, {report.renamed} renamed from {report.scheme} names")
    if written is None:
        say("written in place: headers and JSON files only")
    else:
        files = len(written.outcome.written)
        say(f"{files} files written, {written.shared} of them share their data with the source")
    if config.added:
        say(f"added to ignore: {', '.join(config.added)}")
    if config.dropped:
        say(f"dropped from ignore: {', '.join(config.dropped)}")
    if report.copied_documents:
        say(f"copied from the reference: {', '.join(report.copied_documents)}")
    for note in config.notes:
        say(f"note: {note}")
    show_table(_HEADS, [_row(report, kind) for kind in report.groups], left=1)
    for finding in report.findings:
        say(f"finding: {finding}")


_HEADS = ("fused projections", "groups", "differing", "largest ratio", "inexact blocks",
          "vanished", "largest error")  # fmt: skip


def _row(report: Report, kind: str) -> list[str]:
    differing = report.differing.get(kind, ())
    unified = report.written.unified.get(kind) if report.written else None
    ratio = f"{max(group.ratio for group in differing):.4g}" if differing else ""
    cells = [kind, str(report.groups[kind]), str(len(differing)), ratio]
    if unified is None:
        return [*cells, "", "", ""]
    return [
        *cells,
        f"{unified.inexact_blocks} of {unified.blocks}",
        str(unified.vanished_blocks),
        f"{unified.max_relative_error:.3g}",
    ]


def _document(report: Report) -> dict[str, Any]:
    written = report.written
    return {
        "scheme": report.scheme,
        "tensors": report.num_tensors,
        "renamed": report.renamed,
        "mtp": report.has_mtp,
        "in_place": written is None,
        "files_written": len(written.outcome.written) if written else 0,
        "files_sharing_data": written.shared if written else 0,
        "ignore_added": list(report.config.added),
        "ignore_dropped": list(report.config.dropped),
        "copied_from_reference": list(report.copied_documents),
        "notes": list(report.config.notes),
        "fused": {
            kind: {
                "groups": count,
                "differing": len(report.differing.get(kind, ())),
                "largest_ratio": max((g.ratio for g in report.differing.get(kind, ())), default=1),
                "unified": asdict(written.unified[kind])
                if written and kind in written.unified
                else None,
            }
            for kind, count in report.groups.items()
        },
        "findings": list(report.findings),
    }
