"""Faults of the neutral stages are seen in the layer for sm_100a too; see host/test_faults.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megamoe_kernel.reference import RankTokens, mega_moe

E, K, H, I = 4, 2, 384, 128  # noqa: E741
#: A ring that wraps around.
TILING = {"ring_rows": 256, "wave_blocks": 1, "num_ctas": 2}


@pytest.fixture(scope="module")
def layer(make_layer: Any) -> Any:
    return make_layer(E, H, I)


@pytest.fixture(scope="module")
def ranks(make_tokens: Any) -> list[RankTokens]:
    return [make_tokens(50 + i, H, E, K, "nvfp4", seed=i) for i in range(2)]


@pytest.fixture
def run(run_sm100: Any, layer: Any, ranks: list[RankTokens]) -> Any:
    def with_fault(fault: Any, seed: int = 0) -> Any:
        return run_sm100([ranks], layer.w13, layer.w2, seed=seed, fault=fault, **TILING)

    return with_fault


@pytest.mark.parametrize("field", ["ring_arrived", "ring_l1_done", "ring_l2_done", "barrier"])
@pytest.mark.parametrize("seed", range(2))
def test_a_missing_wait_is_seen(run: Any, field: str, seed: int) -> None:
    result = run(("skip wait", field, 0, 0), seed)
    assert "rank 0 CTA" in result.message
    assert "without waiting for" in result.message or "nobody has written" in result.message


@pytest.mark.parametrize("field", ["ring_arrived", "ring_l1_done", "ring_l2_done", "barrier"])
def test_a_lost_signal_ends_in_a_record(run: Any, field: str) -> None:
    result = run(("drop signal", field, 0, 0))
    assert result.message == ""
    assert any(result.failures)
    assert all(failure.complete for failure in result.failures if failure)


@pytest.mark.parametrize("seed", range(2))
def test_a_pair_meets_after_a_lost_signal_too(
    run_sm100: Any, make_layer: Any, make_tokens: Any, seed: int
) -> None:
    """Neither CTA ends before what the other one has begun in it."""
    layer = make_layer(E, 512, 256)
    ids = torch.tensor([0, 2]).repeat(140, 1)
    rank = replace(make_tokens(140, 512, E, K, "nvfp4"), topk_idx=ids)
    result = run_sm100(
        [[rank]], layer.w13, layer.w2, seed=seed, fault=("drop signal", "ring_l1_done", 0, 0),
        ring_rows=256, wave_blocks=1, num_ctas=2, ctas=2, block_rows=64, weight_rows=128,
    )  # fmt: skip
    assert result.message == ""
    assert any(result.failures)


@pytest.mark.parametrize("field", ["ring_x", "ring_x_sf", "ring_h", "ring_h_sf", "ring_x_scale"])
def test_stale_content_changes_the_result(
    run: Any, layer: Any, ranks: list[RankTokens], field: str
) -> None:
    result = run(("drop store", field, 0, 60))
    expected = mega_moe(ranks, layer.w13, layer.w2, activation="nvfp4", swiglu_limit=10.0)
    assert result.ended_well
    assert not all(torch.equal(y, w) for y, w in zip(result.outputs[0], expected, strict=True))


def test_a_run_depends_on_its_seed_alone(run: Any) -> None:
    fault = ("skip wait", "ring_l1_done", 0, 0)
    messages = [run(fault, seed).message for seed in (1, 1, 2, 3, 4)]
    assert messages[0] == messages[1]
    assert len(set(messages)) > 1
