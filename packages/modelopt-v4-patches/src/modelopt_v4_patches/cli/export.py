"""``dsv4-quantize export``: the official checkpoint and an amax snapshot to NVFP4."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from nvfp4_codec.cli_output import say

from .common import OK, add_command, show_json, show_table

if TYPE_CHECKING:
    from ..export import ExportReport
    from .common import Commands

_HELP = {
    "attn": "wq_a, wkv, wq_b and wo_b",
    "shared": "the shared experts",
    "indexer": "the indexer's wq_b",
    "wo_a": "wo_a; its NVFP4 has no activation scale",
    "compressor": "the compressors; loaders want bf16",
}
_ORIGINS = {
    "layer": "their layer's maximum",
    "model": "the model's maximum",
    "partner": "the projection that they are fused with",
}


def register(commands: Commands) -> None:
    """Adds the command."""
    from ..policy import RULES, Preset

    parser = add_command(
        commands,
        "export",
        "the official mixed checkpoint and an amax snapshot to NVFP4; no GPU, experts exact",
        writes=True,
        spreads=True,
    )
    parser.add_argument("--snapshot", type=Path, required=True, help="what calibrate left")
    parser.add_argument(
        "--preset",
        choices=get_args(Preset),
        default="full",
        help="experts: routed experts only, loads in stock vLLM; full (default): the linears too",
    )
    for rule in RULES[1:]:
        parser.add_argument(
            f"--{rule.part.replace('_', '-')}",
            choices=rule.choices,
            help=f"{_HELP[rule.part]} (experts: {rule.experts}, full: {rule.full})",
        )
    parser.add_argument("--mtp", choices=("keep", "drop"), default="keep", help="the MTP blocks")
    parser.add_argument(
        "--kv-cache",
        choices=("fp8_cast", "none"),
        default="fp8_cast",
        help="what the config says of the KV cache: FP8 without scales, or nothing",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exports; shows what is stored how, and what is not as calibrated."""
    from ..executor import make_executor
    from ..export import ExportOptions, export_checkpoint
    from ..policy import RULES

    chosen = {rule.part: getattr(arguments, rule.part) for rule in RULES[1:]}
    options = ExportOptions(
        arguments.preset, **chosen, mtp=arguments.mtp, kv_cache=arguments.kv_cache
    )
    report = export_checkpoint(
        arguments.input,
        arguments.snapshot,
        arguments.output,
        options,
        executor=make_executor(arguments.executor, arguments.workers),
        resume=arguments.resume,
    )
    if arguments.json:
        show_json(_document(report))
    else:
        _show(report)
    return OK


def _document(report: ExportReport) -> dict[str, object]:
    outcome = report.outcome
    return {
        "stored": [asdict(row) for row in report.stored],
        "bytes": outcome.nbytes,
        "written": list(outcome.written),
        "kept": list(outcome.kept),
        "complete_unchecked": outcome.complete_unchecked,
        "requantized_blocks": dict(report.requantized),
        "borrowed_input_scales": dict(report.borrowed),
        "disagreeing_input_scales": list(report.disagreeing),
    }


def _show(report: ExportReport) -> None:
    nbytes = sum(row.nbytes for row in report.stored)
    unit, size = ("GB", 1e9) if nbytes > 1e10 else ("MB", 1e6)
    rows = [
        [row.role, row.format, str(row.tensors), f"{row.nbytes / size:.2f}"]
        for row in report.stored
    ]
    total = sum(row.tensors for row in report.stored)
    rows.append(["all", "", str(total), f"{nbytes / size:.2f}"])
    show_table(["role", "stored as", "tensors", unit], rows, left=2)
    outcome = report.outcome
    say(f"{len(outcome.written)} files written, {len(outcome.kept)} kept from before")
    blocks = sum(report.requantized.values())
    say(
        f"routed experts: {blocks} blocks of {len(report.requantized)} tensors requantized"
        if blocks
        else "routed experts: exactly the official values"
    )
    for origin, count in Counter(report.borrowed.values()).items():
        say(f"{count} uncalibrated tensors have the input_scale of {_ORIGINS[origin]}")
    if report.disagreeing:
        say(f"{len(report.disagreeing)} fused tensors have their partner's larger input_scale")
