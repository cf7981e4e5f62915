"""Big checkpoints: scalars of all weights, samples of the rest, and seconds for 900 GB."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_codec.checkpoint.header import TensorSpec, build_header
from nvfp4_codec.schemas.deepseek_v4 import Entry, Layout, ModelConfig, Schema
from vllm_dsv4.doctor import examine, values

W2 = "layers.1.ffn.experts.3.w2"


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny checkpoint counts as a large one."""
    monkeypatch.setattr(values, "_SMALL", 0)
    monkeypatch.setattr(values, "_SMALL_COMPARED", 0)
    monkeypatch.setattr(values, "_FEW", 1)
    monkeypatch.setattr(values, "_FEW_COMPARED", 1)


def damage(content: Any) -> None:
    """In a weight that no sample reaches: a scalar, and the block scales."""
    content.raw(f"{W2}.weight_scale").fill_(0x38)
    content.tensors[f"{W2}.input_scale"] = torch.tensor(0.0)


def test_scalars_of_all_weights_are_read(check, large):
    made = check(damage)
    assert [finding.code for finding in made.findings] == ["bad-input-scale"]
    assert made.looked.weights_read < made.looked.weights / 2
    assert any("were not sampled" in question for question in made.open_questions)


def test_small_checkpoints_are_read_as_a_whole(check):
    made = check(damage)
    assert [finding.code for finding in made.findings] == ["bad-input-scale", "scales-all-ones"]
    assert made.looked.weights_read == made.looked.weights


def test_samples_are_compared_with_the_reference(check, large, tiny):
    def change(content: Any) -> None:
        for name, tensor in list(content.tensors.items()):
            if tensor.dtype == torch.uint8:
                content.tensors[name] = (tensor >> 4) | (tensor << 4)

    made = check(change, reference=tiny)
    assert {finding.code for finding in made.findings} == {"swapped-nibbles"}
    assert 0 < len(made.findings) < 40
    assert all(finding.evidence == "reference" for finding in made.findings)


def pro(config: dict[str, Any]) -> dict[str, Any]:
    """The structure of DeepSeek-V4-Pro."""
    return config | {
        "num_hidden_layers": 61, "n_routed_experts": 384, "hidden_size": 7168,
        "moe_intermediate_size": 3072, "num_hash_layers": 3, "vocab_size": 129280,
        "compress_ratios": [128, 128] + [4, 128] * 29 + [4, 0], "num_attention_heads": 128,
        "q_lora_rank": 1536, "o_groups": 16, "o_lora_rank": 1024, "index_n_heads": 64,
    }  # fmt: skip


def write_sparse(folder: Path, config: dict[str, Any], shards: int) -> int:
    """Headers, scalars of 0.001 and holes; returns the number of tensors."""
    schema = Schema(ModelConfig.from_dict(config))
    packed = {"routed_expert", "wq_a", "wkv", "wq_b", "wo_b", "indexer_wq_b", "shared_expert"}

    def layout(entry: Entry) -> Layout:
        routed = entry.role == "routed_expert"
        return "nvfp4" if routed or (entry.role in packed and not entry.in_mtp) else "official"

    layers: dict[str, dict[str, str]] = {}
    for entry in schema.entries():
        if entry.template.row.linear and layout(entry) == "nvfp4":
            module = entry.module()
            name = module.rsplit(".", 2)[0] if entry.role == "routed_expert" else module
            layers[name] = {"quant_algo": "NVFP4"}
        elif entry.format == "fp8_block":
            layers[entry.module()] = {"quant_algo": "FP8_PB_WO"}
    config["quantization_config"] = {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128], "quantized_layers": layers, "ignore": ["head"],
    }  # fmt: skip
    specs = [TensorSpec(*spec) for spec in schema.tensors(layout)]
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = specs[i * len(specs) // shards : (i + 1) * len(specs) // shards]
        made = build_header(part, {"format": "pt"})
        with (folder / file).open("wb") as stream:
            stream.write(made.header)
            stream.truncate(made.size)
            for spec in part:
                if spec.name.endswith(("weight_scale_2", "input_scale")):
                    stream.seek(made.ranges[spec.name][0])
                    stream.write(struct.pack("<f", 0.001))
        weight_map |= dict.fromkeys((spec.name for spec in part), file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return len(specs)


@pytest.mark.full
def test_the_whole_pro_model_takes_seconds(healthy, tmp_path):
    content = healthy("official")
    for name, text in content.files.items():
        (tmp_path / name).write_text(text)
    count = write_sparse(tmp_path, pro(content.config), 95)
    started = time.process_time()
    made = examine(tmp_path)
    seconds = time.process_time() - started
    assert made.findings == ()
    assert made.looked.tensors == count > 280_000
    assert made.looked.nbytes > 880e9
    assert made.looked.nbytes_read < 1e9
    assert seconds < 60  # measured: 18 on a busy machine
