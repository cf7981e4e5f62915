"""What the pass did: layers by path and format, and what rounding it cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from nvfp4_codec.convert import RequantizationReport, Unified, UnifiedPart

from ..stored import Format


@dataclass(frozen=True)
class Requantized:
    """What a second rounding cost the linears of a path; sqnr_db is the worst linear's."""

    linears: int = 0
    max_relative_error: float = 0.0
    sqnr_db: float = math.inf

    def plus(self, report: RequantizationReport) -> Requantized:
        """With one more linear."""
        return Requantized(
            self.linears + 1,
            max(self.max_relative_error, report.max_relative_error),
            min(self.sqnr_db, report.sqnr_db),
        )


@dataclass(frozen=True)
class TransformReport:
    """What was done.

    layers: linears by (path, stored format, running format); a block's routed experts count once.
    unified, requantized: by path, of a fused group by its first linear's. dropped: tensors that
    the model has no use for, by name with ``#`` for indices. padded: tensors of shared experts
    that were widened.
    """

    layers: Mapping[tuple[str, Format, Format], int]
    unified: Mapping[str, Unified] = field(default_factory=dict)
    requantized: Mapping[str, Requantized] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    padded: int = 0

    def table(self) -> str:
        """A line for each path: how many layers, as what they are stored and run, at what cost."""
        rows = [("path", "layers", "stored", "runs as", "")]
        for (path, stored, runs), count in sorted(self.layers.items()):
            rows.append((path, str(count), stored, runs, self._cost(path, stored != runs)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )

    def _cost(self, path: str, converted: bool) -> str:
        notes = []
        if converted and path in self.requantized:
            again = self.requantized[path]
            notes.append(f"worst SQNR {again.sqnr_db:.1f} dB")
        if path in self.unified:
            one = self.unified[path]
            notes.append(
                f"{one.groups} fused groups had two weight_scale_2: {one.inexact_blocks} of "
                f"{one.blocks} blocks rounded by up to {one.max_relative_error:.2%}"
                + (f", {one.vanished_blocks} vanished" if one.vanished_blocks else "")
            )
        return "; ".join(notes)


@dataclass
class Tally:
    """A report in the making."""

    layers: Counter[tuple[str, Format, Format]] = field(default_factory=Counter)
    unified: dict[str, Unified] = field(default_factory=dict)
    requantized: dict[str, Requantized] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    padded: int = 0

    def unify(self, path: str, parts: Collection[UnifiedPart]) -> None:
        """Counts a fused group."""
        self.unified[path] = self.unified.get(path, Unified()).plus(parts)

    def requantize(self, path: str, report: RequantizationReport) -> None:
        """Counts a linear that was rounded again."""
        self.requantized[path] = self.requantized.get(path, Requantized()).plus(report)

    def report(self) -> TransformReport:
        """What was counted so far."""
        return TransformReport(
            dict(self.layers),
            dict(self.unified),
            dict(self.requantized),
            dict(self.dropped),
            self.padded,
        )
