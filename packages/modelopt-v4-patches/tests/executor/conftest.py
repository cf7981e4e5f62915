"""A module that worker processes can import, and a checkpoint of five shards."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

HERE = str(Path(__file__).parent)


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module ``tasks``, found through sys.path, which spawned processes inherit."""
    monkeypatch.syspath_prepend(HERE)
    yield importlib.import_module("tasks")
    del sys.modules["tasks"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    weights = {}
    for i in range(5):
        tensors = {f"{i}.{j}": torch.full((64, 64), 10.0 * i + j) for j in range(4)}
        file = f"model-{i + 1:05}-of-00005.safetensors"
        save_file(tensors, folder / file)
        weights.update(dict.fromkeys(tensors, file))
    index = str({"weight_map": weights}).replace("'", '"')
    (folder / "model.safetensors.index.json").write_text(index)
    return folder
