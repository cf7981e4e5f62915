"""The Hopper kernel against the reference: shapes, tilings, odd counts, graphs, repeats."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megamoe_kernel import (
    SymmBuffer,
    fp8_nvfp4_mega_moe,
    get_symm_buffer_for_nvfp4_mega_moe,
    prepare_inputs,
    transform_nvfp4_weights_for_mega_moe,
)
from megamoe_kernel.models import MoEShape
from megamoe_kernel.reference import RankTokens, mega_moe
from megamoe_kernel.sm90_kernel import Tiling, all_tilings, run_sm90_layer
from megamoe_kernel.verify.cases import (
    CASES,
    PRO,
    TINY,
    Case,
    hot,
    masked,
    random_weights,
    spread,
)
from megamoe_kernel.verify.checks import (
    BOUNDS,
    SWIGLU_LIMIT,
    Load,
    Run,
    check_layer,
    inputs_of,
    public_layer,
)

pytest.importorskip("megamoe_kernel._native", reason="needs the compiled extension")

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True, scope="module")
def needs_hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


def _with(tiling: Tiling) -> Load:
    def load(*weights: object) -> Run:
        l1, l2 = transform_nvfp4_weights_for_mega_moe(*weights, arch="sm_90a")  # type: ignore[arg-type]

        def run(y: Tensor, buffer: SymmBuffer) -> None:
            run_sm90_layer(y, l1, l2, buffer, swiglu_limit=SWIGLU_LIMIT, tiling=tiling)

        return run

    return load


def _check(load: Load, cases: list[Case]) -> None:
    found = list(check_layer("sm_90a", load, "bf16", DEVICE, cases))
    assert len(found) == len(cases)
    assert [finding for finding in found if finding.status != "passed"] == []


def test_all_cases() -> None:
    _check(public_layer("sm_90a"), list(CASES))


@pytest.mark.parametrize("tiling", all_tilings(), ids=lambda tiling: f"{tiling.block_rows} rows")
def test_every_tiling_with_any_number_of_tokens(tiling: Tiling) -> None:
    _check(_with(tiling), [case for case in CASES if case.shape == TINY])


@pytest.mark.parametrize(
    "tiling",
    [tiling for tiling in all_tilings() if tiling.least < tiling.block_rows],
    ids=lambda tiling: f"{tiling.block_rows} rows",
)
def test_blocks_of_every_size(tiling: Tiling) -> None:
    """Each width of the products, and results that take one tile or two: all want expert 0."""
    tokens = [n for n in range(1, tiling.block_rows + 2) if n % 8 in (0, 1)]
    _check(_with(tiling), [Case(f"{n} tokens", TINY, n, hot) for n in tokens])


def test_many_tokens_of_pro() -> None:
    _check(public_layer("sm_90a"), [Case("Pro EP 8, 1100 tokens", PRO, 1100, spread)])


def test_sizes_of_the_tiny_model() -> None:
    """tests/assets/tiny-dsv4: one step of K in L2, a tiling for each of these numbers of tokens."""
    shape = MoEShape(16, 2, 256, 128)
    _check(public_layer("sm_90a"), [Case(f"{n}", shape, n, spread) for n in (1, 17, 257, 2600)])


@pytest.mark.parametrize("tokens", [0, 1, 33, 257])  # a tiling for each
def test_a_shared_expert(tokens: int) -> None:
    """A third of the slots is empty; the first token has no expert but the shared one."""
    w13, w2 = random_weights(TINY, DEVICE, 1)
    one = random_weights(replace(TINY, num_experts=1), DEVICE, 2)
    l1, l2 = transform_nvfp4_weights_for_mega_moe(w13, w2, arch="sm_90a")
    shared = transform_nvfp4_weights_for_mega_moe(*one, arch="sm_90a")
    x, ids, topk_weights = inputs_of(Case("", TINY, tokens, masked), DEVICE)
    topk_weights[ids == -1] = math.nan
    buffer = get_symm_buffer_for_nvfp4_mega_moe(
        num_experts=TINY.num_experts, num_max_tokens_per_rank=max(tokens, 1),
        num_topk=TINY.num_topk, hidden=TINY.hidden, intermediate=TINY.intermediate,
        activation="bf16", device=DEVICE,
    )  # fmt: skip
    results = []
    for _ in range(3):
        y = torch.full_like(x, math.nan)
        prepare_inputs(x, buffer, topk_idx=ids, topk_weights=topk_weights)
        fp8_nvfp4_mega_moe(
            y, l1, l2, buffer, activation="bf16", swiglu_limit=SWIGLU_LIMIT, shared=shared
        )
        assert buffer.failure() is None
        results.append(y)
    (expected,) = mega_moe(
        [RankTokens(x, ids, topk_weights)], w13, w2, activation="bf16",
        swiglu_limit=SWIGLU_LIMIT, shared=one,
    )  # fmt: skip
    if tokens:
        error = (results[0].double() - expected.double()).norm() / expected.double().norm()
        assert float(error) <= BOUNDS["bf16"]
    assert all(torch.equal(result, results[0]) for result in results[1:])
    buffer.destroy()


def test_tokens_one_to_33() -> None:
    _check(public_layer("sm_90a"), [Case(f"{n} tokens", TINY, n, spread) for n in range(1, 34)])


# With 700 tokens in a ring of three blocks CTAs draw their tasks, and ring slots are used again.
@pytest.mark.parametrize(("tokens", "ring_rows"), [(1, None), (64, None), (257, None), (700, 512)])
def test_repeats_and_replays_give_the_same_bits(tokens: int, ring_rows: int | None) -> None:
    case = Case(f"{tokens} tokens", TINY, tokens, spread)
    x, ids, topk_weights = inputs_of(case, DEVICE)
    buffer = get_symm_buffer_for_nvfp4_mega_moe(
        num_experts=TINY.num_experts, num_max_tokens_per_rank=tokens, num_topk=TINY.num_topk,
        hidden=TINY.hidden, intermediate=TINY.intermediate, activation="bf16", device=DEVICE,
        ring_rows=ring_rows,
    )  # fmt: skip
    run = public_layer("sm_90a")(*random_weights(TINY, DEVICE, 1))
    y = torch.full_like(x, math.nan)

    def launch() -> None:
        prepare_inputs(x, buffer, topk_idx=ids, topk_weights=topk_weights)
        run(y, buffer)

    launch()
    first = y.clone()
    assert bool(first.isfinite().all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for again in (launch, graph.replay):
        for _ in range(50):
            y.fill_(math.nan)  # what is not written must not look right
            again()
            assert torch.equal(y, first)
    assert buffer.failure() is None
    buffer.destroy()
