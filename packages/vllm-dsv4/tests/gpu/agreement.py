"""How far two models' predictions are apart, and how far apart is too far.

Never the largest difference: where rounding changes which expert or which compressed entry is
chosen, single logprobs move by units in a sound model too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Logprobs = NDArray[np.float32]


@dataclass(frozen=True)
class Agreement:
    """Of logprobs with a reference's, over all positions of all prompts.

    mean: of |difference| over the vocabulary, in nats. kl: mean KL(reference || other), in nats.
    top1: share of positions with the same most likely token. finite: no NaN and no Inf.
    """

    positions: int
    mean: float
    kl: float
    top1: float
    finite: bool

    def __str__(self) -> str:
        return (
            f"mean {self.mean:.4f}, KL {self.kl:.5f}, top-1 {self.top1:.4f}"
            f" ({self.positions} positions{'' if self.finite else ', NOT FINITE'})"
        )


@dataclass(frozen=True)
class Gate:
    """The bounds of an `Agreement`; README.md says where each comes from."""

    mean: float
    kl: float
    top1: float

    def loosened(self, factor: float) -> Gate:
        """For fewer positions, of which single ones weigh more."""
        return Gate(self.mean * factor, self.kl * factor, 1 - (1 - self.top1) * factor)

    def refusals(self, found: Agreement) -> list[str]:
        """What is beyond the bounds, a phrase each; empty for agreement."""
        refusals = [] if found.finite else ["not finite"]
        if not found.mean <= self.mean:
            refusals.append(f"mean {found.mean:.4f} > {self.mean}")
        if not found.kl <= self.kl:
            refusals.append(f"KL {found.kl:.5f} > {self.kl}")
        if not found.top1 >= self.top1:
            refusals.append(f"top-1 {found.top1:.4f} < {self.top1}")
        return refusals


def agreement(found: Sequence[Logprobs], reference: Sequence[Logprobs]) -> Agreement:
    """Both: natural logprobs ``[positions, vocabulary]`` of each prompt."""
    for one, other in zip(found, reference, strict=True):
        if one.shape != other.shape:
            raise ValueError(f"logprobs are {one.shape}, the reference's {other.shape}")
    ours, theirs = (np.concatenate(side).astype(np.float64) for side in (found, reference))
    finite = bool(np.isfinite(ours).all() and np.isfinite(theirs).all())
    kl = (np.exp(theirs) * (theirs - ours)).sum(axis=1)
    return Agreement(
        positions=len(ours),
        mean=float(np.abs(ours - theirs).mean()),
        kl=float(kl.mean()),
        top1=float((ours.argmax(axis=1) == theirs.argmax(axis=1)).mean()),
        finite=finite,
    )


#: Full NVFP4: BF16 activations before FP4 weights; the projection wo_a alone takes FP8 ones.
FULL = Gate(mean=0.11, kl=0.0038, top1=0.973)
#: The official FP8 linears as well: every projection of attention takes FP8 activations.
FP8 = Gate(mean=0.16, kl=0.006, top1=0.965)
#: `FULL` and `FULL` with wo_a in BF16, on the checkpoint whose attention counts four times.
HEAVY = Gate(mean=0.16, kl=0.009, top1=0.95)
HEAVY_BF16 = Gate(mean=0.075, kl=0.004, top1=0.965)
