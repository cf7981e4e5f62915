"""What each ``nvfp4`` command does: call the checkpoint package, show the result."""

from __future__ import annotations

import json
import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .cli import FINDINGS, OK
from .errors import CheckpointError

if TYPE_CHECKING:
    from rich.table import Table

    from .checkpoint import Checkpoint, Family
    from .checkpoint.writer import Advance


def inspect(arguments: Namespace) -> int:
    """``nvfp4 inspect``"""
    from .checkpoint import inspect_checkpoint, summarize
    from .checkpoint.plot import HEADS, cells_of, human, render

    with _opened(arguments.input) as source, _opened(arguments.reference) as reference:
        assert source is not None
        with _progress("inspect", _total(source)) as advance:
            stats = inspect_checkpoint(
                source, reference, headers_only=arguments.headers_only, advance=advance
            )
        rows = summarize(stats, each=arguments.each)
        total = _total(source)
        files = len(source.paths)
    if arguments.plot is not None:
        arguments.plot.write_text(render(rows, arguments.input.name), encoding="utf-8")
    if arguments.json:
        families = [row.to_json() for row in rows]
        return _json({"files": files, "bytes": total, "families": families})
    table = _table(f"{files} file(s), {human(total)}", HEADS, left=3)
    for row in rows:
        table.add_row(*cells_of(row))
    _show(table)
    problems = [problem for row in rows for problem in row.problems]
    for problem in problems:
        _say(f"problem: {problem}")
    if arguments.plot is not None:
        _say(f"wrote {arguments.plot}")
    return OK


def verify(arguments: Namespace) -> int:
    """``nvfp4 verify``"""
    from .checkpoint import find_families, verify_checkpoint

    with _opened(arguments.input) as source, _opened(arguments.reference) as reference:
        assert source is not None
        with _progress("verify", _total(source)) as advance:
            findings = verify_checkpoint(source, reference, advance=advance)
        families = find_families(source.tensors)
    kinds = [family.kind for family in families]
    counts = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    unchecked = (
        []
        if reference is not None
        else ["nibbles swapped in all weights alike", "a factor common to all weights"]
    )
    if arguments.json:
        _json(
            {
                "findings": [finding.to_json() for finding in findings],
                "checked": counts,
                "needs_reference": unchecked,
            }
        )
        return FINDINGS if findings else OK
    for finding in findings:
        _say(f"{finding.code} ({finding.confidence})  {finding.file}: {finding.tensor}")
        _say(f"    found     {finding.found}")
        _say(f"    expected  {finding.expected}")
        _say(f"    fix       {finding.fix}")
    checked = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    _say(f"{len(findings)} findings in {len(families)} weights ({checked})")
    if unchecked:
        _say(f"not visible without --reference: {', '.join(unchecked)}")
    return FINDINGS if findings else OK


def quantize(arguments: Namespace) -> int:
    """``nvfp4 quantize``"""
    from .checkpoint import QuantizeOptions, find_families, quantize_checkpoint
    from .checkpoint.quantize import QuantizeReport, decide, planned_bytes

    options = QuantizeOptions(
        include=tuple(arguments.include),
        exclude=tuple(arguments.exclude),
        profile=arguments.profile,
        zero_amax=arguments.zero_amax,
        nonfinite=arguments.nonfinite,
        quant_algo=arguments.quant_algo,
    )
    started = time.monotonic()
    with _opened(arguments.input) as source:
        assert source is not None
        decisions = decide(find_families(source.tensors), options)
        if arguments.dry_run:
            report = QuantizeReport(decisions, input_bytes=_total(source))
        else:
            with _progress("quantize", planned_bytes(decisions)) as advance:
                report = quantize_checkpoint(
                    source, arguments.output, options, resume=arguments.resume, advance=advance
                )
    return _show_quantized(arguments, report, time.monotonic() - started)


def _show_quantized(arguments: Namespace, report: Any, seconds: float) -> int:
    from .checkpoint.header import shown
    from .checkpoint.plot import human

    outcome = report.outcome
    if arguments.json:
        tensors = [
            {
                "name": d.family.weight.name,
                "shape": list(d.family.shape),
                "quantized": d.quantize,
                "reason": d.reason,
                **{k: _number(v) for k, v in report.measured.get(d.family.weight.name, {}).items()},
            }
            for d in report.decisions
        ]
        return _json({"tensors": tensors, "input_bytes": report.input_bytes, **_written(outcome)})
    heads = ["weight", "shape", "becomes", "amax", "weight_scale_2", "SQNR", "kept because"]
    table = _table("", heads, left=1)
    for decision in report.decisions:
        name = decision.family.weight.name
        measured = report.measured.get(name)
        if measured is None and len(decision.family.shape) < 2 and not decision.quantize:
            continue  # biases and norms would drown the table; --json has them
        table.add_row(
            shown(name),
            "×".join(map(str, decision.family.shape)),
            "NVFP4" if decision.quantize else decision.family.weight.dtype,
            f"{measured['amax']:.4g}" if measured else "",
            f"{measured['weight_scale_2']:.3e}" if measured else "",
            f"{measured['sqnr_db']:.2f} dB" if measured else "",
            decision.reason,
        )
    _show(table)
    chosen = sum(decision.quantize for decision in report.decisions)
    _say(f"{chosen} of {len(report.decisions)} tensors to NVFP4")
    if outcome is not None:
        size = f"{human(report.input_bytes)} -> {human(outcome.nbytes)}" if outcome.nbytes else ""
        _say(f"{size or 'nothing left to do'}, {seconds:.1f} s, {arguments.output}")
        if outcome.kept:
            _say(f"kept {len(outcome.kept)} finished file(s) of the earlier run")
    return OK


def convert(arguments: Namespace) -> int:
    """``nvfp4 convert``"""
    from .checkpoint import ConvertOptions, convert_checkpoint

    options = ConvertOptions(
        to=arguments.to,
        include=tuple(arguments.include),
        exclude=tuple(arguments.exclude),
        allow_lossy=arguments.allow_lossy,
        scale_fmt=arguments.scale_fmt,
    )
    started = time.monotonic()
    with _opened(arguments.input) as source:
        assert source is not None
        with _progress("convert", _total(source)) as advance:
            report = convert_checkpoint(
                source, arguments.output, options, resume=arguments.resume, advance=advance
            )
    outcome = report.outcome
    assert outcome is not None
    if arguments.json:
        return _json(
            {
                "to": arguments.to,
                "converted": [family.weight.name for family in report.converted],
                "copied": len(report.copied),
                "remarks": report.remarks,
                **_written(outcome),
            }
        )
    for name, remark in report.remarks.items():
        _say(f"{name}: {remark}")
    seconds = time.monotonic() - started
    _say(
        f"{len(report.converted)} weights to {arguments.to}, {len(report.copied)} copied; "
        f"{outcome.nbytes / 1e6:.1f} MB in {len(outcome.written)} file(s), "
        f"{len(outcome.kept)} kept, {seconds:.1f} s, {arguments.output}"
    )
    return OK


def _written(outcome: Any) -> dict[str, Any]:
    if outcome is None:
        return {"written": [], "kept": [], "output_bytes": None}
    return {
        "written": list(outcome.written),
        "kept": list(outcome.kept),
        "output_bytes": outcome.nbytes,
    }


def diff(arguments: Namespace) -> int:
    """``nvfp4 diff``"""
    from .checkpoint import diff_checkpoints
    from .checkpoint.header import shown

    with _opened(arguments.a) as a, _opened(arguments.b) as b:
        assert a is not None
        assert b is not None
        with _progress("diff", _total(a) + _total(b)) as advance:
            differences = diff_checkpoints(a, b, advance=advance)
    if arguments.json:
        _json({"differences": [difference.to_json() for difference in differences]})
        return FINDINGS if differences else OK
    table = _table("", ["tensor", "differs in", "a", "b", "SQNR"], left=4)
    for difference in differences:
        quality = "" if difference.sqnr_db is None else f"{difference.sqnr_db:.1f} dB"
        name = shown(difference.name)
        table.add_row(name, difference.status, difference.a, difference.b, quality)
    if differences:
        _show(table)
    for difference in differences:
        if difference.explanation:
            _say(f"{shown(difference.name)}: {difference.explanation}")
    _say(f"{len(differences)} differences")
    return FINDINGS if differences else OK


def explain(arguments: Namespace) -> int:
    """``nvfp4 explain``"""
    from .checkpoint.values import load_subject
    from .explain import explain_diff

    with _opened(arguments.trusted) as trusted, _opened(arguments.suspect) as suspect:
        assert trusted is not None
        assert suspect is not None
        first = _family(trusted, arguments.tensor)
        second = _family(suspect, arguments.suspect_tensor or arguments.tensor)
        report = explain_diff(load_subject(trusted, first), load_subject(suspect, second))
    if arguments.json:
        _json(
            {
                "verdict": report.verdict,
                "sqnr_db": _number(report.sqnr),
                "explanations": [
                    {
                        "name": e.name,
                        "meaning": e.meaning,
                        "fix": e.fix,
                        "detail": e.detail,
                        "sqnr_after_db": _number(e.sqnr_after),
                    }
                    for e in report.explanations
                ],
                "notes": list(report.notes),
            }
        )
    else:
        _say(str(report))
    return OK if report.verdict == "identical" else FINDINGS


COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "inspect": inspect,
    "verify": verify,
    "quantize": quantize,
    "convert": convert,
    "diff": diff,
    "explain": explain,
}


def _family(checkpoint: Checkpoint, name: str) -> Family:
    from .checkpoint import find_families

    for family in find_families(checkpoint.tensors):
        if name == family.module or name in [info.name for info in family.members]:
            return family
    checkpoint.info(name)  # raises with the usual advice
    raise CheckpointError("belongs to no weight.", tensor=name)


@contextmanager
def _opened(path: Any) -> Iterator[Checkpoint | None]:
    if path is None:
        yield None
        return
    from .checkpoint import Checkpoint

    with Checkpoint.open(path) as checkpoint:
        yield checkpoint


def _total(checkpoint: Checkpoint) -> int:
    return sum(info.nbytes for info in checkpoint)


@contextmanager
def _progress(label: str, total: int) -> Iterator[Advance]:
    """A bar on standard error if a person is looking, else nothing."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)


def _table(title: str, heads: Sequence[str], left: int) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for i, head in enumerate(heads):
        last = i == len(heads) - 1 and not head.startswith("SQNR")
        table.add_column(
            head,
            justify="left" if i < left or last else "right",
            overflow="fold",
            no_wrap=not (i == 0 or last),
        )
    return table


def _show(table: Table) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:  # a pipe has no width; fold nothing
        console = Console(markup=False, highlight=False, width=200)
    console.print(table)


def _say(text: str) -> None:
    """A line of output; control characters cannot reach the terminal."""
    safe = "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)
    sys.stdout.write(safe + "\n")


def _json(document: dict[str, Any]) -> int:
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    return OK


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
