"""Exports as people have them: small synthetic ones, and real ones made by modelopt itself."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from modelopt_v4_patches.dequantize import dequantize_checkpoint
from modelopt_v4_patches.quality.modelopt_export import modelopt_export
from nvfp4_codec import quantize_nvfp4
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig, Schema, Scheme, from_official

TINY = Path(__file__).parents[4] / "tests" / "assets" / "tiny-dsv4"
INDEX = "model.safetensors.index.json"

#: The smallest model with every kind of tensor: runs of it take milliseconds.
SMALL = {
    "num_hidden_layers": 2, "compress_ratios": [4, 128, 0], "hidden_size": 128, "vocab_size": 32,
    "num_attention_heads": 2, "head_dim": 64, "q_lora_rank": 64, "o_lora_rank": 64,
    "n_routed_experts": 2, "moe_intermediate_size": 64, "index_n_heads": 2, "index_head_dim": 32,
}  # fmt: skip

#: What modelopt writes into config.json for NVFP4_DEFAULT_CFG.
QUANTIZATION = {
    "config_groups": {"group_0": {"weights": {"num_bits": 4}, "targets": ["Linear"]}},
    "ignore": [],
    "quant_algo": "NVFP4",
    "producer": {"name": "modelopt", "version": "0.45.0"},
    "quant_method": "modelopt",
}


def reference(**keys: Any) -> dict[str, Any]:
    """The official config.json of the small model."""
    return {**json.loads((TINY / "config.json").read_text()), **SMALL, **keys}


def hf_config(config: Mapping[str, Any], quantization: Mapping[str, Any]) -> dict[str, Any]:
    """The same as transformers writes it back: other keys, nested rope."""
    types = {0: "sliding_attention", 4: "compressed_sparse_attention",
             128: "heavily_compressed_attention"}  # fmt: skip
    layers = config["num_hidden_layers"]
    written = {
        **config,
        "layer_types": [types[r] for r in config["compress_ratios"][:layers]],
        "mlp_layer_types": ["hash_moe"] + ["moe"] * (layers - 1),
        "rope_parameters": {"main": {"rope_type": "default"}, "compress": {"rope_type": "yarn"}},
        "quantization_config": copy.deepcopy(dict(quantization)),
        "transformers_version": "5.9.0",
    }
    for key in ("compress_ratios", "num_hash_layers", "topk_method", "rope_scaling"):
        del written[key]
    return written


def export_tensors(
    config: Mapping[str, Any], scheme: Scheme, *, mtp: bool, unquantized: str = "wo_a"
) -> dict[str, Tensor]:
    """What modelopt stores for the model: every linear in NVFP4 but wo_a, gates and the head."""
    model = ModelConfig.from_dict(config)
    schema = Schema(model if mtp else model.without_mtp())
    generator = torch.Generator().manual_seed(5)
    tensors: dict[str, Tensor] = {}
    for entry in schema.entries():
        name = from_official(entry.name(), scheme)
        kept = entry.role in ("gate", "head", unquantized) or entry.in_mtp
        values = torch.randn(entry.shape, generator=generator) * 0.1
        if entry.template.row.linear and not kept:
            packed = quantize_nvfp4(values.bfloat16())
            module = name.removesuffix(".weight")
            tensors[f"{module}.weight"] = packed.weight
            tensors[f"{module}.weight_scale"] = packed.weight_scale
            tensors[f"{module}.weight_scale_2"] = torch.as_tensor(packed.weight_scale_2)
            tensors[f"{module}.input_scale"] = torch.rand((), generator=generator) + 0.1
        elif entry.format == "int64":
            tensors[name] = torch.randint(0, 2, entry.shape, generator=generator)
        else:
            tensors[name] = values if entry.format == "fp32" else values.bfloat16()
    return tensors


def write_export(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], files: int = 2
) -> Path:
    """A folder as export_hf_checkpoint and hf_ptq leave it; shards tear apart what is related."""
    folder.mkdir(parents=True)
    names = sorted(tensors, key=lambda name: (name[::-1], name))
    weight_map = {}
    for i in range(files):
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors" if files > 1 else "model.safetensors"
        part = names[i::files]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    if files > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config, indent=4))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY / name, folder / name)
    return folder


Make = Callable[..., Path]


@pytest.fixture
def reference_config(tmp_path: Path) -> Path:
    """The small model's official config.json."""
    path = tmp_path / "official" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(reference()))
    return path


@pytest.fixture
def make_export(tmp_path: Path) -> Make:
    """Writes a synthetic export of the small model."""

    def make(
        name: str = "export",
        *,
        scheme: Scheme = "hf",
        mtp: bool = False,
        change: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
        quantization: Mapping[str, Any] = QUANTIZATION,
        files: int = 2,
        **keys: Any,
    ) -> Path:
        config = reference(**keys)
        tensors = export_tensors(config, scheme, mtp=mtp)
        change(tensors)
        return write_export(tmp_path / name, tensors, hf_config(config, quantization), files)

    return make


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of this run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@contextmanager
def _once(folder: Path) -> Iterator[bool]:
    """True for the one process that is to fill the folder; others wait for it."""
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not folder.exists()


@pytest.fixture(scope="session")
def bf16(shared_folder: Path) -> Path:
    """The trained tiny model in BF16."""
    folder = shared_folder / "finalize-bf16"
    with _once(folder) as missing:
        if missing:
            dequantize_checkpoint(TINY, folder)
    return folder


@pytest.fixture(scope="session")
def real_exports(shared_folder: Path, bf16: Path) -> Path:
    """modelopt's own exports of it, both made by one process: importing modelopt is slow."""
    folder = shared_folder / "finalize-exports"
    texts = ["def f(x):\n    return x + 1\n" * 12]
    with _once(folder) as missing:
        if missing:
            unfinished = folder.with_name("finalize-exports-unfinished")
            modelopt_export(bf16, unfinished / "default", texts)
            experts = unfinished / "experts-mtp"
            modelopt_export(bf16, experts, texts, config="NVFP4_EXPERTS_ONLY_CFG", with_mtp=True)
            unfinished.rename(folder)
    return folder


@pytest.fixture(params=["default", "experts-mtp"])
def real_export(request: pytest.FixtureRequest, real_exports: Path) -> Path:
    """One of them: everything quantized, or experts only and the MTP blocks in BF16."""
    return real_exports / str(request.param)
