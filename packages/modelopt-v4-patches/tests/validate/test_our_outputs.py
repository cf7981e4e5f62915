"""What the other commands write has no finding, whatever their options."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from modelopt_v4_patches.dequantize import dequantize_checkpoint
from modelopt_v4_patches.export import ExportOptions, export_checkpoint
from modelopt_v4_patches.snapshot import REQUIRED, Snapshot, config_sha256
from modelopt_v4_patches.validate import examine
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig, Schema


@pytest.fixture(scope="module")
def snapshot(healthy, tmp_path_factory) -> Path:
    """An amax for every linear of the main model; experts of layer 3 were never reached."""
    config: dict[str, Any] = healthy["official"].config
    amax = {
        f"{entry.module('hf')}.input_quantizer": torch.tensor(4.0)
        for entry in Schema(ModelConfig.from_dict(config)).entries()
        if entry.template.row.linear and not entry.in_mtp and entry.role != "wo_a"
        if entry.role != "routed_expert" or entry.indices[0] != "3"
    }
    quantizers = {name: {"shape": []} for name in amax}
    metadata = dict.fromkeys(REQUIRED, "1") | {
        "config_sha256": config_sha256(config),
        "quantizers": json.dumps(quantizers),
        "complete": "true",
    }
    path: Path = tmp_path_factory.mktemp("snapshot") / "amax.safetensors"
    Snapshot(amax, metadata).save(path)
    return path


@pytest.mark.parametrize(
    "options",
    [
        ExportOptions(),
        ExportOptions(preset="experts"),
        ExportOptions(attn="bf16", shared="fp8", indexer="bf16", wo_a="nvfp4", kv_cache="none"),
        ExportOptions(attn="fp8", wo_a="bf16", compressor="nvfp4", mtp="drop"),
    ],
    ids=["full", "experts", "mixed", "compressor"],
)
def test_exports(tiny, snapshot, tmp_path, options: ExportOptions):
    export_checkpoint(tiny, snapshot, tmp_path / "out", options)
    made = examine(tmp_path / "out", against=tiny, sample="all")
    assert made.findings == ()
    rows = {(row.role, row.format): row for row in made.rows}
    assert rows["routed_expert", "NVFP4"].sqnr_min == math.inf
    assert rows["routed_expert", "NVFP4"].compared == 48
    # layer 3, and the MTP block where it is kept
    borrowed = 24 if options.mtp == "keep" else 12
    assert f"{borrowed} matrices have an input_scale that is not their own" in made.notes


def test_a_damaged_export_shows_twice(tiny, snapshot, tmp_path):
    """In its values and in its manifest."""
    export_checkpoint(tiny, snapshot, tmp_path / "out", ExportOptions(preset="experts"))
    shard = tmp_path / "out" / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-100] ^= 4
    shard.write_bytes(data)
    codes = {f.code for f in examine(tmp_path / "out", against=tiny, sample="all").findings}
    assert "manifest-mismatch" in codes
    assert len(codes) == 2


def test_dequantized(tiny, tmp_path):
    dequantize_checkpoint(tiny, tmp_path / "out")
    made = examine(tmp_path / "out", against=tiny, sample="all")
    assert made.findings == ()
    assert {row.sqnr_min for row in made.rows} == {math.inf}
