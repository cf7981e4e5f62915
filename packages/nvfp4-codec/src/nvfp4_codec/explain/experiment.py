"""What an experiment is, and how a rewriting of one tensor becomes one.

An experiment yields trials: two tensors that must agree if its hypothesis holds. Most come
from one rewriting, "what would this tensor's values be if read that way", tried on either
side: rewriting b may give a (b was written so), rewriting a may give b (b was read so).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from .subject import Parts, Subject

KnownScales = Mapping[str, float]


class Trial(NamedTuple):
    """Two float32 tensors that agree if the hypothesis holds."""

    expected: Tensor
    found: Tensor
    detail: str


Experiment = Callable[[Subject, Subject, KnownScales], Iterable[Trial]]
Rewriting = Callable[[Subject], Iterable[tuple[Tensor, str]]]


def rewritten(rewrite: Rewriting) -> Experiment:
    """Try a rewriting on b, then on a."""

    def trials(a: Subject, b: Subject, _: KnownScales) -> Iterator[Trial]:
        for values, detail in rewrite(b):
            yield Trial(a.values, values, f"b, {detail}, is a")
        for values, detail in rewrite(a):
            yield Trial(b.values, values, f"a, {detail}, is b")

    return trials


def on_parts(rewrite: Callable[[Parts], Iterable[tuple[Tensor, str]]]) -> Experiment:
    """The same for a rewriting of parts, on the sides that have them."""
    return rewritten(lambda subject: rewrite(subject.parts) if subject.parts else ())
