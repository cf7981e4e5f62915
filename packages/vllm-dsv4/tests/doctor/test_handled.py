"""What the doctor calls handled, the plugin's own pass over the weights does handle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nvfp4_codec import dequantize_fp8_block, quantize_nvfp4
from vllm_dsv4.doctor import examine
from vllm_dsv4.options import Options
from vllm_dsv4.stored import read_stored
from vllm_dsv4.transform import Transform

WO_A = "layers.1.attn.wo_a"


def two_scales(content: Any) -> None:
    name = "layers.1.ffn.experts.3.w3.weight_scale_2"
    content.tensors[name] = content.tensors[name] * 0.5


def two_input_scales(content: Any) -> None:
    name = "layers.2.attn.wkv.input_scale"
    content.tensors[name] = content.tensors[name] * 2


def unknown(content: Any) -> None:
    content.tensors["layers.0.attn.compressor.position_bias"] = torch.zeros(4, 4)


def no_mtp(content: Any) -> None:
    for name in [name for name in content.tensors if name.startswith("mtp.")]:
        del content.tensors[name]


def packed_wo_a(content: Any) -> None:
    t = content.tensors
    made = quantize_nvfp4(dequantize_fp8_block(t[f"{WO_A}.weight"], t.pop(f"{WO_A}.scale")))
    t |= {
        f"{WO_A}.weight": made.weight,
        f"{WO_A}.weight_scale": made.weight_scale,
        f"{WO_A}.weight_scale_2": made.weight_scale_2,
    }


def dense_wo_a(content: Any) -> None:
    t = content.tensors
    t[f"{WO_A}.weight"] = dequantize_fp8_block(t[f"{WO_A}.weight"], t.pop(f"{WO_A}.scale"))


def two_formats(content: Any) -> None:
    t = content.tensors
    for part in ("weight_scale", "weight_scale_2", "input_scale"):
        del t[f"layers.0.attn.wkv.{part}"]
    t["layers.0.attn.wkv.weight"] = torch.zeros(512, 256, dtype=torch.bfloat16)


def renamed_lists(content: Any) -> None:
    types = {0: "sliding_attention", 4: "compressed_sparse_attention",
             128: "heavily_compressed_attention"}  # fmt: skip
    ratios = content.config.pop("compress_ratios")
    content.config["layer_types"] = [types[ratio] for ratio in ratios[:4]]
    hashed = content.config.pop("num_hash_layers")
    content.config["mlp_layer_types"] = ["hash_moe"] * hashed + ["moe"] * (4 - hashed)


def gaps(content: Any) -> None:
    del content.config["topk_method"]
    for key in ("scale_fmt", "weight_block_size"):
        del content.quantization[key]


def nested_rope(content: Any) -> None:
    rope = content.config.pop("rope_scaling")
    content.config["rope_parameters"] = {"main": {"rope_theta": 10000.0}, "compress": rope}


def other_names(content: Any) -> None:
    content.quantization["ignore"] = ["model.layers.0.self_attn.o_a_proj"]


def contradiction(content: Any) -> None:
    content.quantization["ignore"].append("layers.0.attn.wq_b")


CASES: dict[str, tuple[Callable[[Any], None], str]] = {
    "two weight_scale_2": (two_scales, "fused-scale-mismatch"),
    "two input_scale": (two_input_scales, "fused-input-scale-mismatch"),
    "an unknown tensor": (unknown, "unknown-tensor"),
    "no MTP": (no_mtp, "missing-mtp"),
    "wo_a in NVFP4": (packed_wo_a, "wo-a-format"),
    "wo_a in BF16": (dense_wo_a, "wo-a-format"),
    "two formats": (two_formats, "fused-format-mismatch"),
    "renamed lists": (renamed_lists, "config-missing-key"),
    "gaps": (gaps, "config-missing-key"),
    "nested rope": (nested_rope, "nested-rope"),
    "other names": (other_names, "config-other-names"),
    "contradiction": (contradiction, "config-contradicts-itself"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_plugin_takes_it(healthy, writer, tmp_path, case: str):
    change, code = CASES[case]
    content = healthy("full")
    change(content)
    folder = writer(content, tmp_path / "c")
    made = examine(folder)
    assert code in {finding.code for finding in made.findings}
    assert made.healthy, [f for f in made.findings if f.level != "handled"]
    transform = Transform(read_stored(folder), Options())
    names = {name for name, _ in transform.apply(load_file(folder / "model.safetensors").items())}
    assert {"embed.weight", f"{WO_A}.weight", "layers.0.attn.wkv.weight"} <= names


def test_a_second_spelling(healthy, writer, tmp_path):
    content = healthy("full", "hf")
    expert = "model.layers.1.mlp.experts.3"
    for part in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        content.tensors[f"{expert}.w1.{part}"] = content.tensors[f"{expert}.gate_proj.{part}"]
    content.tensors = {name: tensor.clone() for name, tensor in content.tensors.items()}
    folder = writer(content, tmp_path / "c")
    made = examine(folder)
    assert "duplicate-tensor" in {finding.code for finding in made.findings}
    assert made.healthy
    transform = Transform(read_stored(folder), Options())
    given = list(transform.apply(load_file(folder / "model.safetensors").items()))
    names = [name for name, _ in given]
    assert len(names) == len(set(names))
