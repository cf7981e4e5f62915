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
#: Found with few tokens only: where several CTAs fetch a block's tokens, waiting for them orders
#: the beginnings of the pair's CTAs too.
FEW_TOKENS = "pair: the CTAs do not meet at the start"


@pytest.fixture(scope="module")
def layer(make_layer: Any) -> Any:
    return make_layer(E, H, I)


@pytest.fixture(scope="module")
def ranks(make_tokens: Any) -> list[RankTokens]:
    return [make_tokens(81 - 60 * i, H, E, K, "nvfp4", seed=i) for i in range(2)]


@pytest.fixture(scope="module")
def few(make_tokens: Any) -> list[RankTokens]:
    return [make_tokens(2 - i, H, E, K, "nvfp4", seed=i) for i in range(2)]


@pytest.fixture(scope="module")
def expected(layer: Any, ranks: list[RankTokens], few: list[RankTokens]) -> list[list[Tensor]]:
    """Of all tokens, of few."""
    return [
        mega_moe(each, layer.w13, layer.w2, activation="nvfp4", swiglu_limit=10.0)
        for each in (ranks, few)
    ]


@pytest.fixture
def numbers(mutants: list[str]) -> dict[str, int]:
    return {words: number for number, words in enumerate(mutants)}


@pytest.fixture
def run(
    run_sm100: Any,
    layer: Any,
    ranks: list[RankTokens],
    few: list[RankTokens],
    expected: list[list[Tensor]],
    mutants: list[str],
) -> Any:
    """Gives the result and its relative error."""

    def with_mutant(
        mutant: int, seed: int, has_few: bool = False, tiling: dict[str, int] | None = None
    ) -> tuple[Any, float]:
        if tiling is None:
            tiling = PAIR if mutants[mutant].startswith("pair") else ALONE
        has_few = has_few or mutants[mutant] == FEW_TOKENS
        result = run_sm100(
            [few if has_few else ranks], layer.w13, layer.w2, seed=seed, mutant=mutant, **tiling
        )
        return result, relative_error(result.outputs[0], expected[has_few])

    return with_mutant


def relative_error(outputs: list[Tensor], expected: list[Tensor]) -> float:
    y, y_ref = torch.cat(outputs).double(), torch.cat(expected).double()
    return float((y - y_ref).norm() / y_ref.norm())


def test_they_are_many_and_known_by_name(mutants: list[str]) -> None:
    assert sorted(mutants[1:]) == sorted(MUTANTS)
    assert len(MUTANTS) >= 40
    assert len(set(MUTANTS)) == len(MUTANTS)


@pytest.mark.parametrize("tiling", [ALONE, PAIR], ids=["alone", "pairs"])
@pytest.mark.parametrize("has_few", [False, True], ids=["many", "few"])
@pytest.mark.parametrize("seed", range(3))
def test_without_one_all_is_well(
    run: Any, seed: int, has_few: bool, tiling: dict[str, int]
) -> None:
    result, error = run(0, seed, has_few, tiling)
    assert result.ended_well, (result.message, result.failures)
    assert error <= BOUND


@pytest.mark.parametrize("words", MUTANTS)
def test_none_passes(run: Any, numbers: dict[str, int], words: str) -> None:
    result, error = run(numbers[words], seed=0)
    # Not less than: a NaN is a difference too.
    assert not (result.ended_well and error <= 10 * BOUND)
    if words in DISORDER:
        assert re.search(r"(rank|what rank) \d CTA \d warp \d.* \(\w+\.hpp:\d+\)$", result.message)


@pytest.mark.full
@pytest.mark.parametrize("words", MUTANTS)
def test_none_passes_under_any_seed(run: Any, numbers: dict[str, int], words: str) -> None:
    for seed in range(1, 12):
        result, error = run(numbers[words], seed=seed)
        assert not (result.ended_well and error <= 10 * BOUND), f"seed {seed}"


def test_early_topk_weights_are_seen_by_their_rounding_alone(
    run_sm100: Any, layer: Any, ranks: list[RankTokens], numbers: dict[str, int]
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
            for rank in ranks
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
