"""The neutral code on a GPU: one rank, two ranks that share it, and a rank that stays away."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megamoe_kernel import SymmBuffer, prepare_inputs, quantize_tokens
from megamoe_kernel.buffer_sizes import layer_layout
from megamoe_kernel.experts import ExpertWeights
from megamoe_kernel.models import MoEShape
from megamoe_kernel.prepare_kernel import has_kernel
from megamoe_kernel.reference import Activation, RankTokens, mega_moe
from megamoe_kernel.scalar_kernel import run_scalar_layer
from megamoe_kernel.verify.cases import CASES, TINY, random_weights
from megamoe_kernel.verify.checks import BOUNDS, SWIGLU_LIMIT, check_layer, scalar_layer

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
Ranks = list[SymmBuffer]
Inputs = tuple[Tensor, Tensor, Tensor]
ACTIVATIONS: tuple[Activation, ...] = ("nvfp4", "bf16")


@pytest.fixture(autouse=True, scope="module")
def needs_a_target() -> None:
    if not has_kernel(DEVICE):
        pytest.skip("needs compute capability 9.0, 10.0 or 10.3")


def _ranks(
    shape: MoEShape, activation: Activation, num_ranks: int, tokens: int
) -> list[SymmBuffer]:
    """Buffers of several ranks in one process, as if each had mapped the others' memory."""
    layout = layer_layout(shape, activation, num_ranks, tokens, 512)
    memory = [
        torch.zeros(layout.nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(num_ranks)
    ]
    peers = tuple(part.data_ptr() for part in memory)
    return [
        SymmBuffer(
            activation, shape.num_experts, tokens, shape.num_topk, shape.hidden,
            shape.intermediate, rank_idx, num_ranks, layout, peers, part,
        )
        for rank_idx, part in enumerate(memory)
    ]  # fmt: skip


def _inputs(
    shape: MoEShape, counts: Sequence[int], seed: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    inputs = []
    for count in counts:
        x = torch.randn(count, shape.hidden, generator=generator, device=DEVICE).bfloat16()
        scores = torch.rand(count, shape.num_experts, generator=generator, device=DEVICE)
        ids = scores.topk(shape.num_topk, -1).indices
        ids[::3, 0] = -1
        weights = torch.rand(count, shape.num_topk, generator=generator, device=DEVICE)
        inputs.append((x, ids, weights))
    return inputs


def _local(weights: ExpertWeights, rank_idx: int, num_ranks: int) -> ExpertWeights:
    count = weights.num_experts // num_ranks
    return weights.select(slice(rank_idx * count, (rank_idx + 1) * count))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_all_small_cases(activation: Activation) -> None:
    cases = [case for case in CASES if case.shape == TINY]
    found = list(check_layer("scalar", scalar_layer, activation, DEVICE, cases))
    assert len(found) == len(cases)
    assert [finding for finding in found if finding.status != "passed"] == []


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_two_ranks_on_one_gpu(activation: Activation) -> None:
    """Unequal and missing tokens, launch after launch in the same buffers."""
    w13, w2 = random_weights(TINY, DEVICE, 3)
    buffers = _ranks(TINY, activation, 2, 40)
    streams = [torch.cuda.Stream() for _ in buffers]
    for launch, counts in enumerate([(33, 7), (0, 40), (1, 0), (0, 0), (40, 40), (5, 19)]):
        inputs = _inputs(TINY, counts, launch)
        outputs = []
        for buffer, (x, ids, weights) in zip(buffers, inputs, strict=True):
            prepare_inputs(x, buffer, topk_idx=ids, topk_weights=weights)
            outputs.append(torch.full_like(x, float("nan")))
        torch.cuda.synchronize()
        for buffer, stream, y in zip(buffers, streams, outputs, strict=True):
            rank_idx = buffer.rank_idx
            l13, l2 = _local(w13, rank_idx, 2), _local(w2, rank_idx, 2)
            with torch.cuda.stream(stream):
                run_scalar_layer(y, l13, l2, buffer, swiglu_limit=SWIGLU_LIMIT, num_ctas=16)
        torch.cuda.synchronize()
        assert [buffer.failure() for buffer in buffers] == [None, None]
        ranks = [
            RankTokens(quantize_tokens(x) if activation == "nvfp4" else x, ids, weights)
            for x, ids, weights in inputs
        ]
        expected = mega_moe(ranks, w13, w2, activation=activation, swiglu_limit=SWIGLU_LIMIT)
        for y, wanted in zip(outputs, expected, strict=True):
            if y.numel():
                error = (y.double() - wanted.double()).norm() / wanted.double().norm()
                assert float(error) <= BOUNDS[activation]


def test_a_rank_that_stays_away_is_named() -> None:
    """The wait ends, and the record says who waited for whom."""
    w13, w2 = random_weights(TINY, DEVICE, 3)
    here, _ = _ranks(TINY, "bf16", 2, 8)
    ((x, ids, weights),) = _inputs(TINY, [8], 0)
    prepare_inputs(x, here, topk_idx=ids, topk_weights=weights)
    y = torch.empty_like(x)
    l13, l2 = _local(w13, 0, 2), _local(w2, 0, 2)
    run_scalar_layer(y, l13, l2, here, swiglu_limit=None, num_ctas=8, wait_limit=50_000_000)
    failure = here.failure()
    assert failure is not None
    assert (failure.rank, failure.peer, failure.stage) == (0, 1, "dispatch")
    assert "rank 0 gave up in stage dispatch" in str(failure)
    torch.cuda.synchronize()  # the context is unharmed
