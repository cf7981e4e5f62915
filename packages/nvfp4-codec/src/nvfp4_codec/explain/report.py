"""explain_diff: try every hypothesis, keep those that the numbers support."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import ShapeError
from ..sqnr import sqnr_db
from .experiment import Trial
from .hypotheses import HYPOTHESES, Hypothesis
from .subject import Explainable, Subject, subject_of

Verdict = Literal["identical", "explained", "unknown"]

MIN_GAIN_DB, MIN_SQNR_DB = 6.0, 10.0
MIN_FIT_GAIN_DB, MIN_FIT_SQNR_DB = 10.0, 20.0  # for hypotheses that fit factors
EXACT_DB = 140.0  # from here on, float32 rounding is all that is left


@dataclass(frozen=True)
class Explanation:
    """A hypothesis that the numbers support.

    sqnr_before, sqnr_after: signal-to-error ratio in decibels of b against a as given, and
    after undoing (or reproducing) the suspected error; inf means bit-equal values.
    detail: what was read differently, on which side, with which factors.
    """

    name: str
    meaning: str
    fix: str
    detail: str
    sqnr_before: float
    sqnr_after: float

    @property
    def exact(self) -> bool:
        return math.isinf(self.sqnr_after)


@dataclass(frozen=True)
class DiffReport:
    """What explain_diff found; explanations are sorted, the best first.

    sqnr: of b against a in decibels (-inf if shapes or NaN positions differ).
    num_different: values that differ (None if the shapes do); a NaN equals a NaN.
    max_abs_error: over the values that are finite on both sides (0 if there are none).
    notes: how many values are NaN or Inf, and which parts of two packed tensors differ.
    """

    verdict: Verdict
    explanations: tuple[Explanation, ...]
    num_values: int
    num_different: int | None
    max_abs_error: float | None
    sqnr: float
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Explanation | None:
        return self.explanations[0] if self.explanations else None

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self._summary()}", *self.notes]
        lines += [
            f"{e.name}: {e.meaning} ({e.detail}; {e.sqnr_before:.1f} -> {e.sqnr_after:.1f} dB). "
            f"Fix: {e.fix}"
            for e in self.explanations
        ]
        return "\n".join(lines)

    def _summary(self) -> str:
        if self.num_different is None:
            return "the shapes differ"
        return (
            f"{self.num_different} of {self.num_values} values differ, largest error "
            f"{self.max_abs_error:.3g}, {self.sqnr:.1f} dB"
        )


def explain_diff(
    a: Explainable, b: Explainable, *, known_scales: Mapping[str, float] | None = None
) -> DiffReport:
    """Say which known convention error turns a (trusted) into b (suspect), or b into a.

    a, b: NVFP4Tensor, MXFP4Tensor, FP8BlockTensor, float tensors (already decoded), float8
        scale tensors, or uint8 packed E2M1; the two kinds may differ. The more parts are
        given, the more can be told: a plain float tensor has lost its scales.
    known_scales: named scalars of the layer (input_scale, ...) that a constant factor between
        the two is compared with.
    Every hypothesis is tested by applying it and measuring what difference remains. None is
    reported unless that gains at least 6 dB and leaves 10 dB (10 and 20 dB if it fits
    factors). Several may hold: a global scale of 2^-13 inverted is also a constant factor.
    NaN and Inf are no evidence: a hypothesis must explain the finite values, and put the NaN
    and Inf in their places; the notes count them. Fitted factors are finite and positive.
    Works on whole tensors in float32: pass a slice of rows of something large.
    Raises ShapeError if the sizes do not match under any reading.
    """
    left, right = subject_of(a, "a"), subject_of(b, "b")
    before = sqnr_db(left.values, right.values)
    same_shape = left.values.shape == right.values.shape
    notes = _nonfinite_notes(left, right) + _component_notes(left, right)
    if same_shape and _bit_equal(left.values, right.values):
        return DiffReport("identical", (), left.values.numel(), 0, 0.0, math.inf, notes)

    # NaN in b alone must not make everything that removes it look like a gain.
    baseline = _sqnr_where_both_finite(left.values, right.values) if same_shape else before
    found = []
    for rank, hypothesis in enumerate(HYPOTHESES):
        best = _best_trial(hypothesis, left, right, known_scales or {})
        if best is not None and _supported(hypothesis, baseline, best[0]):
            after, detail = best
            explanation = Explanation(
                hypothesis.name, hypothesis.meaning, hypothesis.fix, detail, before, after
            )
            merit = min(after, EXACT_DB) - hypothesis.handicap_db
            found.append((-merit, rank, explanation))
    explanations = tuple(explanation for _, _, explanation in sorted(found, key=lambda f: f[:2]))
    if not same_shape and not explanations:
        raise ShapeError(
            f"a has shape {tuple(left.values.shape)}, b {tuple(right.values.shape)}, expected "
            "equal shapes, or a transposed or swizzled pair"
        )
    num_different, max_abs_error = (
        _differences(left.values, right.values) if same_shape else (None, None)
    )
    return DiffReport(
        "explained" if explanations else "unknown",
        explanations,
        left.values.numel(),
        num_different,
        max_abs_error,
        before,
        notes,
    )


def _sqnr_where_both_finite(a: Tensor, b: Tensor) -> float:
    both = a.isfinite() & b.isfinite()
    return sqnr_db(torch.where(both, a, math.nan), torch.where(both, b, math.nan))


def _best_trial(
    hypothesis: Hypothesis, a: Subject, b: Subject, known_scales: Mapping[str, float]
) -> tuple[float, str] | None:
    trials: list[Trial] = list(hypothesis.trials(a, b, known_scales))
    scored = [(sqnr_db(trial.expected, trial.found), trial.detail) for trial in trials]
    return max(scored, key=lambda pair: pair[0], default=None)


def _supported(hypothesis: Hypothesis, before: float, after: float) -> bool:
    gain, floor = (
        (MIN_FIT_GAIN_DB, MIN_FIT_SQNR_DB) if hypothesis.handicap_db else (MIN_GAIN_DB, MIN_SQNR_DB)
    )
    if before == math.inf:  # only the places of NaN and Inf differ
        return after == math.inf
    return after >= floor and after - before >= gain


def _bit_equal(a: Tensor, b: Tensor) -> bool:
    """Equal bits, any NaN equal to any other: +0 and -0 differ."""
    same = a.view(torch.int32) == b.view(torch.int32)
    return bool((same | (a.isnan() & b.isnan())).all())


def _differences(a: Tensor, b: Tensor) -> tuple[int, float]:
    """How many values differ, and by how much those do that are finite on both sides."""
    different = (a != b) & ~(a.isnan() & b.isnan())
    error = torch.where(a.isfinite() & b.isfinite(), a - b, 0).abs()
    return int(different.sum()), float(error.max())


def _nonfinite_notes(a: Subject, b: Subject) -> tuple[str, ...]:
    notes = []
    for name, values in (("a", a.values), ("b", b.values)):
        num_nonfinite = int((~values.isfinite()).sum())
        if num_nonfinite:
            notes.append(f"{name} holds {num_nonfinite} NaN or Inf of {values.numel()} values")
    return tuple(notes)


def _component_notes(a: Subject, b: Subject) -> tuple[str, ...]:
    """Which parts of two packed tensors of one kind differ."""
    if a.parts is None or b.parts is None:
        return ()
    if a.parts.block != b.parts.block or a.parts.scale_format != b.parts.scale_format:
        return ("a and b are of different formats",)
    notes = []
    for name, left, right in (
        ("codes", a.parts.codes, b.parts.codes),
        ("block scales", a.parts.raw_scale, b.parts.raw_scale),
    ):
        if left.shape != right.shape:
            notes.append(f"{name} have shapes {tuple(left.shape)} and {tuple(right.shape)}")
        elif not torch.equal(left, right):
            notes.append(f"{int((left != right).sum())} of {left.numel()} {name} differ")
    if (a.parts.global_scale, a.parts.divides) != (b.parts.global_scale, b.parts.divides):
        notes.append(f"global scales are {_describe_global(a)} and {_describe_global(b)}")
    return tuple(notes)


def _describe_global(subject: Subject) -> str:
    assert subject.parts is not None
    kind = "divisor" if subject.parts.divides else "multiplier"
    return f"{subject.parts.global_scale:g} ({kind})"
