"""One self-contained HTML page of a checkpoint: sizes by format, scale histograms, the table.

Inline SVG and CSS, no script, nothing loaded from anywhere. Colours follow the reader's
light or dark setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from .header import shown
from .inspect import Row

_COLOURS: Final = {
    "nvfp4": "var(--nvfp4)",
    "mxfp4": "var(--mxfp4)",
    "fp8-block": "var(--fp8)",
    "plain": "var(--plain)",
}

#: Column titles of ``cells_of``.
HEADS: Final = (
    "family", "format", "dtype", "shape", "count", "size", "scales", "global", "amax", "SQNR",
)  # fmt: skip

_STYLE: Final = """
:root { --bg:#fbfbf9; --card:#fff; --ink:#1d2329; --soft:#6b7680; --line:#e3e5e8;
  --nvfp4:#3b7a57; --mxfp4:#2f6fb0; --fp8:#b3742d; --plain:#9aa3ab; }
@media (prefers-color-scheme: dark) { :root { --bg:#14171a; --card:#1c2024; --ink:#e7eaec;
  --soft:#98a2ab; --line:#2d3339; --nvfp4:#63b587; --mxfp4:#67a5e0; --fp8:#dda45c;
  --plain:#6d7780; } }
* { box-sizing:border-box }
body { margin:0; padding:2.5rem 1.25rem 4rem; background:var(--bg); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif }
main { max-width:1120px; margin:0 auto }
h1 { font-size:1.6rem; margin:0 0 .2rem } h2 { font-size:1.05rem; margin:2.4rem 0 .8rem }
.sub,.note { color:var(--soft) } .note { font-size:.86rem; margin:.2rem 0 .8rem }
.card { background:var(--card); border:1px solid var(--line); border-radius:10px;
  padding:1.1rem 1.2rem }
.grid { display:grid; gap:.9rem; grid-template-columns:repeat(auto-fill,minmax(320px,1fr)) }
.card h3 { font:600 .84rem/1.35 ui-monospace,Menlo,Consolas,monospace; margin:0;
  overflow-wrap:anywhere } .card p { margin:.1rem 0 .5rem; font-size:.8rem; color:var(--soft) }
svg { display:block; width:100%; height:auto }
svg text { fill:var(--soft); font:11px system-ui,sans-serif }
.legend span { display:inline-flex; align-items:center; gap:.4rem; margin:.7rem 1.1rem 0 0;
  font-size:.86rem } .legend i { width:.75rem; height:.75rem; border-radius:3px }
.scroll { overflow-x:auto; padding:0 }
table { border-collapse:collapse; width:100%; font-size:.84rem; white-space:nowrap }
th,td { padding:.42rem .8rem; text-align:right; border-bottom:1px solid var(--line);
  font-variant-numeric:tabular-nums }
th { color:var(--soft); font-weight:600 } tr:last-child td { border-bottom:0 }
th:first-child,td:first-child { text-align:left; font-family:ui-monospace,Menlo,monospace }
.bad { color:#c0392b; font-weight:600 }
"""


def render(rows: Sequence[Row], title: str) -> str:
    """The page as text; names are escaped, so a hostile checkpoint cannot inject markup."""
    title = escape(shown(title))
    total = sum(row.nbytes for row in rows)
    tensors = sum(row.count for row in rows)
    histograms = [_histogram(row) for row in rows if row.exponents]
    problems = [escape(text) for row in rows for text in row.problems]
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width,initial-scale=1'>",
        f"<title>{title} · nvfp4 inspect</title><style>{_STYLE}</style></head><body><main>",
        f"<h1>{title}</h1><div class=sub>{tensors} weights · {human(total)}</div>",
    ]
    if problems:
        items = "".join(f"<li class=bad>{text}</li>" for text in problems[:50])
        parts.append(f"<h2>Problems</h2><div class=card><ul>{items}</ul></div>")
    parts += [
        "<h2>Where the bytes are</h2><div class=card>",
        _sizes(rows, total),
        "</div>",
        "<h2>Largest families</h2><div class=card>",
        _largest(rows),
        "</div>",
    ]
    if histograms:
        parts += [
            "<h2>Block scales</h2><div class=note>Blocks by the power of two of their scale "
            "(before the global scale). One bar is one binade; a lone bar at 0 means that every "
            "scale is about one.</div><div class=grid>",
            *histograms,
            "</div>",
        ]
    parts += ["<h2>All families</h2><div class='card scroll'>", _table(rows), "</div>"]
    return "\n".join([*parts, "</main></body></html>\n"])


def human(nbytes: int) -> str:
    """Bytes as a person reads them, in powers of 1000."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def _sizes(rows: Sequence[Row], total: int) -> str:
    """One stacked bar of bytes per format, with a legend."""
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.kind] = sizes.get(row.kind, 0) + row.nbytes
    bars, legend, x = [], [], 0.0
    for kind in _COLOURS:
        if kind not in sizes:
            continue
        width = 1000 * sizes[kind] / max(total, 1)
        bars.append(
            f"<rect x={x:.2f} y=0 width={max(width - 1.5, 0.8):.2f} height=34 rx=3 "
            f"fill='{_COLOURS[kind]}'><title>{kind}: {human(sizes[kind])}</title></rect>"
        )
        x += width
        share = 100 * sizes[kind] / max(total, 1)
        legend.append(
            f"<span><i style='background:{_COLOURS[kind]}'></i>{kind} "
            f"{human(sizes[kind])} ({share:.1f} %)</span>"
        )
    return (
        f"<svg viewBox='0 0 1000 34' role=img aria-label='bytes per format'>{''.join(bars)}</svg>"
        f"<div class=legend>{''.join(legend)}</div>"
    )


def _largest(rows: Sequence[Row], count: int = 12) -> str:
    """Horizontal bars of the families that take the most room."""
    chosen = sorted(rows, key=lambda row: -row.nbytes)[:count]
    most = max((row.nbytes for row in chosen), default=1) or 1
    bars = []
    for i, row in enumerate(chosen):
        y, width = 24 * i, 470 * row.nbytes / most
        name = row.name if len(row.name) <= 54 else "…" + row.name[-53:]
        bars.append(
            f"<text x=380 y={y + 15} text-anchor=end>{escape(shown(name))}</text>"
            f"<rect x=392 y={y + 3} width={max(width, 1):.1f} height=16 rx=3 "
            f"fill='{_COLOURS[row.kind]}'/>"
            f"<text x={400 + width:.1f} y={y + 15}>{human(row.nbytes)} · {row.count} × "
            f"{row.kind if row.kind != 'plain' else row.dtype}</text>"
        )
    height = 24 * len(chosen)
    return f"<svg viewBox='0 0 1040 {height}' role=img>{''.join(bars)}</svg>"


def _histogram(row: Row) -> str:
    counts = dict(row.exponents)
    low, high = min(counts), max(counts)
    if high - low < 8:  # a few bars look lost across the whole width
        low, high = low - (8 - high + low) // 2, high + (9 - high + low) // 2
    most, slots = max(counts.values()), high - low + 1
    step = 300 / slots
    every = max(1, round(slots / 8))
    marks = []
    for i, exponent in enumerate(range(low, high + 1)):
        count = counts.get(exponent, 0)
        height = 92 * count / most
        if count:
            height = max(height, 1.5)
            marks.append(
                f"<rect x={10 + i * step:.2f} y={96 - height:.2f} width={max(step - 2, 1):.2f} "
                f"height={height:.2f} rx=2 fill='{_COLOURS[row.kind]}'>"
                f"<title>2^{exponent}: {count} blocks</title></rect>"
            )
        if i % every == 0:
            middle = 10 + (i + 0.5) * step
            marks.append(f"<text x={middle:.1f} y=112 text-anchor=middle>2^{exponent}</text>")
    details = f"{row.kind} · {row.count} × {'×'.join(map(str, row.shape))}"
    return (
        f"<div class=card><h3>{escape(shown(row.name))}</h3><p>{details}</p>"
        "<svg viewBox='0 0 320 118' role=img>"
        "<line x1=8 x2=312 y1=97 y2=97 stroke='var(--line)'/>"
        f"{''.join(marks)}</svg></div>"
    )


def _table(rows: Sequence[Row]) -> str:
    lines = ["<table><tr>", *(f"<th>{name}</th>" for name in HEADS), "</tr>"]
    for row in rows:
        cells = cells_of(row)
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return "".join([*lines, "</table>"])


def cells_of(row: Row) -> list[str]:
    """A row as text, for the terminal and for the page."""
    return [
        shown(row.name),
        row.kind,
        row.dtype,
        "×".join(map(str, row.shape)) or "scalar",
        str(row.count),
        human(row.nbytes),
        _range(row.scale_range),
        _range(row.global_range),
        "" if row.amax is None else f"{row.amax:.4g}",
        "" if row.sqnr_db is None else _decibel(row.sqnr_db),
    ]


def _decibel(value: float) -> str:
    return "exact" if value == float("inf") else f"{value:.1f} dB"


def _range(pair: tuple[float, float] | None) -> str:
    if pair is None:
        return ""
    low, high = f"{pair[0]:.3g}", f"{pair[1]:.3g}"
    return low if low == high else f"{low} … {high}"
