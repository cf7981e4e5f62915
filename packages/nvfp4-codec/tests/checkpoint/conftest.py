"""Small checkpoints on disk, good in every way; tests break copies of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nvfp4_codec import quantize_mxfp4, quantize_nvfp4

Shards = Mapping[str, Mapping[str, Tensor]]
Write = Callable[[Path, Shards], Path]


def _write(folder: Path, shards: Shards) -> Path:
    """A checkpoint folder with an index, written by the official library."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, tensors in shards.items():
        save_file(dict(tensors), folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    document = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    (folder / "config.json").write_text(json.dumps({"model_type": "test", "hidden_size": 64}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    return folder


def _weight(rows: int, columns: int, seed: int, tail: bool = False) -> Tensor:
    """A matrix with loud rows and columns, as training leaves them; seeds 2j and 2j+1 share
    their loud columns, as projections of one input do."""
    columns_of = torch.Generator().manual_seed(1000 + seed // 2)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    if tail:
        values = values * torch.randn(rows, columns, generator=generator).exp()
    row = torch.randn(rows, 1, generator=generator).mul(0.5).exp()
    column = torch.randn(1, columns, generator=columns_of).mul(0.5).exp()
    return values * row * column * 0.02


@pytest.fixture(scope="session")
def weight() -> Callable[..., Tensor]:
    return _weight


@pytest.fixture(scope="session")
def write_checkpoint() -> Write:
    return _write


@pytest.fixture(scope="session")
def float_shards() -> Shards:
    """A float model in two shards: attention, gated MLP, norm, embedding, head, router."""
    bf16 = torch.bfloat16
    first = {
        "model.embed_tokens.weight": _weight(48, 64, 10).to(bf16),
        "model.layers.0.self_attn.q_proj.weight": _weight(128, 64, 0).to(bf16),
        "model.layers.0.self_attn.k_proj.weight": _weight(128, 64, 1, tail=True).to(bf16),
        "model.layers.0.self_attn.v_proj.weight": _weight(32, 64, 3),
        "model.layers.0.input_layernorm.weight": torch.ones(64),
        "model.layers.0.mlp.gate_proj.weight": _weight(96, 64, 4).half(),
    }
    second = {
        "model.layers.0.mlp.up_proj.weight": _weight(96, 64, 5).to(bf16),
        "model.layers.0.mlp.down_proj.weight": _weight(64, 96, 6).to(bf16),
        "model.layers.0.mlp.gate.weight": _weight(4, 64, 7).to(bf16),
        "model.layers.0.odd.weight": _weight(8, 20, 8).to(bf16),
        "lm_head.weight": _weight(48, 64, 9).to(bf16),
        "step": torch.tensor(7),
    }
    return {
        "model-00001-of-00002.safetensors": first,
        "model-00002-of-00002.safetensors": second,
    }


@pytest.fixture(scope="session")
def mxfp4_shards() -> Shards:
    """Experts as DeepSeek stores them, one scale in another shard than its weight."""
    first: dict[str, Tensor] = {"norm.weight": torch.ones(64)}
    second: dict[str, Tensor] = {}
    for expert in range(2):
        for i, (name, rows, columns) in enumerate((("w1", 96, 64), ("w3", 96, 64), ("w2", 64, 96))):
            packed = quantize_mxfp4(_weight(rows, columns, 20 + 4 * expert + i) * 8.0**-i)
            base = f"layers.0.ffn.experts.{expert}.{name}"
            first[f"{base}.weight"] = packed.weight.view(torch.int8)
            place = second if (expert, name) == (1, "w3") else first
            place[f"{base}.scale"] = packed.weight_scale
    second["layers.0.attn.wq_a.weight"] = _weight(130, 200, 40).to(torch.float8_e4m3fn)
    second["layers.0.attn.wq_a.scale"] = torch.ones(2, 2).to(torch.float8_e8m0fnu)
    second["head.weight"] = _weight(16, 64, 41).to(torch.bfloat16)
    return {
        "model-00001-of-00002.safetensors": first,
        "model-00002-of-00002.safetensors": second,
    }


@pytest.fixture(scope="session")
def nvfp4_tensors() -> Mapping[str, Tensor]:
    """A good NVFP4 model in ModelOpt's names: fused pairs share their weight_scale_2."""
    tensors: dict[str, Tensor] = {"norm.weight": torch.ones(128)}
    groups = (("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"), ("layers.0.mlp.down_proj",))
    for g, group in enumerate(groups):
        values = [_weight(256, 128, 60 + 2 * g + i, tail=i == 1) for i in range(len(group))]
        joint = torch.stack([v.abs().max() for v in values]).max() / 2688
        for module, value in zip(group, values, strict=True):
            packed = quantize_nvfp4(value, weight_scale_2=joint)
            weight_scale_2 = packed.weight_scale_2
            assert isinstance(weight_scale_2, Tensor)
            tensors[f"{module}.weight"] = packed.weight
            tensors[f"{module}.weight_scale"] = packed.weight_scale
            tensors[f"{module}.weight_scale_2"] = weight_scale_2.clone()
            tensors[f"{module}.input_scale"] = torch.tensor(0.01)
    return tensors
