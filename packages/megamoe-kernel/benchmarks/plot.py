"""Draw the report of hopper.py as SVG: time over tokens, both logarithmic, floors dashed.

    python plot.py REPORT.json OUT.svg

Ours is drawn heavier. Floors run out of the picture where they are far below all times. Text can be
selected; a time can be read off by pointing at its mark.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

Points = Sequence[tuple[float, float]]

OURS = "megamoe"

WIDTH, HEIGHT = 960, 560
LEFT, RIGHT, TOP, BOTTOM = 76, 236, 56, 60
# Okabe and Ito's colors, which the color-blind can tell apart; floors are gray.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GRAY = "#777777"
_STYLE = "font-family: sans-serif; font-size: 13px; fill: #222222"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    arguments.out.write_text(draw_report(json.loads(arguments.report.read_text())))


def draw_report(report: Mapping[str, Any]) -> str:
    """What hopper.py writes: "rows" of ours, "ceilings", and "peers" if some were timed."""
    rows = [row for row in report["rows"] if row["chosen"]]
    ours, *peers = OURS, *dict.fromkeys(row["name"] for row in report.get("peers", []))
    series = {ours: [(row["tokens"], row["microseconds"]) for row in rows]}
    for name in peers:
        timed = [row for row in report["peers"] if row["name"] == name]
        series[name] = [(row["tokens"], row["microseconds"]) for row in timed]
    ceilings = report["ceilings"]
    heads = {
        f"weights at {ceilings['copy_gb_s']:,.0f} GB/s": "bandwidth_us",
        f"products at {ceilings['bf16_tflops']:,.0f} TFLOP/s": "matmul_us",
    }
    floors = {name: [(row["tokens"], row[key]) for row in rows] for name, key in heads.items()}
    return draw(f"NVFP4 MoE layer, 48 experts, one {report['gpu']}", series, floors)


def draw(title: str, series: Mapping[str, Points], floors: Mapping[str, Points]) -> str:
    """The whole file, lines in the order of the legend; ValueError where there is no point."""
    points = [point for line in series.values() for point in line]
    if not points:
        raise ValueError("the report has no points")
    scale = _Scale(points)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}" style="{_STYLE}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 28, title, "font-size: 16px; font-weight: bold"),
        *scale.axes(),
    ]
    heads = [(name, line, GRAY, "2 6" if i else "8 5", 1.5) for i, (name, line) in _items(floors)]
    heads += [
        (name, line, COLORS[i % len(COLORS)], "", 3.0 if i == 0 else 1.75)
        for i, (name, line) in _items(series)
    ]
    for row, (name, _, color, dashes, width) in enumerate(heads):
        parts += _legend(row, name, color, dashes, width)
    area = f'x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}"'
    parts.append(f'<clipPath id="area"><rect {area}/></clipPath>')
    for name, line, color, dashes, width in sorted(heads, key=lambda head: head[4]):  # ours on top
        parts += _line(scale, name, line, color, dashes, width)
    return "\n".join([*parts, "</svg>", ""])


class _Scale:
    """From tokens and microseconds to the picture's units."""

    def __init__(self, points: Points) -> None:
        tokens, times = zip(*((point[0], point[1]) for point in points), strict=True)
        if min(tokens) <= 0 or min(times) <= 0:
            raise ValueError("tokens and times must be positive to be drawn on logarithmic axes")
        self.tokens = math.floor(math.log2(min(tokens))), math.ceil(math.log2(max(tokens)))
        self.times = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))

    def x(self, tokens: float) -> float:
        low, high = self.tokens
        share = (math.log2(tokens) - low) / max(1, high - low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, time: float) -> float:
        low, high = self.times
        share = (math.log10(time) - low) / max(1, high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def axes(self) -> list[str]:
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        drawn = []
        for power in range(self.tokens[0], self.tokens[1] + 1):
            x = self.x(2.0**power)
            drawn.append(_stroke(x, TOP, x, bottom, "#eeeeee"))
            label = f"{2.0**power:,g}" if power < 0 else f"{2**power:,}"
            drawn.append(_text(x, bottom + 20, label, "text-anchor: middle"))
        for power in range(self.times[0], self.times[1] + 1):
            for digit in range(1, 10 if power < self.times[1] else 2):
                y = self.y(digit * 10.0**power)
                drawn.append(_stroke(LEFT, y, right, y, "#cccccc" if digit == 1 else "#f2f2f2"))
            label = f"{10.0**power:,g}" if power < 0 else f"{10**power:,}"
            drawn.append(_text(LEFT - 8, self.y(10.0**power) + 4, label, "text-anchor: end"))
        middle = (LEFT + right) / 2
        drawn.append(_text(middle, HEIGHT - 16, "tokens", "text-anchor: middle"))
        drawn.append(_text(LEFT - 8, TOP - 12, "µs", "text-anchor: end"))
        return drawn


def _items(lines: Mapping[str, Points]) -> enumerate[tuple[str, Points]]:
    return enumerate(lines.items())


def _line(
    scale: _Scale, name: str, line: Points, color: str, dashes: str, width: float
) -> list[str]:
    ordered = sorted(line)
    places = [(scale.x(tokens), scale.y(time)) for tokens, time in ordered]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    drawn = [
        f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" '
        f'clip-path="url(#area)" stroke-dasharray="{dashes or "none"}"/>'
    ]
    if not dashes:
        drawn += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{width + 1:g}" fill="{color}">'
            f"<title>{escape(name)}, {tokens:,g} tokens: {time:,.1f} µs</title></circle>"
            for (x, y), (tokens, time) in zip(places, ordered, strict=True)
        ]
    return drawn


def _legend(row: int, name: str, color: str, dashes: str, width: float) -> list[str]:
    x, y = WIDTH - RIGHT + 16, TOP + 14 + 22 * row
    return [
        _stroke(x, y - 4, x + 26, y - 4, color, width, dashes),
        _text(x + 34, y, name),
    ]


def _stroke(
    x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1, dashes: str = ""
) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" '
        f'stroke-width="{width:g}" stroke-dasharray="{dashes or "none"}"/>'
    )


def _text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" style="{style}">{escape(words)}</text>'


if __name__ == "__main__":
    main()
