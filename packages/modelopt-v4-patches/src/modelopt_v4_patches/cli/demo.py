"""``dsv4-quantize demo``: the whole pipeline on a small trained model, and a table in two parts.

``--json``: rows [{name, bytes, expert_error, expert_gain, sqnr {part: dB}, weight_only and
activations {perplexity, difference {value, low, high}, shift}, findings}], against_modelopt {mode:
{perplexity and shift {value, low, high}}}, uncovered, snapshot_findings, tokens, seconds {step: s},
faults. Numbers that are not finite are strings.
"""

from __future__ import annotations

import argparse
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvfp4_codec.cli_output import number, say

from .common import FINDINGS, OK, add_command, fail, show_json, show_table

if TYPE_CHECKING:
    from ..demo import Quality, Result, Row
    from ..quality.intervals import Difference
    from .common import Commands

_ASSET = Path("tests/assets/tiny-dsv4")
_PARTS = ("attn", "shared", "indexer", "wo_a", "compressor")
_NOISY = ("torch", "transformers", "modelopt")


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands, "demo", "run the whole pipeline on a small trained model, and measure the results"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=_ASSET,
        help="small, in the official mixed format, one token per byte (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, help="a new folder that keeps all that is made")
    parser.add_argument(
        "--windows", type=int, default=6, help="of 4,096 held-out tokens (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Shows the table; exit code 1 if a result is not what the pipeline promises."""
    checkpoint, out = arguments.checkpoint, arguments.out
    if not (checkpoint / "config.json").is_file():
        return fail(
            f"{checkpoint} has no config.json: run this in a checkout of the repository, or give "
            "the folder with --checkpoint"
        )
    if out is not None and out.exists():
        return fail(f"{out} exists; --out takes a new folder")
    from .. import demo

    with tempfile.TemporaryDirectory(prefix="dsv4-demo-") as temporary, _quiet(arguments.debug):
        folder = Path(temporary) / "demo" if out is None else out
        result = demo.run_demo(checkpoint, folder, num_windows=arguments.windows)
    faults = demo.faults(result)
    if arguments.json:
        show_json(_document(result, faults))
    else:
        _show(result, faults)
    return FINDINGS if faults else OK


@contextmanager
def _quiet(debug: bool) -> Iterator[None]:
    """Keep torch, transformers and modelopt from talking in between; they do on stdout too."""
    if debug:
        yield
        return
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _show(result: Result, faults: list[str]) -> None:
    # In two parts, each of less than 120 columns: a pipe has no width to fold to.
    of_weights = ("checkpoint", "MB", "expert error", *_PARTS, "findings")
    optional = ("findings", *_PARTS[::-1], "MB")
    show_table(of_weights, [_weight_cells(row) for row in result.rows], left=1, optional=optional)
    say("expert error: ||w - official|| / ||official||; attn to compressor: SQNR likewise, in dB")
    of_quality = (
        *("checkpoint", "perplexity", "change, 95 %", "shift"),
        *("W+A perplexity", "W+A change, 95 %", "W+A shift"),
    )
    rows = [
        [row.name, *_quality_cells(row.weight_only), *_quality_cells(row.activations)]
        for row in result.rows
    ]
    show_table(of_quality, rows, left=1, optional=("shift", "W+A shift"))
    say(
        "change: of perplexity, from the official weights; shift: mean |change of a token's loss|\n"
        "W+A: activations rounded as well, as a Blackwell GPU does (NVFP4 at NVFP4, FP8 at FP8)"
    )
    say("ours at modelopt's coverage minus modelopt's own export:")
    for mode, found in result.against_modelopt.items():
        perplexity, shift = _signed(found.perplexity), _signed(found.shift)
        say(f"  {mode}: perplexity {perplexity}, shift {shift}")
    for row in result.rows:
        if 0.5 < (gain := row.weights.expert_gain) < 0.999:
            say(f"{row.name} makes the experts {1 - gain:.1%} smaller")
    if result.uncovered:
        say(f"quantized in only one of the two exports compared: {', '.join(result.uncovered)}")
    say(f"{result.num_tokens:,} held-out tokens; {sum(result.seconds.values()):.0f} s")
    for fault in faults:
        say(f"FAULT: {fault}")


def _weight_cells(row: Row) -> list[str]:
    error = row.weights.error("experts")
    return [
        row.name,
        f"{row.nbytes / 1e6:.2f}",
        "0" if error == 0 else f"{error:.2%}" if error < 10 else f"{error:.0e}",
        *(f"{row.weights.sqnr[part]:.1f}".replace("inf", "exact") for part in _PARTS),
        "" if row.findings is None else str(row.findings),
    ]


def _quality_cells(quality: Quality) -> tuple[str, str, str]:
    change = quality.difference
    equal = change.value == change.low == change.high == 0
    decimals = 4 if max(abs(change.low), abs(change.high)) < 10 else 1
    interval = f"{change.low:+.{decimals}f} to {change.high:+.{decimals}f}"
    return f"{quality.perplexity:.4f}", "equal" if equal else interval, f"{quality.shift:.4f}"


def _signed(found: Difference) -> str:
    return f"{found.value:+.4f} (95 %: {found.low:+.4f} to {found.high:+.4f})"


def _document(result: Result, faults: list[str]) -> dict[str, Any]:
    return {
        "rows": [
            {
                "name": row.name,
                "bytes": row.nbytes,
                "expert_error": number(row.weights.error("experts")),
                "expert_gain": number(row.weights.expert_gain),
                "sqnr": {part: number(value) for part, value in row.weights.sqnr.items()},
                "weight_only": _quality(row.weight_only),
                "activations": _quality(row.activations),
                "findings": row.findings,
            }
            for row in result.rows
        ],
        "against_modelopt": {
            mode: {"perplexity": _numbers(found.perplexity), "shift": _numbers(found.shift)}
            for mode, found in result.against_modelopt.items()
        },
        "uncovered": list(result.uncovered),
        "snapshot_findings": result.snapshot_findings,
        "tokens": result.num_tokens,
        "seconds": dict(result.seconds),
        "faults": faults,
    }


def _quality(quality: Quality) -> dict[str, Any]:
    return {
        "perplexity": number(quality.perplexity),
        "difference": _numbers(quality.difference),
        "shift": number(quality.shift),
    }


def _numbers(difference: Difference) -> dict[str, float | str]:
    return {key: number(value) for key, value in asdict(difference).items()}
