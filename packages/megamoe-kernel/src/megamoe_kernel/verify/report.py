"""The file that somebody with the hardware sends back: what ran, on what, with which result."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

FORMAT = 1

Status = Literal["passed", "failed", "absent"]
"""absent: there is no such kernel for this architecture yet; that is no failure."""


@dataclass(frozen=True)
class Finding:
    """One comparison with the reference.

    error: what was measured; bound: what the contract allows; both None where nothing ran.
    """

    check: str
    case: str
    status: Status
    error: float | None = None
    bound: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Timing:
    """Median and spread ((90th - 10th percentile) / median) of replays of a CUDA graph.

    gigabytes: read and written once.
    """

    what: str
    case: str
    microseconds: float
    spread: float
    gigabytes: float

    @property
    def gigabytes_per_second(self) -> float:
        return self.gigabytes / self.microseconds * 1e6


@dataclass(frozen=True)
class Report:
    """machine: see machine.describe. It names no host, user or folder."""

    machine: dict[str, str]
    findings: Sequence[Finding]
    timings: Sequence[Timing]

    @property
    def passed(self) -> bool:
        """Nothing failed, and something was compared."""
        statuses = [finding.status for finding in self.findings]
        return "failed" not in statuses and "passed" in statuses

    def as_json(self) -> dict[str, object]:
        return {
            "format": FORMAT,
            "passed": self.passed,
            "machine": self.machine,
            "findings": [asdict(finding) for finding in self.findings],
            "timings": [
                {**asdict(timing), "gigabytes_per_second": timing.gigabytes_per_second}
                for timing in self.timings
            ],
        }

    def write(self, path: Path) -> None:
        """Write the report; whole, or not at all."""
        text = json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n"
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        try:
            with open(descriptor, "w") as file:
                file.write(text)
                os.fchmod(descriptor, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
