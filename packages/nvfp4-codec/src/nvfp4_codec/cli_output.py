"""How the ``nvfp4`` command shows things: tables that fit 80 columns, grouped lines, a bar."""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from .checkpoint.writer import Advance

_PIPE_WIDTH = 200  # a pipe has no width; fold nothing
_WRAP = 80
_LEAST_NAME = 32  # a name is folded no narrower than this
_LONG_NAME = 40  # from here on, a prefix that all names share goes into the title
_MOST_PATTERNS = 3


def reader_left() -> int:
    """Ends output to a closed pipe (``| head``) in silence; the exit code is that of success."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def show_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int,
    title: str = "",
    optional: Sequence[str] = (),
    console: Console | None = None,
) -> None:
    """Prints rows whose first column is a name; the first ``left`` columns are left-aligned.

    Columns without content are dropped, and on a narrow terminal those of ``optional``, in
    that order, until names keep a readable width; a line says which.
    """
    from rich import box
    from rich.table import Table

    if console is None:
        console = _console()
    names, prefix = [row[0] for row in rows], ""
    if console.width < _PIPE_WIDTH:
        names, prefix = _without_prefix(names)
    if prefix:
        title = f"{title}, names below {prefix}" if title else f"names below {prefix}"
    cells = [[name, *row[1:]] for name, row in zip(names, rows, strict=True)]
    columns = [i for i in range(len(heads)) if i == 0 or any(row[i] for row in cells)]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    least = min(widths[0], _LEAST_NAME)
    left_out = []
    for head in optional:
        if heads.index(head) in columns and _room(widths, columns, console.width) < least:
            columns.remove(heads.index(head))
            left_out.append(head)
    room = max(least, _room(widths, columns, console.width))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i in columns:
        table.add_column(
            heads[i],
            justify="left" if i < left else "right",
            overflow="fold",
            no_wrap=i > 0,
            min_width=least if i == 0 else None,
        )
    for row in cells:
        table.add_row(_folded(row[0], room), *(row[i] for i in columns[1:]))
    if title:
        console.print(title, soft_wrap=True)
    console.print(table)
    if left_out:
        say(f"left out at {console.width} columns: {', '.join(left_out)}; --json has them")


def _room(widths: Sequence[int], columns: Sequence[int], width: int) -> int:
    """What the other columns, two characters apart, leave for names."""
    return width - 2 - sum(widths[i] + 2 for i in columns[1:])


def _folded(name: str, room: int) -> str:
    """The name in lines of at most ``room`` characters, cut after a dot if there is one."""
    lines = []
    while len(name) > room:
        cut = name.rfind(".", room // 2, room) + 1 or room
        lines.append(name[:cut])
        name = name[cut:]
    return "\n".join([*lines, name])


def _console() -> Console:
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if console.is_terminal:
        return console
    return Console(markup=False, highlight=False, width=_PIPE_WIDTH)


def _without_prefix(names: Sequence[str]) -> tuple[list[str], str]:
    """The names without what they share up to a dot, if there are long ones."""
    if len(names) < 2 or max(map(len, names)) < _LONG_NAME:
        return list(names), ""
    low, high = min(names), max(names)
    shared = next((i for i, c in enumerate(low) if high[i : i + 1] != c), len(low))
    cut = low.rfind(".", 0, shared) + 1
    return [name[cut:] for name in names], low[:cut]


def say_grouped(texts: Iterable[tuple[str, str]]) -> None:
    """Prints (name, text) pairs once per text, with the number of names and the first of them.

    Names that differ in numbers only are shown as one pattern.
    """
    from .checkpoint.families import pattern
    from .checkpoint.header import shown

    groups: dict[str, list[str]] = {}
    for name, text in texts:
        groups.setdefault(text, []).append(name)
    for text, names in groups.items():
        line = f"{len(names):>6}  {text}: {shown(names[0])}"
        if len(names) == 1 and len(line) <= _WRAP and "\n" not in line:
            say(line)
            continue
        say(_wrapped(f"{len(names):>6}  ", text))
        patterns = list(dict.fromkeys(map(pattern, names))) if len(names) > 1 else names
        first = ", ".join(shown(name) for name in patterns[:_MOST_PATTERNS])
        more = len(patterns) - _MOST_PATTERNS
        say(_wrapped(" " * 8, first + (f" and {more} more such" if more > 0 else "")))


def _wrapped(label: str, text: str) -> str:
    lines = [
        wrapped
        for line in text.split("\n")
        for wrapped in textwrap.wrap(
            line, _WRAP - len(label), break_long_words=False, break_on_hyphens=False
        )
    ]
    return label + ("\n" + " " * len(label)).join(lines)


def say(text: str) -> None:
    """Output, of one or more lines, as ``printable``."""
    sys.stdout.write(printable(text, keep="\n") + "\n")


def printable(text: str, keep: str = "") -> str:
    """The text with all control characters but those of ``keep`` escaped."""
    return "".join(c if c.isprintable() or c in keep else f"\\x{ord(c):02x}" for c in text)


def say_json(document: dict[str, Any]) -> None:
    """The one object that ``--json`` prints."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def number(value: float) -> float | str:
    """A number as JSON can hold it."""
    return value if math.isfinite(value) else str(value)


@contextmanager
def progress(label: str, total: int) -> Iterator[Advance]:
    """A bar on standard error if a person is looking, else nothing. total: units of work."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    # no bytes per second: a copied byte and a quantized one are not the same work
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)
