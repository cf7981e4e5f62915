"""What each ``nvfp4`` command does: call the checkpoint package, show the result."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .cli_frame import FINDINGS, OK
from .cli_output import number, progress, say, say_grouped, say_json, show_table
from .errors import CheckpointError

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, Family


def inspect(arguments: Namespace) -> int:
    """``nvfp4 inspect``"""
    from .checkpoint import inspect_checkpoint, summarize
    from .checkpoint.plot import HEADS, cells_of, human, render
    from .cli_page import check_page, write_page

    with _opened(arguments.input) as source, _opened(arguments.reference) as reference:
        assert source is not None
        if arguments.plot is not None:
            check_page(arguments.plot, source, reference)
        with progress("inspect", _total(source)) as advance:
            stats = inspect_checkpoint(
                source, reference, headers_only=arguments.headers_only, advance=advance
            )
        rows = summarize(stats, each=arguments.each)
        total = _total(source)
        files = len(source.paths)
    if arguments.plot is not None:
        write_page(arguments.plot, render(rows, arguments.input.name))
    if arguments.json:
        families = [row.to_json() for row in rows]
        say_json({"files": files, "bytes": total, "families": families})
        return OK
    dtype = HEADS.index("dtype")  # of a plain weight it is the format
    cells = [cells_of(row) for row in rows]
    for row in cells:
        stored = row.pop(dtype)
        row[dtype - 1] = stored if row[dtype - 1] == "plain" else row[dtype - 1]
    heads = [head for head in HEADS if head != "dtype"]
    show_table(
        heads,
        cells,
        left=2,
        title=f"{files} file(s), {human(total)}",
        optional=("global", "scales", "size", "count"),
    )
    problems = [problem for row in rows for problem in row.problems]
    for problem in problems:
        say(f"problem: {problem}")
    if arguments.plot is not None:
        say(f"wrote {arguments.plot}")
    return OK


def verify(arguments: Namespace) -> int:
    """``nvfp4 verify``"""
    from .checkpoint import find_families, verify_checkpoint

    with _opened(arguments.input) as source, _opened(arguments.reference) as reference:
        assert source is not None
        with progress("verify", _total(source)) as advance:
            findings = verify_checkpoint(source, reference, advance=advance)
        families = find_families(source.tensors)
    kinds = [family.kind for family in families]
    counts = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    unchecked = (
        []
        if reference is not None
        else [
            "nibbles swapped in an unfused weight or in all weights alike",
            "a factor common to all weights",
        ]
    )
    if arguments.json:
        say_json(
            {
                "findings": [finding.to_json() for finding in findings],
                "checked": counts,
                "needs_reference": unchecked,
            }
        )
        return FINDINGS if findings else OK
    for finding in findings:
        say(f"{finding.code} ({finding.confidence})  {finding.file}: {finding.tensor}")
        say(f"    found     {finding.found}")
        say(f"    expected  {finding.expected}")
        say(f"    fix       {finding.fix}")
    checked = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    say(f"{len(findings)} findings in {len(families)} weights ({checked})")
    if unchecked:
        say(f"not visible without --reference: {', '.join(unchecked)}")
    return FINDINGS if findings else OK


def quantize(arguments: Namespace) -> int:
    """``nvfp4 quantize``"""
    from .checkpoint import QuantizeOptions, find_families, quantize_checkpoint
    from .checkpoint.quantize import QuantizeReport, decide, planned_work

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
            with progress("quantize", planned_work(decisions)) as advance:
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
                **{k: number(v) for k, v in report.measured.get(d.family.weight.name, {}).items()},
            }
            for d in report.decisions
        ]
        say_json({"tensors": tensors, "input_bytes": report.input_bytes, **_written(outcome)})
        return OK
    rows = []
    for decision in report.decisions:
        if decision.quantize:
            weight, measured = decision.family, report.measured.get(decision.family.weight.name)
            rows.append(
                (
                    shown(weight.module),
                    "×".join(map(str, weight.shape)),
                    f"{measured['amax']:.4g}" if measured else "",
                    f"{measured['weight_scale_2']:.3e}" if measured else "",
                    f"{measured['sqnr_db']:.2f}" if measured else "",
                )
            )
    heads = ("weight to NVFP4", "shape", "amax", "scale_2", "SQNR dB")
    show_table(heads, rows, left=1, optional=("scale_2", "amax"))
    kept = [(d.family.weight.name, d.reason) for d in report.decisions if not d.quantize]
    if kept:
        say("kept as they are:")
        say_grouped(kept)
    chosen = sum(decision.quantize for decision in report.decisions)
    say(f"{chosen} of {len(report.decisions)} tensors to NVFP4")
    if outcome is not None:
        size = f"{human(report.input_bytes)} -> {human(outcome.nbytes)}" if outcome.nbytes else ""
        say(f"{size or 'nothing left to do'}, {seconds:.1f} s, {arguments.output}")
        if outcome.kept:
            say(f"kept {len(outcome.kept)} finished file(s) of the earlier run")
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
        with progress("convert", _total(source)) as advance:
            report = convert_checkpoint(
                source, arguments.output, options, resume=arguments.resume, advance=advance
            )
    seconds = time.monotonic() - started
    outcome = report.outcome
    assert outcome is not None
    if arguments.json:
        say_json(
            {
                "to": arguments.to,
                "converted": [family.weight.name for family in report.converted],
                "copied": len(report.copied),
                "remarks": report.remarks,
                **_written(outcome),
            }
        )
        return OK
    if report.remarks:
        say("remarks:")
        say_grouped(report.remarks.items())
    say(
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
        "complete_unchecked": outcome.complete_unchecked,
    }


def diff(arguments: Namespace) -> int:
    """``nvfp4 diff``"""
    from .checkpoint import diff_checkpoints
    from .checkpoint.header import shown

    with _opened(arguments.a) as a, _opened(arguments.b) as b:
        assert a is not None
        assert b is not None
        with progress("diff", _total(a) + _total(b)) as advance:
            differences = diff_checkpoints(a, b, advance=advance)
    if arguments.json:
        say_json({"differences": [difference.to_json() for difference in differences]})
        return FINDINGS if differences else OK
    if differences:
        rows = [(shown(d.name), d.text, _decibel(d.sqnr_db)) for d in differences]
        show_table(("tensor", "a -> b", "SQNR dB"), rows, left=2)
    causes = [(d.name, d.explanation) for d in differences if d.explanation]
    if causes:
        say("likely causes:")
        say_grouped(causes)
    say(f"{len(differences)} differences")
    return FINDINGS if differences else OK


def _decibel(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def explain(arguments: Namespace) -> int:
    """``nvfp4 explain``"""
    from .checkpoint.diff import rounding
    from .checkpoint.values import load_subject
    from .explain import explain_diff

    with _opened(arguments.trusted) as trusted, _opened(arguments.suspect) as suspect:
        assert trusted is not None
        assert suspect is not None
        first = _family(trusted, arguments.tensor)
        second = _family(suspect, arguments.suspect_tensor or arguments.tensor)
        report = explain_diff(load_subject(trusted, first), load_subject(suspect, second))
    if report.verdict == "unknown":
        note = rounding(first, second, report.sqnr)
        if note is not None:
            report = replace(report, notes=(*report.notes, f"{note} ({report.sqnr:.1f} dB)"))
    if arguments.json:
        say_json(
            {
                "verdict": report.verdict,
                "sqnr_db": number(report.sqnr),
                "explanations": [
                    {
                        "name": e.name,
                        "meaning": e.meaning,
                        "fix": e.fix,
                        "detail": e.detail,
                        "sqnr_after_db": number(e.sqnr_after),
                    }
                    for e in report.explanations
                ],
                "notes": list(report.notes),
            }
        )
    else:
        say(str(report))
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
