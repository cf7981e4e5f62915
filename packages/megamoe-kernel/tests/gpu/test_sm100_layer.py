"""The Blackwell kernel against the reference: what a first run on a B200 should show.

Nothing here has run yet; docs/blackwell.md says what each failure would point to.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megamoe_kernel import (
    SymmBuffer,
    get_symm_buffer_for_nvfp4_mega_moe,
    prepare_inputs,
    transform_nvfp4_weights_for_mega_moe,
)
from megamoe_kernel.models import MoEShape
from megamoe_kernel.sm100_kernel import Tiling, all_tilings, pair_tilings, run_sm100_layer
from megamoe_kernel.verify.cases import CASES, TINY, Case, random_weights, spread
from megamoe_kernel.verify.checks import (
    SWIGLU_LIMIT,
    Load,
    Run,
    check_layer,
    inputs_of,
    public_layer,
)

pytest.importorskip("megamoe_kernel._native", reason="needs the compiled extension")

pytestmark = [pytest.mark.gpu, pytest.mark.blackwell]

DEVICE = torch.device("cuda", 0)
#: Half of a stage of K and no more; one stage; one and a half.
NARROW = [MoEShape(8, 2, 128, 128), MoEShape(8, 2, 256, 256), MoEShape(8, 2, 384, 384)]


@pytest.fixture(autouse=True, scope="module")
def needs_blackwell() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 10:
        pytest.skip("needs compute capability 10.x")


def _with(tiling: Tiling) -> Load:
    def load(*weights: object) -> Run:
        l1, l2 = transform_nvfp4_weights_for_mega_moe(*weights, arch="sm_100a")  # type: ignore[arg-type]

        def run(y: Tensor, buffer: SymmBuffer) -> None:
            run_sm100_layer(y, l1, l2, buffer, swiglu_limit=SWIGLU_LIMIT, tiling=tiling)

        return run

    return load


def _check(load: Load, cases: list[Case]) -> None:
    found = list(check_layer("sm_100a", load, "nvfp4", DEVICE, cases))
    assert len(found) == len(cases)
    assert [finding for finding in found if finding.status != "passed"] == []


@pytest.mark.parametrize("shape", NARROW, ids=lambda shape: f"{shape.hidden}")
def test_widths(shape: MoEShape) -> None:
    cases = [Case(f"{shape.hidden}, {n} tokens", shape, n, spread) for n in (1, 16, 65)]
    _check(public_layer("sm_100a"), cases)


def test_all_cases() -> None:
    _check(public_layer("sm_100a"), list(CASES))


@pytest.mark.parametrize(
    "tiling",
    [*all_tilings(), *pair_tilings()],
    ids=lambda tiling: f"{tiling.ctas} x {tiling.tiles} x {tiling.block_rows}",
)
def test_every_tiling_with_any_number_of_tokens(tiling: Tiling) -> None:
    _check(_with(tiling), [case for case in CASES if case.shape == TINY])


@pytest.mark.parametrize("tokens", [1, 64, 257])
def test_repeats_and_replays_give_the_same_bits(tokens: int) -> None:
    case = Case(f"{tokens} tokens", TINY, tokens, spread)
    x, ids, topk_weights = inputs_of(case, DEVICE)
    buffer = get_symm_buffer_for_nvfp4_mega_moe(
        num_experts=TINY.num_experts, num_max_tokens_per_rank=tokens, num_topk=TINY.num_topk,
        hidden=TINY.hidden, intermediate=TINY.intermediate, activation="nvfp4", device=DEVICE,
        ring_rows=512,
    )  # fmt: skip
    run = public_layer("sm_100a")(*random_weights(TINY, DEVICE, 1))
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
        for _ in range(1000):
            y.fill_(math.nan)  # what is not written must not look right
            again()
            assert torch.equal(y, first)
    assert buffer.failure() is None
    buffer.destroy()
