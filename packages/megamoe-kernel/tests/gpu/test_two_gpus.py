"""Symmetric memory over NVLink, and the layer in it: one process for each GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megamoe_kernel.verify.checks import BOUNDS
from megamoe_kernel.verify.ranks import check_ranks, run_processes

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]

ABSENT_RANK = Path(__file__).with_name("absent_rank.py")


def test_two_ranks() -> None:
    """1000 launches with unequal and missing tokens, equal to the reference over both ranks."""
    found = check_ranks(2)
    assert len(found) == 8, (
        found
    )  # on each: buffers, two activations without tensor cores, the layer
    assert [finding for finding in found if finding.status != "passed"] == []


def _run(way: str, folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What the first ranks saw; see absent_rank.py."""
    outputs = run_processes(2, [sys.executable, str(ABSENT_RANK), str(folder), way], folder)
    paths = [folder / f"{rank_idx}.json" for rank_idx in range(ranks)]
    assert all(path.exists() for path in paths), "\n".join(outputs)
    return [json.loads(path.read_text()) for path in paths]


def _assert_right(launches: list[dict[str, Any]]) -> None:
    for launch in launches:
        assert launch["failure"] is None
        assert launch["error"] is not None
        assert launch["error"] <= BOUNDS["bf16"]


def _assert_names(launch: dict[str, Any], stage: str, rank: int, peer: int) -> None:
    """With a limit of one second; the rest is for the host."""
    failure = launch["failure"]
    assert failure is not None
    assert (failure["stage"], failure["rank"], failure["peer"]) == (stage, rank, peer)
    assert failure["complete"]
    assert f"rank {rank} gave up in stage {stage}" in failure["text"]
    assert failure["text"].endswith(f"of rank {peer}")
    assert 0.9 < launch["seconds"] < 4


@pytest.mark.hopper
def test_a_rank_that_stays_away_is_named_and_both_go_on(tmp_path: Path) -> None:
    """Rank 1 finds rank 0's tokens when it comes, and waits for its results in vain."""
    first, second = _run("late", tmp_path, 2)
    _assert_names(first["alone"], "dispatch", rank=0, peer=1)
    _assert_names(second["alone"], "combine", rank=1, peer=0)
    for rank in (first, second):
        assert rank["uncleared"]["failure"] == rank["alone"]["failure"]
        assert rank["uncleared"]["seconds"] < 0.5  # it returns at once
        _assert_right([*rank["before"], *rank["after"]])


@pytest.mark.hopper
def test_a_rank_that_died_is_named(tmp_path: Path) -> None:
    (rank,) = _run("dead", tmp_path, 1)
    _assert_right(rank["before"])
    _assert_names(rank["alone"], "dispatch", rank=0, peer=1)
