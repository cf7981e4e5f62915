"""`apply_patches`: what a quantization script calls first, and what it reports."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import PatchError, VersionError
from .patch import State
from .patches import PATCHES

logger = logging.getLogger(__name__)
_lock = threading.RLock()


@dataclass(frozen=True)
class Row:
    """One patch in this process; detail: why its version is unknown, else the patch's reason."""

    patch: str
    target: str
    package: str
    version: str | None
    state: State
    detail: str
    upstream: str


@dataclass(frozen=True)
class Report:
    """Every patch and where it stands."""

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __str__(self) -> str:
        return "\n".join(
            f"{row.patch}: {row.state} ({row.target}, {row.package} {row.version or 'missing'})"
            for row in self.rows
        )

    def in_state(self, state: State) -> tuple[str, ...]:
        """The names of the patches in a state."""
        return tuple(row.patch for row in self.rows if row.state == state)


def apply_patches(*, allow_unknown: bool = False) -> Report:
    """Applies every patch that this process needs, proves that each took, and reports all.

    Call it before or after importing modelopt and transformers (it imports both), and again after
    loading a script such as hf_ptq; applying twice changes nothing. allow_unknown: patch versions
    that were never tested, as far as their functions take the same parameters.

    Raises VersionError, before anything is changed, if a version is outside the tested range, a
    function is not one of the known texts, or a package is missing; PatchError if a patch does not
    take: then none is applied.
    """
    with _lock:
        if not allow_unknown:
            _refuse_unknown()
        try:
            for patch in PATCHES:
                patch.apply(allow_unknown=allow_unknown)
        except PatchError:
            revert_patches()
            raise
        report = report_patches()
    logger.info("patches applied: %s", ", ".join(report.in_state("applied")) or "none needed")
    if unknown := report.in_state("unknown version"):
        logger.warning("patches of unknown versions not applied: %s", ", ".join(unknown))
    return report


def revert_patches() -> None:
    """Puts every original back; quantizer state that moved to the CPU stays there."""
    with _lock:
        for patch in reversed(PATCHES):
            patch.revert()


def report_patches() -> Report:
    """Where every patch stands, without applying any; imports modelopt and transformers."""
    rows = []
    with _lock:
        for patch in PATCHES:
            state = patch.state()
            detail = patch.unknown_version() if state == "unknown version" else None
            rows.append(
                Row(
                    patch.name,
                    patch.target,
                    patch.package,
                    patch.version(),
                    state,
                    detail or patch.reason,
                    patch.upstream,
                )
            )
    return Report(tuple(rows))


def _refuse_unknown() -> None:
    for patch in PATCHES:
        if patch.version() is None:
            raise VersionError(
                f"{patch.package} is not installed: pip install 'modelopt-v4-patches[modelopt]'"
            )
        if not patch.applied() and (unknown := patch.unknown_version()) is not None:
            raise VersionError(
                f"patch {patch.name}: {unknown}; install a tested version, or pass "
                "allow_unknown=True to patch it all the same"
            )
