"""Official checkpoints to dequantize: the trained one in three shards, and random small ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nvfp4_codec.schemas.deepseek_v4 import ModelConfig, Schema

TINY = Path(__file__).resolve().parents[4] / "tests" / "assets" / "tiny-dsv4"
#: Sizes that are no multiple of 128 where they may be; a layer of each kind, and an MTP block.
SMALL = {
    "vocab_size": 64, "hidden_size": 160, "moe_intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "head_dim": 64, "q_lora_rank": 96, "o_lora_rank": 64, "o_groups": 2,
    "qk_rope_head_dim": 16, "n_routed_experts": 3, "num_experts_per_tok": 2, "num_hash_layers": 1,
    "compress_ratios": [0, 4, 128, 0], "index_n_heads": 2, "index_head_dim": 64,
}  # fmt: skip
_DTYPES = {
    "BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64, "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


def _random(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if dtype == torch.float8_e8m0fnu:
        return torch.randint(115, 128, shape, dtype=torch.uint8, generator=generator).view(dtype)
    if dtype == torch.float8_e4m3fn:  # every code but NaN, 0x7F and 0xFF
        code = torch.randint(0, 127, shape, dtype=torch.uint8, generator=generator)
        sign = torch.randint(0, 2, shape, dtype=torch.uint8, generator=generator)
        return (code | sign << 7).view(dtype)
    if dtype in (torch.int8, torch.int64):
        low, high = (-128, 128) if dtype == torch.int8 else (0, 3)
        return torch.randint(low, high, shape, dtype=dtype, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)


def write(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], n: int) -> Path:
    """Writes n shards of tensors dealt out one by one: a scale is never beside its weight."""
    folder.mkdir(parents=True)
    names = list(tensors)
    files = [f"model-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]
    for i, file in enumerate(files):
        save_file({name: tensors[name] for name in names[i::n]}, folder / file, {"format": "pt"})
    weight_map = {name: files[i % n] for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    return folder


def small_tensors(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Random tensors of every name, dtype and shape of the model."""
    generator = torch.Generator().manual_seed(5)
    specs = Schema(ModelConfig.from_dict(config)).tensors("official")
    return {s.name: _random(_DTYPES[s.dtype], s.shape, generator) for s in specs}


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The trained checkpoint of the repository, one file."""
    return TINY


@pytest.fixture(scope="session")
def tiny_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in three shards."""
    config = json.loads((TINY / "config.json").read_text())
    folder = tmp_path_factory.mktemp("tiny") / "official"
    return write(folder, load_file(TINY / "model.safetensors"), config, 3)


@pytest.fixture(scope="session")
def small_config() -> dict[str, Any]:
    """config.json of a random model, 60 times smaller."""
    config: dict[str, Any] = json.loads((TINY / "config.json").read_text())
    return {**config, **SMALL}


@pytest.fixture(scope="session")
def make_small(small_config: dict[str, Any]) -> Callable[..., Path]:
    """Writes that model into a folder, in four shards; ``change`` may spoil its tensors."""

    def make(folder: Path, change: Callable[[dict[str, Tensor]], None] | None = None) -> Path:
        tensors = small_tensors(small_config)
        if change is not None:
            change(tensors)
        return write(folder, tensors, small_config, 4)

    return make


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory, make_small: Callable[..., Path]) -> Path:
    """That model."""
    return make_small(tmp_path_factory.mktemp("small") / "official")
