"""What the doctor hands out: one fault, and the whole examination."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

#: "error": serving fails or the output is wrong. "suspected": statistics speak for an error, and
#: --reference decides. "handled": the plugin puts it right while loading, or it is in nobody's way.
Level = Literal["error", "suspected", "handled"]
#: What a fault shows in: names, headers or bytes that leave no doubt; statistics over bytes; or
#: the comparison with a reference.
Evidence = Literal["certain", "statistics", "reference"]


@dataclass(frozen=True)
class Diagnosis:
    """One fault: a stable code, where it is, what it does to the output, and what helps."""

    code: str
    level: Level
    evidence: Evidence
    tensor: str
    file: str
    found: str
    expected: str
    effect: str
    fix: str

    @property
    def sentence(self) -> str:
        """Tensor, file, and what the fault does to the output."""
        return (
            f"{self.tensor} in {self.file}: {self.found}; expected {self.expected}. {self.effect}"
        )

    def to_json(self) -> dict[str, str]:
        """The fields and the sentence as a JSON object."""
        return {**asdict(self), "sentence": self.sentence}


@dataclass(frozen=True)
class Looked:
    """How much was looked at: files and tensors by header, weights by value, and the bytes read."""

    files: int = 0
    tensors: int = 0
    weights: int = 0
    weights_read: int = 0
    nbytes: int = 0
    nbytes_read: int = 0


@dataclass(frozen=True)
class Examination:
    """All that was found, and what could not be.

    kind: what the checkpoint is, in a few words. scheme: of its names. serving: who serves it.
    open_questions: what these looks cannot tell, and how it can be told.
    """

    folder: str
    kind: str
    scheme: str
    serving: str
    findings: tuple[Diagnosis, ...]
    open_questions: tuple[str, ...]
    looked: Looked
    seconds: float

    @property
    def healthy(self) -> bool:
        """Whether nothing stands against serving it with the plugin."""
        return all(finding.level == "handled" for finding in self.findings)

    def count(self, level: Level) -> int:
        """How many findings are of a level."""
        return sum(finding.level == level for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Stable keys."""
        return {
            "folder": self.folder,
            "kind": self.kind,
            "scheme": self.scheme,
            "serving": self.serving,
            "healthy": self.healthy,
            "findings": [finding.to_json() for finding in self.findings],
            "open_questions": list(self.open_questions),
            "looked": asdict(self.looked),
            "seconds": round(self.seconds, 3),
        }
