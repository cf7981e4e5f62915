"""Healthy checkpoints of the tiny model in memory; tests break copies and examine them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_dsv4.doctor import Diagnosis, Examination, examine

NUM_EXPERTS = 4
TINY = Path(__file__).parents[4] / "tests" / "assets" / "tiny-dsv4"


@dataclass
class Content:
    """A checkpoint in memory: tensors, config.json, other small files as text."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)

    @property
    def quantization(self) -> dict[str, Any]:
        found: dict[str, Any] = self.config["quantization_config"]
        return found

    def raw(self, name: str) -> Tensor:
        """A tensor's bytes as stored; a change of them stays in this copy."""
        self.tensors[name] = self.tensors[name].clone()
        return self.tensors[name].reshape(-1).view(torch.uint8)

    def rename(self, old: str, new: str) -> None:
        """Every tensor whose name has ``old`` in it gets ``new`` there."""
        names = [name for name in self.tensors if old in name]
        assert names, old
        for name in names:
            self.tensors[name.replace(old, new)] = self.tensors.pop(name)

    def copy(self) -> Content:
        config: dict[str, Any] = json.loads(json.dumps(self.config))
        return Content(dict(self.tensors), config, dict(self.files))


Break: TypeAlias = Callable[[Content], None]
Check: TypeAlias = Callable[..., Examination]


def read(folder: Path) -> Content:
    """The content of a folder, cut down to a few experts for speed."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    for name in list(tensors):
        if (found := re.search(r"\.experts\.([0-9]+)\.", name)) and int(found[1]) >= NUM_EXPERTS:
            del tensors[name]
        elif name.endswith((".gate.weight", ".gate.bias", "e_score_correction_bias")):
            tensors[name] = tensors[name][:NUM_EXPERTS].clone()
        elif name.endswith("tid2eid"):
            tensors[name] %= NUM_EXPERTS
    config["n_routed_experts"] = NUM_EXPERTS
    names = ("tokenizer.json", "tokenizer_config.json")
    return Content(tensors, config, {name: (folder / name).read_text() for name in names})


def write(content: Content, folder: Path, shards: int = 1) -> Path:
    """A folder, with an index where there are several shards."""
    folder.mkdir(parents=True)
    names = sorted(content.tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        numbered = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        file = numbered if shards > 1 else "model.safetensors"
        part = {name: content.tensors[name].contiguous() for name in names[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(content.config))
    for name, text in content.files.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="session")
def writer() -> Callable[..., Path]:
    return write


@pytest.fixture(scope="session")
def healthy(checkpoint: Callable[..., Path]) -> Callable[..., Content]:
    """The content of a variant (see checkpoints.py, and "official") in a scheme of names."""
    made: dict[tuple[str, str], Content] = {}

    def give(variant: str = "full", scheme: str = "official") -> Content:
        key = variant, scheme
        if key not in made:
            made[key] = read(TINY if variant == "official" else checkpoint(variant, scheme))
        return made[key].copy()

    return give


@pytest.fixture(scope="session")
def tiny(healthy: Callable[..., Content], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The official checkpoint that all others are made from."""
    return write(healthy("official"), tmp_path_factory.mktemp("source") / "official")


@pytest.fixture
def check(healthy: Callable[..., Content], tmp_path: Path) -> Check:
    """Breaks a copy of a healthy checkpoint and examines it."""

    def run(
        change: Break,
        variant: str = "full",
        scheme: str = "official",
        *,
        reference: Path | None = None,
        shards: int = 1,
    ) -> Examination:
        content = healthy(variant, scheme)
        change(content)
        folder = write(content, tmp_path / "broken", shards)
        made = examine(folder, reference)
        shutil.rmtree(folder)
        return made

    return run


@pytest.fixture(scope="session")
def only() -> Callable[[Examination], Diagnosis]:
    """The one finding that a broken checkpoint must have."""

    def run(made: Examination) -> Diagnosis:
        assert len(made.findings) == 1, [(f.code, f.tensor) for f in made.findings]
        return made.findings[0]

    return run
