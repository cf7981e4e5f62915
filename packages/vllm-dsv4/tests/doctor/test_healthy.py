"""Checkpoints in which nothing is wrong have no finding, whatever the preset and the names."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from nvfp4_codec import dequantize_fp8_block, dequantize_mxfp4
from nvfp4_codec.schemas.deepseek_v4 import from_official
from vllm_dsv4.doctor import examine
from vllm_dsv4.prepare import prepare_checkpoint

PRESETS = ["official", "full", "experts", "all-nvfp4", "wo-a-bf16", "no-mtp"]
#: What transformers loses of config.json, and the plugin fills in.
DIALECT = {
    "topk_method", "compress_ratios", "num_hash_layers", "rope_parameters",
    "quantization_config.scale_fmt", "quantization_config.weight_block_size",
}  # fmt: skip


def nothing(content: Any) -> None:
    pass


@pytest.mark.parametrize("variant", PRESETS)
def test_no_preset_has_a_finding(check, variant: str):
    made = check(nothing, variant, shards=3)
    assert made.findings == ()
    assert made.healthy
    assert made.looked.files == 3
    assert made.looked.weights_read == made.looked.weights


@pytest.mark.parametrize("variant", PRESETS)
def test_no_preset_has_a_finding_against_its_source(check, tiny, variant: str):
    made = check(nothing, variant, reference=tiny)
    assert made.findings == ()
    assert not any("--reference" in question for question in made.open_questions)


@pytest.mark.parametrize("scheme", ["hf", "half_converted"])
@pytest.mark.parametrize("variant", ["full", "experts", "all-nvfp4", "no-mtp"])
def test_no_names_have_a_finding(check, variant: str, scheme: str):
    """Renamed only: config.json has everything, its lists are in the tensors' names."""

    def rename(content: Any) -> None:
        content.tensors = {from_official(n, scheme): t for n, t in content.tensors.items()}
        block = content.quantization
        layers = block["quantized_layers"]
        block["quantized_layers"] = {from_official(n, scheme): how for n, how in layers.items()}
        block["ignore"] = ["lm_head"]

    made = check(rename, variant)
    assert made.findings == ()
    assert made.scheme == scheme


@pytest.mark.parametrize("scheme", ["hf", "half_converted"])
@pytest.mark.parametrize("variant", ["full", "experts"])
def test_what_the_dialect_of_transformers_loses_is_filled_in(check, variant: str, scheme: str):
    made = check(nothing, variant, scheme)
    assert {finding.tensor for finding in made.findings} == DIALECT
    assert {finding.level for finding in made.findings} == {"handled"}
    assert made.healthy


def test_bf16(check):
    """As `dsv4-quantize dequant` writes it."""

    def dense(content: Any) -> None:
        t = content.tensors
        for name in [name for name in t if name.endswith(".scale")]:
            module, scale = name.removesuffix(".scale"), t.pop(name)
            weight = t[f"{module}.weight"]
            packed = weight.dtype == torch.int8
            t[f"{module}.weight"] = (
                dequantize_mxfp4(weight.view(torch.uint8), scale)
                if packed
                else dequantize_fp8_block(weight, scale)
            )
        del content.config["quantization_config"]

    made = check(dense, "official")
    assert made.findings == ()
    assert "the plugin stays out" in made.serving


def test_fused_scales_that_differ_are_the_plugins_work(check):
    made = check(nothing, "two-scales")
    assert {finding.code for finding in made.findings} == {
        "fused-scale-mismatch", "fused-input-scale-mismatch",
    }  # fmt: skip
    assert made.healthy


def test_what_prepare_makes_of_them_is_healthy(checkpoint, tmp_path):
    """Scales that were clamped and then rescaled are no E8M0."""
    prepare_checkpoint(checkpoint("two-scales"), tmp_path / "out")
    made = examine(tmp_path / "out")
    assert made.findings == ()
    assert made.looked.weights_read == made.looked.weights


def test_mtp_blocks_in_bf16(check):
    assert check(nothing, "mtp-bf16").findings == ()


def test_json_has_stable_keys(check):
    document = json.loads(json.dumps(check(nothing).to_json(), allow_nan=False))
    assert set(document) == {
        "folder", "kind", "scheme", "serving", "healthy", "findings", "open_questions", "looked",
        "seconds",
    }  # fmt: skip
    assert document["kind"] == "modelopt export, NVFP4 experts"
    assert set(document["looked"]) == {
        "files", "tensors", "weights", "weights_read", "nbytes", "nbytes_read",
    }  # fmt: skip


def test_the_checkpoint_is_not_changed(healthy, writer, tmp_path):
    folder = writer(healthy("full"), tmp_path / "c")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
    examine(folder)
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.iterdir()} == before
