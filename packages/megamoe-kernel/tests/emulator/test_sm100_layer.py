"""The layer for sm_100a, its very source under the emulator, gives the reference's results.

In every bit, which the contract does not ask for: its sums are rounded 64 products at a time, and a
sum next to a rounding threshold may come out as the neighbour. For these inputs none does, so any
other difference is a mistake. test_the_contract_holds leaves the reference's exp alone and asks for
the contract's bound, over many seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from megamoe_kernel.experts import as_w2
from megamoe_kernel.reference import RankTokens, mega_moe
from nvfp4_codec import dequantize_nvfp4, quantize_nvfp4

#: Values of the codes; the upper eight are negative.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E2M1 = torch.cat((E2M1, -E2M1))
BOUND = 2e-3  # docs/kernel-contract.md
E, K = 8, 2
#: hidden, intermediate: a stage of K is 256, so the last one is half full, or the only one is.
SIZES = [(384, 128), (512, 256)]
#: One MMA of 128 rows and one box of tokens; two of each; two chunks of tokens' scales; one pair
#: of CTAs and two, and one with two chunks.
TILINGS: dict[str, dict[str, int]] = {
    "16 tokens": {"block_rows": 16, "weight_rows": 128},
    "2 x 32 tokens": {"block_rows": 32, "weight_rows": 256},
    "144 tokens": {"block_rows": 144, "weight_rows": 128, "ring_rows": 2048},
    "pairs, 64 tokens": {"block_rows": 64, "weight_rows": 128, "num_ctas": 2, "ctas": 2},
    "two pairs, 64 tokens": {"block_rows": 64, "weight_rows": 128, "num_ctas": 4, "ctas": 2},
    "pairs, 160 tokens": {
        "block_rows": 160, "weight_rows": 128, "num_ctas": 2, "ring_rows": 2048, "wave_blocks": 1,
        "ctas": 2,
    },
}  # fmt: skip
#: Those of the real kernels, with their 512 threads, as many as the clocks have room for.
REAL_TILINGS: dict[str, tuple[list[int], dict[str, int]]] = {
    "2 x 16 tokens": ([50, 33], {"block_rows": 16, "weight_rows": 256, "num_ctas": 1}),
    "2 x 112 tokens": ([150, 33], {"block_rows": 112, "weight_rows": 256, "num_ctas": 1}),
    "224 tokens": (
        [250, 33], {"block_rows": 224, "weight_rows": 128, "num_ctas": 1, "ring_rows": 2048},
    ),
    "pairs, 224 tokens": (
        [300],
        {"block_rows": 224, "weight_rows": 128, "num_ctas": 2, "ring_rows": 2048, "ctas": 2},
    ),
}  # fmt: skip

Check = Callable[..., None]


@pytest.fixture
def check(run_sm100: Any, emulated: Any, kernel_exp: None) -> Check:
    """Run launches under some seeds and compare every rank's output with the reference's."""

    def compare(launches: Sequence[Sequence[RankTokens]], layer: Any, **options: Any) -> None:
        emulated.compare(run_sm100, launches, layer, "nvfp4", **options)

    return compare


@pytest.fixture
def tokens(make_tokens: Any) -> Callable[..., list[RankTokens]]:
    """Every rank's tokens, in different numbers."""

    def make(counts: Sequence[int], hidden: int, seed: int = 0) -> list[RankTokens]:
        return [
            make_tokens(count, hidden, E, K, "nvfp4", seed=100 * seed + i, masked=0.1)
            for i, count in enumerate(counts)
        ]

    return make


def route_all_to(tokens: RankTokens, experts: Sequence[int]) -> RankTokens:
    ids = torch.tensor(experts).expand(tokens.num_tokens, len(experts)).contiguous()
    return replace(tokens, topk_idx=ids)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("counts", [[21], [17, 40], [9, 0, 16, 5]], ids=str)
def test_ranks_compute_what_one_reference_does(
    check: Check, tokens: Any, make_layer: Any, counts: list[int], size: tuple[int, int]
) -> None:
    num_ctas = 3 if len(counts) < 3 else 1
    check([tokens(counts, size[0])], make_layer(E, *size), seeds=range(2), num_ctas=num_ctas)


@pytest.mark.parametrize("tiling", TILINGS.values(), ids=TILINGS)
def test_tilings(check: Check, tokens: Any, make_layer: Any, tiling: dict[str, int]) -> None:
    check([tokens([50, 33], 512)], make_layer(E, 512, 256), seeds=range(2), **tiling)


def test_requantization_code_by_code(run_sm100: Any, make_layer: Any, make_tokens: Any) -> None:
    """w2 is the identity, so that a result is one value of the intermediate; codes and scales are
    told from it and compared with those of SwiGLU in double, where no tie is near."""
    hidden, intermediate, limit = 384, 128, 10.0
    layer = make_layer(1, hidden, intermediate)
    identity = torch.eye(intermediate).repeat(hidden // intermediate, 1)
    w2 = replace(as_w2([quantize_nvfp4(identity)]), input_scale=layer.w2.input_scale)
    tokens = make_tokens(40, hidden, 1, 1, "nvfp4")
    tokens = replace(tokens, topk_weights=torch.ones(40, 1))
    result = run_sm100([[tokens]], layer.w13, w2, limit=limit)
    assert result.ended_well
    found = result.outputs[0][0][:, :intermediate].double()

    x = tokens.x
    values = E2M1[torch.stack((x.codes & 15, x.codes >> 4), -1).flatten(1).long()]
    values = values * x.block_scale.double().repeat_interleave(16, 1) * x.scale.double()[:, None]
    gate, up = (
        values @ dequantize_nvfp4(*w, dtype=torch.float32).double().T for w in layer.gate_up[0]
    )
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    h = (gate * gate.sigmoid() * up).unflatten(1, (-1, 16))
    unit = float(w2.input_scale)
    exact_scale = h.abs().amax(-1, keepdim=True) / 6 / unit
    scale = exact_scale.to(torch.float8_e4m3fn).double()
    near = (exact_scale * (1 + 1e-4)).to(torch.float8_e4m3fn).double() != scale
    near |= (exact_scale * (1 - 1e-4)).to(torch.float8_e4m3fn).double() != scale
    ratio = h / (scale * unit)
    middles = (E2M1[:7] + E2M1[1:8]) / 2
    near = near | ((ratio.abs().unsqueeze(-1) - middles).abs() < 1e-3).any(-1)
    codes = (ratio.abs().unsqueeze(-1) - E2M1[:8]).abs().argmin(-1)
    told = found.unflatten(1, (-1, 16)) / (scale * unit)  # a code, but for BF16's rounding
    expected = E2M1[codes] * ratio.sign()
    assert near.double().mean() < 0.05
    assert torch.allclose(told[~near], expected[~near], rtol=1 / 128, atol=1e-6)
    assert len(codes[~near].unique()) == 8


@pytest.mark.parametrize("name", REAL_TILINGS)
def test_tilings_of_the_real_kernels(check: Check, tokens: Any, make_layer: Any, name: str) -> None:
    counts, tiling = REAL_TILINGS[name]
    ranks = [route_all_to(rank, [1, 6]) for rank in tokens(counts, 512)]
    check([ranks], make_layer(E, 512, 256), **tiling)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        pytest.param(
            name, counts, marks=[] if in_short else pytest.mark.full, id=f"{name}-{counts}"
        )
        for name, counts, in_short in (
            ("pairs, 64 tokens", [200], True),
            ("pairs, 64 tokens", [97, 0], True),
            ("pairs, 64 tokens", [1, 33], True),
            ("two pairs, 64 tokens", [200], False),
            ("two pairs, 64 tokens", [97, 0], True),
            ("two pairs, 64 tokens", [1, 33], False),
            ("pairs, 160 tokens", [200], True),
            ("pairs, 160 tokens", [97, 0], False),
            ("pairs, 160 tokens", [1, 33], False),
        )
    ],
)
def test_pairs_share_tokens(
    check: Check, tokens: Any, make_layer: Any, name: str, counts: list[int]
) -> None:
    # All to two experts: blocks of every fill, also of a single box for one of the two CTAs.
    ranks = [route_all_to(rank, [2, 6]) for rank in tokens(counts, 768)]
    check([ranks, ranks], make_layer(E, 768, 384), **TILINGS[name])


@pytest.mark.parametrize("name", ["pairs, 64 tokens", "two pairs, 64 tokens"])
def test_pairs_wrap_around_the_ring(check: Check, tokens: Any, make_layer: Any, name: str) -> None:
    ranks = [route_all_to(rank, [0, 5]) for rank in tokens([140, 60], 512)]
    tiling = TILINGS[name] | {"ring_rows": 256, "wave_blocks": 1}
    check([ranks], make_layer(E, 512, 256), seeds=range(2), **tiling)


@pytest.mark.parametrize(
    "case", ["hot expert", "one expert twice", "only -1", "no token at all", "one token"]
)
def test_routings_at_the_edge(check: Check, tokens: Any, make_layer: Any, case: str) -> None:
    ranks = tokens([40, 7], 384)
    if case == "hot expert":
        ranks = [route_all_to(rank, [1, 6]) for rank in ranks]
    elif case == "one expert twice":
        ranks = [route_all_to(rank, [5, 5]) for rank in ranks]
    elif case == "only -1":
        ranks = [route_all_to(rank, [-1, -1]) for rank in ranks]
    elif case == "no token at all":
        ranks = tokens([0, 0], 384)
    else:
        ranks = tokens([0, 1], 384)
    check([ranks], make_layer(E, 384, 128), seeds=range(2))


@pytest.mark.parametrize("seed", range(3))
def test_the_ring_wraps_around(check: Check, tokens: Any, make_layer: Any, seed: int) -> None:
    # Two places for blocks, and each rank has five or more.
    ranks = [route_all_to(rank, [0, 5]) for rank in tokens([40, 30], 384, seed)]
    check([ranks], make_layer(E, 384, 128), seeds=[seed], ring_rows=256, wave_blocks=1)


def test_a_block_in_two_chunks_of_scales(check: Check, tokens: Any, make_layer: Any) -> None:
    # 144 tokens: the scale words of tokens 128 and on are in a chunk of their own.
    ranks = [route_all_to(rank, [2, 6]) for rank in tokens([100, 40], 384)]
    check([ranks], make_layer(E, 384, 128), **TILINGS["144 tokens"])


def test_launches_follow_each_other(check: Check, tokens: Any, make_layer: Any) -> None:
    launches = [tokens([9, 21], 384, seed) for seed in range(3)]
    check(launches, make_layer(E, 384, 128))


def test_a_shared_expert(check: Check, tokens: Any, make_layer: Any) -> None:
    shared = make_layer(1, 384, 128, seed=7, largest=3.0)
    check([tokens([18, 5], 384)], make_layer(E, 384, 128), shared=shared)


def test_without_a_clamp(check: Check, tokens: Any, make_layer: Any) -> None:
    check([tokens([18, 5], 384)], make_layer(E, 384, 128), limit=None)


@pytest.mark.full
@pytest.mark.parametrize("name", ["16 tokens", "pairs, 64 tokens"])
def test_the_width_of_flash(run_sm100: Any, make_tokens: Any, make_layer: Any, name: str) -> None:
    # 16 stages of K in L1, so sums are rounded 64 times: the bound, not the bits.
    layer, ranks = make_layer(2, 4096, 2048), [make_tokens(20, 4096, 2, 1, "nvfp4")]
    result = run_sm100([ranks], layer.w13, layer.w2, **TILINGS[name])
    assert result.ended_well, (result.message, result.failures)
    (y_ref,) = mega_moe(ranks, layer.w13, layer.w2, activation="nvfp4", swiglu_limit=10.0)
    (y,) = result.outputs[0]
    assert float((y.double() - y_ref.double()).norm() / y_ref.double().norm()) <= BOUND


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_the_contract_holds(run_sm100: Any, tokens: Any, make_layer: Any, seed: int) -> None:
    layer = make_layer(E, 512, 256, seed=seed)
    name = list(TILINGS)[seed % len(TILINGS)]
    launches = [tokens([30 + seed, seed], 512, seed), tokens([seed, 16], 512, seed + 50)]
    result = run_sm100(launches, layer.w13, layer.w2, seed=seed, **TILINGS[name])
    assert result.ended_well, (result.message, result.failures)
    for got, ranks in zip(result.outputs, launches, strict=True):
        want = mega_moe(ranks, layer.w13, layer.w2, activation="nvfp4", swiglu_limit=10.0)
        y, y_ref = torch.cat(got).double(), torch.cat(want).double()
        assert float((y - y_ref).norm() / y_ref.norm()) <= BOUND
