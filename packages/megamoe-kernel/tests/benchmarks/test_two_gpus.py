"""The benchmark of two GPUs compares layers that differ in nothing but who has the tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megamoe_kernel.models import MoEShape

FOLDER = Path(__file__).parents[2] / "benchmarks"
SHAPE = MoEShape(16, 3, 128, 128)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)  # it imports its neighbours
    spec = importlib.util.spec_from_file_location(
        "megamoe_benchmarks_two_gpus", FOLDER / "two_gpus.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_slots_that_cross_leave_every_expert_its_rows(two_gpus: ModuleType) -> None:
    own, crossing, rows = two_gpus.routings(SHAPE, 200, torch.Generator().manual_seed(0))
    counts = [
        torch.stack([(torch.cat(ids) == expert).sum() for expert in range(SHAPE.num_experts)])
        for ids in (own, crossing)
    ]
    assert torch.equal(*counts)
    for rank, (local, mixed) in enumerate(zip(own, crossing, strict=True)):
        assert bool((local // 8 == rank).all())
        assert int((mixed // 8 != rank).sum()) == rows
        assert all(len(set(token)) == SHAPE.num_topk for token in mixed.tolist())
    assert 250 < rows < 350  # of 600


def test_a_machine_without_two_gpus_is_named(
    two_gpus: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["two_gpus.py"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="2"):
        two_gpus.main()
    assert "needs two GPUs, this machine has 1" in capsys.readouterr().err
