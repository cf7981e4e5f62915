"""Deliberate mistakes, made by the machine under an unchanged kernel: each one is noticed.

A lost signal ends in a failure record, in orderly fashion and on every rank that waited. A wait
that does not wait is seen by the machine, which knows what an access had to wait for. Content that
is stale without any disorder shows in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megamoe_kernel.failure import Failure
from megamoe_kernel.reference import RankTokens, mega_moe

H, I, E, K = 128, 128, 4, 2  # noqa: E741
#: Rings that wrap around, and CTAs that share the tasks of a block.
TILING = {"ring_rows": 32, "block_rows": 8, "wave_blocks": 2, "weight_rows": 64, "num_ctas": 3}
ROOMY = TILING | {"ring_rows": 1024}


@pytest.fixture(scope="module")
def layer(make_layer: Any) -> Any:
    return make_layer(E, H, I)


@pytest.fixture(scope="module")
def launches(make_tokens: Any) -> list[list[RankTokens]]:
    return [
        [make_tokens(24 + rank, H, E, K, "bf16", seed=10 * launch + rank) for rank in range(2)]
        for launch in range(2)
    ]


@pytest.fixture
def run(run_layer: Any, layer: Any, launches: Any) -> Any:
    def with_fault(fault: Any, tiling: dict[str, int] = TILING, seed: int = 0) -> Any:
        return run_layer(launches, layer.w13, layer.w2, "bf16", seed=seed, fault=fault, **tiling)

    return with_fault


def equal_to_reference(result: Any, launches: Any, layer: Any) -> bool:
    return all(
        torch.equal(y, y_ref)
        for outputs, ranks in zip(result.outputs, launches, strict=True)
        for y, y_ref in zip(
            outputs,
            mega_moe(ranks, layer.w13, layer.w2, activation="bf16", swiglu_limit=10.0),
            strict=True,
        )
    )


def blocks_of(ranks: Sequence[RankTokens], rank_idx: int) -> list[int]:
    """Tokens of each block of a rank, by the routing alone."""
    blocks: list[int] = []
    for expert in range(rank_idx * E // 2, (rank_idx + 1) * E // 2):
        rows = sum(int((tokens.topk_idx == expert).sum()) for tokens in ranks)
        while rows > 0:
            blocks.append(min(rows, 8))
            rows -= 8
    return blocks


@pytest.mark.parametrize("tiling", [TILING, ROOMY], ids=["wraps", "roomy"])
def test_without_a_fault_all_is_well(
    run: Any, launches: Any, layer: Any, tiling: dict[str, int]
) -> None:
    assert len(blocks_of(launches[0], 0)) > 4  # the smaller ring holds four
    result = run(None, tiling)
    assert result.ended_well
    assert equal_to_reference(result, launches, layer)


def failures(result: Any) -> list[Failure | None]:
    assert result.message == ""  # no thread was left behind at a barrier
    return list(result.failures)


@pytest.mark.parametrize(
    ("field", "stages"),
    [
        ("ring_arrived", {"L1"}),
        ("ring_l1_done", {"L2"}),
        ("ring_l2_done", {"fetch", "L1"}),  # L1 misses the tokens that fetch cannot bring
        ("counters", {"route"}),
    ],
)
def test_a_lost_arrival_is_reported_by_the_stage_that_waits(
    run: Any, field: str, stages: set[str]
) -> None:
    # A ring with room, except where the wait is for room. Rank 1 reports, too: by name.
    tiling = TILING if field == "ring_l2_done" else ROOMY
    here, there = failures(run(("drop signal", field, 0, 0), tiling))
    assert here is not None
    assert here.stage in stages
    assert here.rank == 0
    assert here.complete
    assert (here.tile is not None) == (field != "counters")
    assert there is not None
    assert (there.rank, there.peer) == (1, 0)


@pytest.mark.parametrize("nth", [0, 7, 20, 40])
def test_the_report_names_the_tile(run: Any, launches: Any, nth: int) -> None:
    # With one CTA a rank's tokens arrive in the order of its blocks.
    here, _ = failures(run(("drop signal", "ring_arrived", 0, nth), ROOMY | {"num_ctas": 1}))
    sizes = blocks_of(launches[0], 0)
    tile = next(i for i in range(len(sizes)) if nth < sum(sizes[: i + 1]))
    last = nth + 1 == sum(sizes[: tile + 1])  # it also counts the rows that stay empty
    assert here is not None
    assert (here.stage, here.tile, here.expected) == ("L1", tile, 8)
    assert here.found == (sizes[tile] - 1 if last else 7)
    assert f"rank 0 gave up in stage L1, tile {tile} " in str(here)


@pytest.mark.parametrize("kind", ["drop signal", "stale signal"])  # lost, or of the wrong phase
@pytest.mark.parametrize("nth", range(8))
def test_a_rank_that_does_not_signal_is_named(run: Any, kind: str, nth: int) -> None:
    # Two launches of two barriers, in each of which rank 0 signals to two ranks.
    found = failures(run((kind, "barrier", 0, nth)))
    stage = ("dispatch", "combine")[nth // 2 % 2]
    waiting = [failure for failure in found if failure and failure.peer == 0]
    assert any(failure.stage == stage and failure.found == nth // 4 for failure in waiting)


@pytest.mark.parametrize(
    "field", ["ring_arrived", "ring_l1_done", "ring_l2_done", "barrier", "counters"]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_missing_wait_is_seen(run: Any, field: str, seed: int) -> None:
    result = run(("skip wait", field, 0, 0), seed=seed)
    assert "rank 0 CTA" in result.message
    assert "without waiting for" in result.message or "nobody has written" in result.message
    if field == "ring_l2_done":  # the slot is taken from tokens that are still in use
        assert "warp 0 overwrites ring_" in result.message


def test_an_arrival_that_counts_twice_is_seen(run: Any) -> None:
    caught = [run(("double signal", "ring_arrived", 0, nth)).message for nth in range(4)]
    assert all("reads ring_" in message for message in caught)


def test_a_signal_to_the_device_only_is_seen(run: Any) -> None:
    # Rank 0 signals to itself and to rank 1, in either order: one of the two is too weak.
    messages = [run(("weak signal", "barrier", 0, nth)).message for nth in (0, 1)]
    assert (
        sum("rank 1 CTA" in message and "without waiting" in message for message in messages) == 1
    )


@pytest.mark.parametrize("field", ["ring_x", "ring_h", "slots"])
def test_stale_content_changes_the_result(run: Any, launches: Any, layer: Any, field: str) -> None:
    # In order, but the old content: the later a store, the more surely its slot is used again.
    result = run(("drop store", field, 0, 700))
    assert result.ended_well
    assert not equal_to_reference(result, launches, layer)


@pytest.mark.parametrize("field", ["routes", "route_count", "ring_source"])
def test_wrong_routes_do_not_pass(run: Any, launches: Any, layer: Any, field: str) -> None:
    result = run(("drop store", field, 0, 1))
    assert not (result.ended_well and equal_to_reference(result, launches, layer))


def test_a_run_depends_on_its_seed_alone(run: Any) -> None:
    fault = ("skip wait", "ring_arrived", 0, 0)
    messages = [run(fault, seed=seed).message for seed in (1, 1, 2, 3, 4)]
    assert messages[0] == messages[1]
    assert len(set(messages)) > 1
