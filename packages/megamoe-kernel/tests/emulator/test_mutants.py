"""No mistake in what the kernel's instructions do passes, and the tests would see each of them.

The mistakes are made by the emulator between a call and its effect (csrc/emulator/mutants.hpp), as
if the source had said something else. What cannot be seen in the result, because chance was kind,
has to be seen as disorder: a missing wait or fence is found under every seed.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe_kernel.reference import RankTokens, mega_moe

HEADER = Path(__file__).parents[2] / "csrc" / "emulator" / "mutants.hpp"
MUTANTS: list[str] = re.findall(r'X\(k\w+, "([^"]+)"\)', HEADER.read_text())
BOUND = 2e-3  # docs/kernel-contract.md
E, K, H, I = 4, 2, 768, 384  # noqa: E741
#: Two tiles of weights, two boxes of tokens, stages that are used again, a half full last stage.
ALONE = {"block_rows": 32, "weight_rows": 256, "num_ctas": 1}
#: Two pairs of CTAs, two boxes of tokens in each CTA.
PAIR = {"block_rows": 64, "weight_rows": 128, "num_ctas": 4, "ctas": 2}
#: Found as a conflict, not by what it does to the result.
DISORDER = [
    words
    for words in MUTANTS
    if re.search(
        r"not (wait|meet)|fence|in place of a commit|before the last warp|without its tokens", words
    )
]
#: Four CTAs, of which three have a task of L1 of the only block.
FOUR = ALONE | {"num_ctas": 4}
#: Found in cases of their own: where several CTAs fetch a block's tokens, waiting for them orders
#: the beginnings of a pair's CTAs too; and where every CTA has a task of L1 of a block, its
#: epilogue has waited for all that L2's reads.
CASES: dict[str, tuple[str, dict[str, int] | None]] = {
    "pair: the CTAs do not meet at the start": ("few", None),
    "epilogue does not wait for the intermediate of its block": ("one block", FOUR),
}
#: Those that are not a pair's alone, but made in a pair's run too: in each of its parts one, and
#: those of waits and of tensor memory, which a pair shares in another way.
IN_PAIRS = [
    "copies do not wait for a free stage",
    "products do not wait for a free accumulator",
    "wrong phase of full sums",
    "sums are free before the last warp has read them",
    "a stage is freed by an arrival in place of a commit",
    "no tcgen05 fence after a wait",
    "tokens: another ring slot",
    "scale chunk not advanced in shared memory",
    "scale format UE8M0",
    "gate and up swapped",
    "epilogue does not wait for the tokens of its block",
    "warps do not wait for tensor memory to be allocated",
    "tensor memory freed by a warp that does not wait for the others",
]
ALSO_IN_PAIRS = [w for w in MUTANTS if not w.startswith("pair") and w not in CASES]


@pytest.fixture(scope="module")
def layer(make_layer: Any) -> Any:
    return make_layer(E, H, I)


@pytest.fixture(scope="module")
def inputs(make_tokens: Any) -> dict[str, list[RankTokens]]:
    """Both ranks' tokens: many, few, and those of one expert of each rank."""

    def ranks(*counts: int) -> list[RankTokens]:
        return [make_tokens(n, H, E, K, "nvfp4", seed=i) for i, n in enumerate(counts)]

    ids = torch.tensor([0, E // 2]).repeat(12, 1)
    alike = [replace(rank, topk_idx=ids) for rank in ranks(12, 12)]
    return {"many": ranks(81, 21), "few": ranks(2, 1), "one block": alike}


@pytest.fixture(scope="module")
def expected(layer: Any, inputs: dict[str, list[RankTokens]]) -> dict[str, list[Tensor]]:
    return {
        name: mega_moe(ranks, layer.w13, layer.w2, activation="nvfp4", swiglu_limit=10.0)
        for name, ranks in inputs.items()
    }


@pytest.fixture
def numbers(mutants: list[str]) -> dict[str, int]:
    return {words: number for number, words in enumerate(mutants)}


@pytest.fixture
def run(
    run_sm100: Any,
    layer: Any,
    inputs: dict[str, list[RankTokens]],
    expected: dict[str, list[Tensor]],
    mutants: list[str],
) -> Any:
    """Gives the result and its relative error."""

    def with_mutant(
        mutant: int, seed: int, name: str | None = None, tiling: dict[str, int] | None = None
    ) -> tuple[Any, float]:
        own_name, own_tiling = CASES.get(mutants[mutant], ("many", None))
        of_kind = PAIR if mutants[mutant].startswith("pair") else ALONE
        name, tiling = name or own_name, tiling or own_tiling or of_kind
        result = run_sm100([inputs[name]], layer.w13, layer.w2, seed=seed, mutant=mutant, **tiling)
        return result, relative_error(result.outputs[0], expected[name])

    return with_mutant


def relative_error(outputs: list[Tensor], expected: list[Tensor]) -> float:
    y, y_ref = torch.cat(outputs).double(), torch.cat(expected).double()
    return float((y - y_ref).norm() / y_ref.norm())


def test_they_are_many_and_known_by_name(mutants: list[str]) -> None:
    assert sorted(mutants[1:]) == sorted(MUTANTS)
    assert len(MUTANTS) >= 40
    assert len(set(MUTANTS)) == len(MUTANTS)


def is_caught(result: Any, error: float) -> bool:
    # Not less than: a NaN is a difference too.
    return not (result.ended_well and error <= 10 * BOUND)


def check_caught(words: str, result: Any, error: float) -> None:
    assert is_caught(result, error)
    if words in DISORDER:
        # Where it is in the kernel; in the neutral stages what of the buffer it is about.
        place = r"(\(\w+\.hpp:\d+\)|\w+\[\d+\] of rank \d without waiting for .*)$"
        assert re.search(rf"(rank|what rank) \d CTA \d warp \d.* {place}", result.message)


@pytest.mark.parametrize(
    ("name", "tiling"),
    [("many", ALONE), ("many", PAIR), ("few", PAIR), ("one block", FOUR)],
    ids=["alone", "pairs", "few", "one block"],
)
@pytest.mark.parametrize("seed", range(2))
def test_without_one_all_is_well(run: Any, seed: int, name: str, tiling: dict[str, int]) -> None:
    result, error = run(0, seed, name, tiling)
    assert result.ended_well, (result.message, result.failures)
    assert error <= BOUND


@pytest.mark.parametrize("words", MUTANTS)
def test_none_passes(run: Any, numbers: dict[str, int], words: str) -> None:
    check_caught(words, *run(numbers[words], seed=0))


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, marks=[] if words in IN_PAIRS else pytest.mark.full)
        for words in ALSO_IN_PAIRS
    ],
)
def test_none_passes_in_pairs(run: Any, numbers: dict[str, int], words: str) -> None:
    assert set(IN_PAIRS) <= set(ALSO_IN_PAIRS)
    check_caught(words, *run(numbers[words], seed=0, tiling=PAIR))


@pytest.mark.full
@pytest.mark.parametrize("words", MUTANTS)
def test_none_passes_under_any_seed(run: Any, numbers: dict[str, int], words: str) -> None:
    for seed in range(1, 12):
        assert is_caught(*run(numbers[words], seed=seed)), f"seed {seed}"


@pytest.mark.full
@pytest.mark.parametrize("words", ALSO_IN_PAIRS)
def test_none_passes_in_pairs_under_any_seed(run: Any, numbers: dict[str, int], words: str) -> None:
    for seed in range(1, 6):
        assert is_caught(*run(numbers[words], seed=seed, tiling=PAIR)), f"seed {seed}"


def test_early_topk_weights_are_seen_by_their_rounding_alone(
    run_sm100: Any, layer: Any, inputs: dict[str, list[RankTokens]], numbers: dict[str, int]
) -> None:
    # No disorder, and nothing wrong but the requantization, which a power of two does not change as
    # long as no block scale is too large.
    mutant = numbers["top-k weights before requantization, not in combine"]
    w2 = replace(layer.w2, input_scale=torch.tensor(10.0**2 / 2688))
    errors = []
    for all_alike in (False, True):
        weighted = [
            replace(rank, topk_weights=torch.full_like(rank.topk_weights, 0.5))
            if all_alike
            else rank
            for rank in inputs["many"]
        ]
        result = run_sm100([weighted], layer.w13, w2, mutant=mutant, **ALONE)
        assert result.ended_well, (result.message, result.failures)
        expected = mega_moe(weighted, layer.w13, w2, activation="nvfp4", swiglu_limit=10.0)
        errors.append(relative_error(result.outputs[0], expected))
    assert 10 * BOUND < errors[0] < 0.5
    assert errors[1] <= BOUND


def test_a_device_build_has_no_mutants() -> None:
    source = Path(__file__).parents[2] / "src" / "megamoe_kernel" / "include"
    for path in source.rglob("*"):
        if path.is_file():
            assert "mutant" not in path.read_text().lower(), path
