"""Checkpoints to serve, made of the trained tiny model by the exporter and renamed from there.

Import it by path or through a conftest: tests run in importlib mode.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelopt_v4_patches.export import ExportOptions, export_checkpoint
from modelopt_v4_patches.snapshot import REQUIRED, Snapshot, config_sha256
from nvfp4_codec import dequantize_fp8_block
from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig, Schema, Scheme, from_official

TINY = Path(__file__).parents[3] / "tests" / "assets" / "tiny-dsv4"
INDEX = "model.safetensors.index.json"

Variant = Literal[
    "full",         # what `dsv4-quantize export` writes
    "experts",      # NVIDIA's layout: NVFP4 experts, official FP8 for the rest
    "all-nvfp4",    # compressors and wo_a in NVFP4 too, the latter without input_scale
    "wo-a-bf16",
    "no-mtp",
    "mtp-bf16",
    "two-scales",   # fused pairs with different weight_scale_2 and input_scale
]  # fmt: skip
VARIANTS: tuple[Variant, ...] = (
    "full", "experts", "all-nvfp4", "wo-a-bf16", "no-mtp", "mtp-bf16", "two-scales",
)  # fmt: skip

_OPTIONS: Mapping[Variant, ExportOptions] = {
    "full": ExportOptions(),
    "experts": ExportOptions(preset="experts"),
    "all-nvfp4": ExportOptions(wo_a="nvfp4", compressor="nvfp4"),
    "wo-a-bf16": ExportOptions(wo_a="bf16"),
    "no-mtp": ExportOptions(mtp="drop"),
    "mtp-bf16": ExportOptions(),
    "two-scales": ExportOptions(wo_a="nvfp4", compressor="nvfp4"),
}
#: The second of each fused pair gets its weight_scale_2 times one of these, its block scales
#: divided by it: the same values, but for rounding that is not exact for all of them.
RATIOS = (0.5, 0.125, 0.3, 2.0, 0.011)


def make(folder: Path, variant: Variant = "full", scheme: Scheme = "official") -> Path:
    """Writes a checkpoint of the tiny model to the new folder; a second or two."""
    official = folder if scheme == "official" else folder.with_name(f"{folder.name}-official")
    folder.parent.mkdir(parents=True, exist_ok=True)
    snapshot = make_snapshot(folder.with_name(f"{folder.name}-amax.safetensors"))
    export_checkpoint(TINY, snapshot, official, _OPTIONS[variant])
    if variant == "mtp-bf16":
        change(official, _mtp_to_bf16)
        change_config(official, _list_mtp_as_bf16)
    elif variant == "two-scales":
        change(official, two_scales)
    if scheme != "official":
        rename(official, folder, scheme)
    return folder


def make_snapshot(path: Path, source: Path = TINY) -> Path:
    """An amax snapshot of the model at ``source``, with made-up but distinct input amax."""
    config = json.loads((source / "config.json").read_text())
    amax = {name: torch.tensor(value) for name, value in input_amax(config).items()}
    about = {name: {"shape": [], "kind": "input"} for name in amax}
    metadata = dict.fromkeys(REQUIRED, "0") | {
        "format": "dsv4-amax-snapshot", "version": "1", "complete": "true",
        "config_sha256": config_sha256(config), "quantizers": json.dumps(about),
    }  # fmt: skip
    Snapshot(amax, metadata).save(path)
    return path


def input_amax(config: Mapping[str, Any]) -> dict[str, float]:
    """By modelopt's names; wo_a and MTP blocks have none."""
    found: dict[str, float] = {}
    for layer in range(config["num_hidden_layers"]):
        base, ratio = f"model.layers.{layer}", config["compress_ratios"][layer]
        attn, shared = f"{base}.self_attn", f"{base}.mlp.shared_experts"
        names = {f"{attn}.{name}": 3.0 + layer for name in ("q_a_proj", "kv_proj")}
        names |= {f"{attn}.q_b_proj": 1.5 + layer, f"{attn}.o_b_proj": 0.75 + layer}
        parts = ["compressor"] if ratio else []
        if ratio == 4:
            parts.append("compressor.indexer")
            names[f"{attn}.compressor.indexer.q_b_proj"] = 1.5 + layer
        for part in parts:
            names |= {f"{attn}.{part}.{name}": 3.0 + layer for name in ("kv_proj", "gate_proj")}
        names |= {f"{shared}.gate_proj": 2.0 + layer, f"{shared}.up_proj": 2.0 + layer}
        names[f"{shared}.down_proj"] = 9.0 + layer
        found |= {f"{name}.input_quantizer": amax for name, amax in names.items()}
        found[f"{base}.mlp.experts.gate_up_proj_input_quantizer"] = 2.5 + layer
        found[f"{base}.mlp.experts.down_proj_input_quantizer"] = 7.25 + layer
    return found


def read(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def change(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> Path:
    """Edits the tensors of a folder; they then lie in one file."""
    tensors = read(folder)
    edit(tensors)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def change_config(folder: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """Edits config.json."""
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def split(folder: Path, files: int = 3) -> Path:
    """Into several shards that tear apart what belongs together."""
    tensors = read(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    names = sorted(tensors, key=lambda name: (name[::-1], name))
    weight_map = {}
    for i in range(files):
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        part = names[i::files]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def rename(source: Path, folder: Path, scheme: Scheme) -> Path:
    """The same checkpoint as an export in another scheme has it: names, lists and dialect."""
    shutil.copytree(source, folder)
    change(folder, lambda tensors: _renamed(tensors, scheme))
    change_config(folder, lambda config: _exported(config, scheme))
    return folder


def _renamed(tensors: dict[str, Tensor], scheme: Scheme) -> None:
    named = {from_official(name, scheme): tensor for name, tensor in tensors.items()}
    tensors.clear()
    tensors |= named


def _exported(config: dict[str, Any], scheme: Scheme) -> None:
    """transformers' dialect, with what it loses, and modelopt's lists under the scheme's names."""
    types = {0: "sliding_attention", 4: "compressed_sparse_attention",
             128: "heavily_compressed_attention"}  # fmt: skip
    layers, rope = config["num_hidden_layers"], config["rope_scaling"]
    config["layer_types"] = [types[ratio] for ratio in config["compress_ratios"][:layers]]
    hashed = config["num_hash_layers"]
    config["mlp_layer_types"] = ["hash_moe"] * hashed + ["moe"] * (layers - hashed)
    partial = {"partial_rotary_factor": config["qk_rope_head_dim"] / config["head_dim"]}
    yarn = {key: value for key, value in rope.items() if key not in ("type", "rope_theta")}
    config["rope_parameters"] = {
        "main": {"rope_type": "default", "rope_theta": config["rope_theta"], **partial},
        "compress": {
            **yarn, "rope_theta": config["compress_rope_theta"], "attention_factor": 1.0, **partial,
        },
    }  # fmt: skip
    for key in ("compress_ratios", "num_hash_layers", "topk_method", "rope_scaling"):
        del config[key]
    quantization = config["quantization_config"]
    for key in ("scale_fmt", "weight_block_size"):
        quantization.pop(key, None)
    quantization["ignore"] = _entries(quantization["ignore"], scheme)
    layers_of = quantization["quantized_layers"]
    names = _entries(layers_of, scheme)
    quantization["quantized_layers"] = dict(zip(names, layers_of.values(), strict=True))


def _entries(entries: Iterable[str], scheme: Scheme) -> list[str]:
    return [_entry(entry, scheme) for entry in entries]


def _entry(entry: str, scheme: Scheme) -> str:
    try:
        return from_official(entry, scheme)
    except CheckpointError:
        # The few globs of the experts-only layout.
        words = {"attn": "self_attn", "ffn": "mlp"} if scheme == "hf" else {}
        path = ".".join(words.get(word, word) for word in entry.split("."))
        return f"model.{path}" if path.startswith("layers.") else path


def two_scales(tensors: dict[str, Tensor]) -> None:
    """Gives the second of every fused NVFP4 pair scales of its own."""
    turn = 0
    for name in sorted(tensors):
        if not name.endswith(
            (".wkv.weight_scale_2", ".wgate.weight_scale_2", ".w3.weight_scale_2")
        ):
            continue
        if ".compressor.wkv." in name:  # the first of its pair
            continue
        ratio = RATIOS[turn % len(RATIOS)]
        turn += 1
        module = name.removesuffix(".weight_scale_2")
        scale = tensors[f"{module}.weight_scale"].float() / ratio
        tensors[name] = (tensors[name] * ratio).reshape(())
        tensors[f"{module}.weight_scale"] = scale.clamp(max=448).to(torch.float8_e4m3fn)
        if f"{module}.input_scale" in tensors:
            tensors[f"{module}.input_scale"] = tensors[f"{module}.input_scale"] * 1.5


def _mtp_to_bf16(tensors: dict[str, Tensor]) -> None:
    for name in [n for n in tensors if n.startswith("mtp.") and n.endswith(".scale")]:
        module = name.removesuffix(".scale")
        tensors[f"{module}.weight"] = dequantize_fp8_block(
            tensors[f"{module}.weight"], tensors.pop(name), dtype=torch.bfloat16
        )


def _list_mtp_as_bf16(config: dict[str, Any]) -> None:
    quantization = config["quantization_config"]
    layers = quantization["quantized_layers"]
    moved = [
        n for n, how in layers.items() if n.startswith("mtp.") and how["quant_algo"] != "NVFP4"
    ]
    for name in moved:
        del layers[name]
    quantization["ignore"] = sorted([*quantization["ignore"], *moved])


def schema_of(folder: Path, *, mtp: bool = True) -> Schema:
    """The model that the tiny checkpoint, or a changed copy of its official config, describes."""
    config = ModelConfig.from_file(folder / "config.json")
    return Schema(config if mtp else config.without_mtp())
