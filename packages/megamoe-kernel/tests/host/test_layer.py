"""The neutral device code on emulated ranks gives the reference's results, bit for bit.

One thing is made equal first: the contract leaves exp a relative error of 2^-21, so the reference
computes with the kernels' exp here. test_the_contract_holds_with_any_exp leaves it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe_kernel import QuantizedTokens
from megamoe_kernel.reference import Activation, RankTokens, mega_moe

ACTIVATIONS: tuple[Activation, ...] = ("nvfp4", "bf16")
BOUNDS = {"nvfp4": 2e-3, "bf16": 1e-3}  # docs/kernel-contract.md
H, I, E, K = 256, 128, 8, 2  # noqa: E741

Outputs = list[list[Tensor]]
Check = Callable[..., None]


@pytest.fixture
def check(run_layer: Any, emulated: Any, kernel_exp: None) -> Check:
    """Run launches under some seeds and compare every rank's output with the reference's."""

    def compare(
        launches: Sequence[Sequence[RankTokens]],
        layer: Any,
        activation: Activation,
        **options: Any,
    ) -> None:
        def run(launches: Any, w13: Any, w2: Any, **more: Any) -> Any:
            return run_layer(launches, w13, w2, activation, **more)

        emulated.compare(run, launches, layer, activation, **options)

    return compare


@pytest.fixture
def tokens(make_tokens: Any) -> Callable[..., list[RankTokens]]:
    """Every rank's tokens, in different numbers."""

    def make(counts: Sequence[int], activation: Activation, seed: int = 0) -> list[RankTokens]:
        return [
            make_tokens(count, H, E, K, activation, seed=100 * seed + i, masked=0.1)
            for i, count in enumerate(counts)
        ]

    return make


def route_all_to(tokens: RankTokens, experts: Sequence[int]) -> RankTokens:
    ids = torch.tensor(experts).expand(tokens.num_tokens, len(experts)).contiguous()
    return replace(tokens, topk_idx=ids)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("counts", [[21], [17, 30], [9, 0, 16, 5]], ids=str)
def test_ranks_compute_what_one_reference_does(
    check: Check, tokens: Any, make_layer: Any, counts: list[int], activation: Activation
) -> None:
    check([tokens(counts, activation)], make_layer(E, H, I), activation, seeds=range(3))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "case", ["hot expert", "one expert twice", "only -1", "no token at all", "one token"]
)
def test_routings_at_the_edge(
    check: Check, tokens: Any, make_layer: Any, case: str, activation: Activation
) -> None:
    counts = {"no token at all": [0, 0], "one token": [0, 1]}.get(case, [25, 12])
    experts = {"hot expert": (5, 6), "one expert twice": (5, 5), "only -1": (-1, -1)}.get(case)
    ranks = tokens(counts, activation)
    if experts is not None:
        ranks = [route_all_to(rank, experts) for rank in ranks]
    check([ranks], make_layer(E, H, I), activation, seeds=range(2))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_ring_wraps_around(
    check: Check, tokens: Any, make_layer: Any, activation: Activation
) -> None:
    # The smallest ring: four blocks, in NVFP4 with 128 rows of scales each. Each rank has some
    # 70 tokens for 4 experts in blocks of 8, so more than two generations.
    ring_rows = 512 if activation == "nvfp4" else 32
    check(
        [tokens([50, 30], activation)], make_layer(E, H, I), activation,
        seeds=range(8), ring_rows=ring_rows, block_rows=8, wave_blocks=2, num_ctas=3,
    )  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_launches_follow_each_other(
    check: Check, tokens: Any, make_layer: Any, activation: Activation
) -> None:
    # Ranks begin a launch while others are still in the one before; nothing is cleared between.
    counts = [[7, 12, 0, 3], [0, 5, 9, 9], [4, 4, 4, 4]]
    launches = [tokens(counts[i], activation, seed=i) for i in range(3)]
    check(launches, make_layer(E, H, I), activation, seeds=range(3))


@pytest.mark.parametrize(
    ("activation", "tiling"),
    [
        ("nvfp4", {"block_rows": 8, "num_ctas": 1, "wave_blocks": 1}),
        ("nvfp4", {"block_rows": 40, "num_ctas": 5}),
        ("nvfp4", {"block_rows": 256, "ring_rows": 512, "wave_blocks": 1}),
        ("bf16", {"block_rows": 64, "weight_rows": 64, "num_ctas": 3}),
        ("bf16", {"block_rows": 24, "weight_rows": 256, "wave_blocks": 5}),
    ],
    ids=str,
)
def test_tilings(
    check: Check, tokens: Any, make_layer: Any, activation: Activation, tiling: dict[str, int]
) -> None:
    check([tokens([30, 21], activation)], make_layer(E, H, I), activation, **tiling)


@pytest.mark.parametrize("topk", [6, 7, 13])  # combine has six slots under way at a time
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_many_experts_few_tokens(
    check: Check, make_tokens: Any, make_layer: Any, activation: Activation, topk: int
) -> None:
    ranks = [make_tokens(3, 128, 80, topk, activation, seed=i) for i in range(2)]
    check([ranks], make_layer(80, 128, 128), activation, block_rows=8, ring_rows=2048)


def test_slots_are_added_in_their_order(check: Check, make_tokens: Any, make_layer: Any) -> None:
    # Two that cancel, then a third: in any other order little of the third would be left.
    ranks = [make_tokens(8, H, E, 3, "bf16", seed=i) for i in range(2)]
    ranks = [route_all_to(rank, (5, 5, 2)) for rank in ranks]
    weights = torch.tensor([2.0**20, -(2.0**20), 1.0])
    ranks = [replace(rank, topk_weights=weights.repeat(8, 1)) for rank in ranks]
    check([ranks], make_layer(E, H, I), "bf16")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("limit", [10.0, 0.5, None])
def test_a_wider_layer_with_other_limits(
    check: Check, make_tokens: Any, make_layer: Any, activation: Activation, limit: float | None
) -> None:
    layer = make_layer(2, 384, 256, gain=3.0)
    ranks = [make_tokens(9, 384, 2, 1, activation, seed=i) for i in range(2)]
    check([ranks], layer, activation, limit=limit)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_shared_expert_sees_every_token(
    check: Check, tokens: Any, make_layer: Any, activation: Activation
) -> None:
    ranks = tokens([11, 0, 6, 3], activation)
    ranks[0] = route_all_to(ranks[0], (-1, -1))
    layer, shared = make_layer(E, H, I), make_layer(1, H, I, seed=7, largest=3.0)
    check([ranks], layer, activation, shared=shared, seeds=range(2))


def test_a_weight_beside_minus_one_is_not_read(check: Check, tokens: Any, make_layer: Any) -> None:
    ranks = tokens([20, 20], "bf16")
    for rank in ranks:
        rank.topk_weights[rank.topk_idx < 0] = float("nan")
    check([ranks], make_layer(E, H, I), "bf16")


def test_an_id_that_names_no_expert_is_left_out(
    run_layer: Any, kernel_exp: None, tokens: Any, make_layer: Any
) -> None:
    # The reference refuses it; a kernel must not write where it leads.
    layer, ranks = make_layer(E, H, I), tokens([20, 20], "bf16")
    expected = mega_moe(ranks, layer.w13, layer.w2, activation="bf16", swiglu_limit=10.0)
    for rank, wrong in zip(ranks, (E, -(2**40)), strict=True):
        rank.topk_idx[rank.topk_idx == -1] = wrong
    result = run_layer([ranks], layer.w13, layer.w2, "bf16")
    assert result.ended_well
    assert all(map(torch.equal, result.outputs[0], expected))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_contract_holds_with_any_exp(
    run_layer: Any, tokens: Any, make_layer: Any, activation: Activation
) -> None:
    layer, ranks = make_layer(E, H, I, gain=3.0), tokens([33, 20], activation)
    expected = mega_moe(ranks, layer.w13, layer.w2, activation=activation, swiglu_limit=10.0)
    result = run_layer([ranks], layer.w13, layer.w2, activation)
    for y, y_ref in zip(result.outputs[0], expected, strict=True):
        error = (y.float() - y_ref.float()).norm() / y_ref.float().norm()
        assert error <= BOUNDS[activation]


def test_a_wrong_result_would_be_seen(
    run_layer: Any, kernel_exp: None, tokens: Any, make_layer: Any
) -> None:
    # One code of one token flipped by one place: its row differs, and no other.
    layer, ranks = make_layer(E, H, I), tokens([12], "nvfp4")
    expected = mega_moe(ranks, layer.w13, layer.w2, activation="nvfp4", swiglu_limit=10.0)
    x = ranks[0].x
    assert isinstance(x, QuantizedTokens)
    x.codes[5, 17] ^= 1
    result = run_layer([ranks], layer.w13, layer.w2, "nvfp4")
    differs = (result.outputs[0][0] != expected[0]).any(dim=1)
    assert differs.nonzero().flatten().tolist() == [5]


@pytest.mark.full
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_under_many_more_seeds(
    check: Check, tokens: Any, make_layer: Any, activation: Activation
) -> None:
    ring_rows = 512 if activation == "nvfp4" else 32
    launches = [tokens([20, 9, 31], activation, seed=i) for i in range(2)]
    tiling = {"ring_rows": ring_rows, "block_rows": 8, "num_ctas": 3}
    launches = [[*ranks, tokens([4], activation, seed=9)[0]] for ranks in launches]
    check(launches, make_layer(E, H, I), activation, seeds=range(60), **tiling)
