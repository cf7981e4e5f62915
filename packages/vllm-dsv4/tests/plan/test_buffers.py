"""Buffers: the fused kernel's against DeepGEMM's own answers, the others by their terms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_dsv4.gpus import GIB, parse_gpus
from vllm_dsv4.plan import Deployment, Limits, released
from vllm_dsv4.plan.buffers import RING, buffers, mega_moe_buffer

ASKED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "symm_buffer.json").read_text()
)


@pytest.mark.parametrize("shape", RING, ids=str)
def test_the_fused_kernels_buffer_is_bounded_closely(shape: tuple[int, int]) -> None:
    rows = [row for row in ASKED if (row["hidden"], row["inner"]) == shape]
    assert len(rows) == 36
    for row in rows:
        actual = row.pop("bytes")
        assert actual <= mega_moe_buffer(**row) < 1.12 * actual, row
        if row["ranks"] >= 8 and row["tokens"] >= 8192:
            assert mega_moe_buffer(**row) < 1.02 * actual, row


def test_an_unknown_shape_gets_the_longest_ring() -> None:
    known = mega_moe_buffer(ranks=8, experts=384, tokens=8192, top_k=6, hidden=7168, inner=3072)
    other = mega_moe_buffer(ranks=8, experts=384, tokens=8192, top_k=6, hidden=7168, inner=2048)
    assert other > 3 * known


def test_context_and_step_size_move_the_right_terms() -> None:
    config, gpus, deployment = released("pro").schema.config, parse_gpus("H200:8"), Deployment(8)

    def of(**limits: Any) -> dict[str, int]:
        return buffers(config, gpus, deployment, Limits(**limits), 1024)

    base = of(max_model_len=1 << 20)
    short = of(max_model_len=1 << 16)
    small = of(max_model_len=1 << 20, max_num_batched_tokens=2048)
    assert short["activations"] == base["activations"] > small["activations"]
    assert short["attention workspace"] < small["attention workspace"]
    assert small["attention workspace"] < base["attention workspace"]
    assert base["allowance"] == 4 * GIB
    assert "MegaMoE buffer" not in base
    fused = Deployment(8, expert_parallel=True, mega_moe=True)
    with_fused = buffers(config, gpus, fused, Limits(1 << 20), 1024)
    assert with_fused["MegaMoE buffer"] == mega_moe_buffer(
        ranks=8, experts=384, tokens=8192, top_k=6, hidden=7168, inner=3072
    )
    assert with_fused["activations"] < base["activations"]


@pytest.mark.parametrize("context", [1 << 20, 1 << 18], ids=str)
def test_the_workspace(context: int) -> None:
    """The larger of what attention gathers and what the indexer does; scores; tables."""
    config, gpus = released("pro").schema.config, parse_gpus("H200:8")
    found = buffers(config, gpus, Deployment(8), Limits(context), 1024)["attention workspace"]
    gathered = 4 * (context // 4 + 128 + 8192) * 512 * 2 + 8192 * (1024 + 128 + 1) * 4
    keys = context * 8 * (2 if context > 1 << 18 else 5) // 4 * 132
    assert (keys > gathered) == (context == 1 << 18)
    scores, selected = 512 << 20, 8192 * 1024 * 4
    ratio_128 = 2 * 8192 * (context // 128) * 4
    assert found == max(keys, gathered) + scores + selected + ratio_128
