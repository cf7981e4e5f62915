"""Official checkpoints in several shards, and snapshots as modelopt would leave them."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelopt_v4_patches.snapshot import Snapshot, config_sha256
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig, Schema

TINY = Path(__file__).parents[4] / "tests" / "assets" / "tiny-dsv4"
Amax = Mapping[str, float | None]

#: The smallest model with every kind of tensor: runs of it take milliseconds.
SMALL = {
    "num_hidden_layers": 2, "compress_ratios": [4, 128, 0], "hidden_size": 128, "vocab_size": 32,
    "num_attention_heads": 2, "head_dim": 64, "q_lora_rank": 64, "o_lora_rank": 64,
    "n_routed_experts": 2, "moe_intermediate_size": 64, "index_n_heads": 2, "index_head_dim": 32,
}  # fmt: skip


def _write(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], n: int) -> Path:
    """A checkpoint folder whose shards tear apart what belongs together."""
    folder.mkdir(parents=True)
    names = sorted(tensors, key=lambda name: (name[::-1], name))
    weight_map = {}
    for i in range(n):
        file = f"model-{i + 1:05d}-of-{n:05d}.safetensors"
        part = names[i::n]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    return folder


def tiny_config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((TINY / "config.json").read_text())
    return config


def _small(
    folder: Path, change: Callable[[dict[str, Tensor]], None] | None = None, **keys: Any
) -> Path:
    """A random official checkpoint in three shards. keys: other entries of config.json."""
    config = {**tiny_config(), **SMALL, **keys}
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for name, dtype, shape in Schema(ModelConfig.from_dict(config)).tensors("official"):
        values = torch.randn(shape, generator=generator)
        raw = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        tensors[name] = _stored(dtype, values, raw)
    if change is not None:
        change(tensors)
    return _write(folder, tensors, config, 3)


def _stored(dtype: str, values: Tensor, raw: Tensor) -> Tensor:
    match dtype:
        case "I8":
            return raw.view(torch.int8)
        case "F8_E8M0":
            return (raw % 6 + 118).view(torch.float8_e8m0fnu)
        case "F8_E4M3":
            return (values * 64).to(torch.float8_e4m3fn)
        case "BF16":
            return (values * 0.1).bfloat16()
        case "I64":
            return raw.long() % 2
    return values


def _split(folder: Path, change: Callable[[dict[str, Tensor]], None] | None = None) -> Path:
    """The trained tiny checkpoint in five shards."""
    tensors = load_file(TINY / "model.safetensors")
    if change is not None:
        change(tensors)
    return _write(folder, tensors, tiny_config(), 5)


@pytest.fixture(scope="session")
def split() -> Callable[..., Path]:
    return _split


@pytest.fixture(scope="session")
def small() -> Callable[..., Path]:
    return _small


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The split checkpoint; read only."""
    return _split(tmp_path_factory.mktemp("official") / "tiny")


def quantizers(config: Mapping[str, Any]) -> dict[str, float]:
    """Input amax by modelopt's names: one for projections of one input, none for MTP."""
    found: dict[str, float] = {}
    ratios = config["compress_ratios"]
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        attention, hidden = f"{base}.self_attn", 3.0 + layer
        names = {f"{attention}.{name}": hidden for name in ("q_a_proj", "kv_proj")}
        names |= {f"{attention}.q_b_proj": 1.5 + layer, f"{attention}.o_b_proj": 0.75 + layer}
        if ratios[layer]:
            for name in ("kv_proj", "gate_proj"):
                names[f"{attention}.compressor.{name}"] = hidden
        if ratios[layer] == 4:
            names[f"{attention}.compressor.indexer.q_b_proj"] = 1.5 + layer
            for name in ("kv_proj", "gate_proj"):
                names[f"{attention}.compressor.indexer.{name}"] = hidden
        shared = f"{base}.mlp.shared_experts"
        names |= {f"{shared}.gate_proj": 2.0 + layer, f"{shared}.up_proj": 2.0 + layer}
        names[f"{shared}.down_proj"] = 9.0 + layer
        found |= {f"{name}.input_quantizer": amax for name, amax in names.items()}
        found[f"{base}.mlp.experts.gate_up_proj_input_quantizer"] = 2.5 + layer
        found[f"{base}.mlp.experts.down_proj_input_quantizer"] = 7.25 + layer
    return found


def _make_snapshot(
    checkpoint: Path, path: Path, changes: Amax | None = None, **metadata: str
) -> Path:
    """Writes a snapshot of a model. changes: other amax by name; None leaves it out."""
    config = json.loads((checkpoint / "config.json").read_text())
    values = {**quantizers(config), **(changes or {})}
    amax = {name: torch.tensor(value) for name, value in values.items() if value is not None}
    about = {name: {"shape": [], "kind": "input"} for name in amax}
    known = {
        "format": "dsv4-amax-snapshot", "version": "1", "modelopt": "0.47.0",
        "transformers": "5.20.2", "torch": "2.14.0", "config_sha256": config_sha256(config),
        "dataset": "none", "num_samples": "1", "sequence_length": "8", "kv_cache": "fp8_cast",
        "qformat": "nvfp4", "quantizers": json.dumps(about), "complete": "true",
    }  # fmt: skip
    Snapshot(amax, {**known, **metadata}).save(path)
    return path


@pytest.fixture(scope="session")
def make_snapshot() -> Callable[..., Path]:
    return _make_snapshot


@pytest.fixture(scope="session")
def snapshot(shards: Path) -> Path:
    """Of the tiny model."""
    return _make_snapshot(shards, shards.parent / "amax.safetensors")


@pytest.fixture(scope="session")
def modelopt_nvfp4() -> Any:
    """modelopt's NVFP4QTensor; importing it warns of what it cannot find here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from modelopt.torch.quantization.qtensor import NVFP4QTensor
    return NVFP4QTensor
