"""Checkpoints in which nothing is wrong have no finding, in every layout and scheme of names."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from modelopt_v4_patches.validate import examine, validate
from nvfp4_codec import dequantize_fp8_block, dequantize_mxfp4, quantize_nvfp4
from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import Scheme, from_official


@pytest.mark.parametrize("preset", ["official", "experts", "full"])
def test_healthy_checkpoints_have_no_finding(healthy, tiny, write, tmp_path, preset):
    folder = write(healthy[preset], tmp_path / preset, shards=3)
    made = examine(folder, against=tiny)
    assert made.findings == ()
    assert {row.compared for row in made.rows} == {row.tensors for row in made.rows}
    assert validate(folder) == []


def test_the_table_says_what_each_role_lost(healthy, tiny, write, tmp_path):
    made = examine(write(healthy["full"], tmp_path / "full"), against=tiny)
    rows = {(row.role, row.format): row for row in made.rows}
    assert rows["routed_expert", "NVFP4"].sqnr_min == math.inf
    assert rows["wo_a", "FP8"].sqnr_min == math.inf
    assert rows["routed_expert", "NVFP4"].tensors == 4 * 4 * 3
    attention = rows["wq_a", "NVFP4"]
    # four bits in blocks of 16 leave about 20 dB of a trained matrix
    assert attention.sqnr_min is not None
    assert 15 < attention.sqnr_min <= attention.sqnr_median < 25
    assert sum(row.nbytes for row in made.rows) == sum(
        t.numel() * t.element_size() for t in healthy["full"].tensors.values()
    )


def dense(content: Any) -> None:
    """BF16 under official names, as `dequant` writes it."""
    t = content.tensors
    for name in [name for name in t if name.endswith(".scale")]:
        module, scale = name.removesuffix(".scale"), t.pop(name)
        weight = t[f"{module}.weight"]
        if weight.dtype == torch.int8:
            t[f"{module}.weight"] = dequantize_mxfp4(weight.view(torch.uint8), scale)
        else:
            t[f"{module}.weight"] = dequantize_fp8_block(weight, scale)
    del content.config["quantization_config"]


def test_a_dequantized_copy_is_equal(check, tiny):
    made = check(dense, "official", sample="all", against=tiny)
    assert made.findings == ()
    assert {row.format for row in made.rows} == {"BF16", "F32", "I64"}
    assert {row.sqnr_min for row in made.rows} == {math.inf}


@pytest.mark.parametrize("scheme", ["hf", "half_converted"])
def test_other_schemes_of_names(check, tiny, scheme: Scheme):
    def rename(content: Any) -> None:
        t = content.tensors
        renamed = {from_official(name, scheme): t.pop(name) for name in list(t)}
        content.tensors.update(renamed)
        block = content.quantization
        layers = block["quantized_layers"]
        block["quantized_layers"] = {from_official(n, scheme): a for n, a in layers.items()}
        block["ignore"] = ["lm_head"]

    made = check(rename, "full", sample="auto", against=tiny)
    assert made.findings == ()
    assert {row.sqnr_min for row in made.rows if row.role == "routed_expert"} == {math.inf}


def test_weight_only_needs_no_input_scale(check):
    def strip(content: Any) -> None:
        for name in [name for name in content.tensors if name.endswith("input_scale")]:
            del content.tensors[name]
        for algorithm in content.quantization["quantized_layers"].values():
            if algorithm["quant_algo"] == "NVFP4":
                algorithm["quant_algo"] = "W4A16_NVFP4"

    assert check(strip, sample="auto").findings == ()


def test_dropped_mtp_blocks(check, tiny):
    def drop(content: Any) -> None:
        for name in [name for name in content.tensors if name.startswith("mtp.")]:
            del content.tensors[name]
        content.config["num_nextn_predict_layers"] = 0

    assert check(drop, "experts", against=tiny).findings == ()


def test_notes_name_what_stock_readers_cannot_do(check):
    def pack(content: Any) -> None:
        for name in ("wkv", "wgate"):
            module = f"layers.2.attn.compressor.{name}"
            weight, scale_2 = content.tensors[f"{module}.weight"], torch.tensor(2.0**-12)
            made = quantize_nvfp4(weight, weight_scale_2=scale_2)
            content.tensors |= {
                f"{module}.weight": made.weight,
                f"{module}.weight_scale": made.weight_scale,
                f"{module}.weight_scale_2": scale_2.clone(),
                f"{module}.input_scale": torch.tensor(0.01),
            }
            content.quantization["quantized_layers"][module] = {"quant_algo": "NVFP4"}
        content.quantization["ignore"].remove("*.compressor.*")
        content.config["rope_parameters"] = {"main": {}, "compress": {}}
        del content.config["rope_scaling"]

    made = check(pack)
    # the other layers' compressors stay BF16, which is legal: layouts may differ by layer
    assert made.findings == ()
    assert any(note.startswith("2 compressor matrices are NVFP4") for note in made.notes)
    assert any("rope_parameters is nested" in note for note in made.notes)


def test_json_has_stable_keys(check, tiny):
    document = check(lambda content: None, "experts", sample=1, against=tiny).to_json()
    text = json.dumps(document, allow_nan=False)
    assert set(json.loads(text)) == {
        "kind", "findings", "notes", "rows", "coverage", "names", "bytes_read",
    }  # fmt: skip
    assert document["kind"] == "checkpoint"
    assert document["names"] == {"missing": [], "unknown": [], "duplicate": []}
    assert document["rows"][0]["sqnr_min"] == "inf"


def test_a_sample_reads_some_weights_of_every_role(check, tiny):
    made = check(lambda content: None, "full", sample=2, against=tiny)
    compared = {(row.role, row.format): (row.compared, row.tensors) for row in made.rows}
    count, total = compared["routed_expert", "NVFP4"]
    # two chosen, each with what it is fused with
    assert 2 <= count <= 4
    assert total == 48
    assert all(count >= min(2, total) for count, total in compared.values())


def test_paths_that_are_no_checkpoint(tmp_path: Path, tiny):
    with pytest.raises(CheckpointError, match="does not exist"):
        examine(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        examine(tiny / "model.safetensors")
