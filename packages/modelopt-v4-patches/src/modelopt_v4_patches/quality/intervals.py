"""How sure a difference of two perplexities is: a paired block bootstrap.

Both models read the same tokens, so most of what makes text hard cancels in the difference.
Losses of neighbouring tokens are not independent, so blocks of tokens are drawn, not tokens.
Source: Künsch 1989, The Jackknife and the Bootstrap for General Stationary Observations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Losses = NDArray[np.float64]

BLOCK = 256
_DRAWS = 4000
_LEVEL = 0.95
_SEED = 20260


@dataclass(frozen=True)
class Difference:
    """Ours minus the reference's, and the percentile interval that holds 95 % of the draws."""

    value: float
    low: float
    high: float


def perplexity_difference(
    losses: Losses, reference: Losses, *, block: int = BLOCK, seed: int = _SEED
) -> Difference:
    """exp(mean loss) - exp(mean reference loss), both ``[windows, tokens]`` in nats.

    Blocks of ``block`` tokens within a window (the last may be shorter) are drawn with
    replacement, the same ones for both sides. Not finite if a loss is not.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # a broken model's losses may overflow
        ours, theirs = (np.exp(means) for means in _means(losses, reference, block, seed))
        value = float(np.exp(losses.mean()) - np.exp(reference.mean()))
        return _interval(value, ours - theirs)


def mean_difference(
    values: Losses, reference: Losses, *, block: int = BLOCK, seed: int = _SEED
) -> Difference:
    """mean - mean of the reference; drawn like `perplexity_difference`."""
    ours, theirs = _means(values, reference, block, seed)
    return _interval(float(values.mean() - reference.mean()), ours - theirs)


def _means(
    values: Losses, reference: Losses, block: int, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The means of each draw, ``[draws]`` for both sides."""
    if values.shape != reference.shape:
        raise ValueError(f"losses are {values.shape}, the reference's {reference.shape}")
    starts = np.arange(0, values.shape[1], block)
    sizes = np.tile(np.diff(np.append(starts, values.shape[1])), len(values))
    chosen = np.random.default_rng(seed).integers(len(sizes), size=(_DRAWS, len(sizes)))
    tokens = sizes[chosen].sum(axis=1)
    ours, theirs = (
        np.add.reduceat(side, starts, axis=1).reshape(-1)[chosen].sum(axis=1) / tokens
        for side in (values, reference)
    )
    return ours, theirs


def _interval(value: float, draws: NDArray[np.float64]) -> Difference:
    low, high = np.quantile(draws, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Difference(value, float(low), float(high))
