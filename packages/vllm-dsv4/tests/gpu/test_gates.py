"""The gates let a sound GPU's rounding pass and stop damage; emulated, on the CPU.

`benchmarks/sensitivity.py` measures the same on all prompts, and README.md has its table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from . import texts
from .agreement import FP8, FULL, HEAVY, HEAVY_BF16, Agreement, Gate, Logprobs, agreement
from .damage import DAMAGE, Damage, damaged, rounded
from .reference import load_model, logprobs

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers', as it finds its peers

#: Of each gate, how the engines behind it round.
ROUNDING = {
    "full": (FULL, {"wo_a": "fp8"}),
    "fp8": (FP8, {"wo_a": "fp8", "linears": "fp8"}),
    "heavy": (HEAVY, {"wo_a": "fp8"}),
    "heavy, wo_a in BF16": (HEAVY_BF16, {}),
}
#: Each kind of damage, and a gate that stops it.
STOPPED = [
    ("one expert: nibbles exchanged", "full"),
    ("one expert: w1 and w3 exchanged", "full"),
    ("ratio-128 compressors: zero", "fp8"),
    ("sinks: zero", "heavy"),
    ("wo_a: 5 % noise", "heavy, wo_a in BF16"),
]


class Model:
    """A checkpoint's float32 model with its own predictions."""

    def __init__(self, folder: Path) -> None:
        self.net = load_model(folder)
        self.prompts = texts.prompts((300, 1300))
        self.sound = logprobs(self.net, self.prompts)

    def measured(self, rounding: dict[str, Any], damage: Damage | None = None) -> Agreement:
        context = nullcontext() if damage is None else damaged(self.net, damage)
        with context, rounded(self.net, **rounding):
            return agreement(logprobs(self.net, self.prompts), self.sound)


@pytest.fixture(scope="module")
def models(place: Callable[[str], Path]) -> Iterator[Callable[[str], Model]]:
    known: dict[str, Model] = {}

    def get(gate: str) -> Model:
        checkpoint = {"full": "full", "fp8": "official"}.get(gate, "heavy")
        if checkpoint not in known:
            known[checkpoint] = Model(place(checkpoint))
        return known[checkpoint]

    yield get
    known.clear()


@pytest.mark.parametrize("gate", ROUNDING)
def test_rounding_passes_with_room(gate: str, models: Callable[[str], Model]) -> None:
    bounds, rounding = ROUNDING[gate]
    found = models(gate).measured(rounding)
    assert not Gate(bounds.mean / 1.2, bounds.kl / 1.2, bounds.top1).refusals(found)


@pytest.mark.parametrize(("damage", "gate"), STOPPED, ids=[name for name, _ in STOPPED])
def test_damage_is_stopped(damage: str, gate: str, models: Callable[[str], Model]) -> None:
    bounds, rounding = ROUNDING[gate]
    assert bounds.refusals(models(gate).measured(rounding, DAMAGE[damage]))


def test_what_is_not_a_number_is_stopped(models: Callable[[str], Model]) -> None:
    sound: list[Logprobs] = models("full").sound
    broken = [sound[0].copy(), *sound[1:]]
    broken[0][5, 7] = float("nan")
    assert "not finite" in FULL.refusals(agreement(broken, sound))
