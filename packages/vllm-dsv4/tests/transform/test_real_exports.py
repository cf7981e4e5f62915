"""Exports as modelopt really writes them: their names, dtypes and configs, recorded from runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_dsv4.options import Options, runtime_formats
from vllm_dsv4.stored import is_ours, promised, read_stored
from vllm_dsv4.transform import Transform

DATA = Path(__file__).parents[3] / "modelopt-v4-patches" / "tests" / "finalize" / "data"
EVERYTHING = "modelopt-0.45-transformers-5.9"
EXPERTS = "modelopt-0.47-transformers-5.24-experts-mtp"
DTYPES = {
    "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32, "I64": torch.int64,
    "BF16": torch.bfloat16,
}  # fmt: skip


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """A folder with an export's tensors, all zero but for scales."""

    def make(name):
        folder = tmp_path_factory.mktemp(name)
        recorded = json.loads((DATA / f"{name}.json").read_text())
        tensors = {
            key: torch.ones(shape).to(DTYPES[dtype])
            if "scale" in key
            else torch.zeros(shape).to(DTYPES[dtype])
            for key, (dtype, shape) in recorded["tensors"].items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(recorded["config"]))
        return folder

    return make


def test_one_of_everything(exported):
    folder = exported(EVERYTHING)
    config = json.loads((folder / "config.json").read_text())
    stored = read_stored(folder)
    assert is_ours(config)
    assert stored.scheme == "hf"
    assert not stored.has_mtp  # transformers does not load MTP blocks
    assert not stored.unknown
    assert not stored.missing
    unquantized = {m for m, own in stored.formats.items() if own == "bf16"}
    assert {"head", "layers.1.ffn.gate"} <= unquantized
    assert stored.formats["layers.1.attn.compressor.wkv"] == "nvfp4"
    assert stored.formats["layers.1.ffn.experts"] == "nvfp4"
    # the lists of such an export do not name all that is unquantized: only the tensors tell
    assert promised(config).formats != stored.formats
    assert stored.config["compress_ratios"][:4] == [0, 128, 4, 128]
    assert stored.config["num_hash_layers"] == 1

    source = [(n, t) for n, t in torch_tensors(folder).items()]
    transform = Transform(stored, Options(), part="model")
    out = dict(transform.apply(source))
    assert not transform.report.dropped
    runs = runtime_formats(stored, Options())
    for module, how in runs.items():
        if module.endswith("experts"):
            continue
        parts = {n.removeprefix(f"{module}.") for n in out if n.startswith(f"{module}.")}
        expected = {
            "bf16": {"weight"},
            "fp8_block": {"weight", "scale"},
            "nvfp4": {"weight", "weight_scale", "weight_scale_2", "input_scale"},
        }[how]
        assert parts - {"bias", "tid2eid"} == expected, module


def test_experts_only_and_half_converted_with_bf16_mtp(exported):
    folder = exported(EXPERTS)
    stored = read_stored(folder)
    assert is_ours(json.loads((folder / "config.json").read_text()))
    assert stored.scheme == "half_converted"
    assert stored.has_mtp
    assert not stored.unknown
    assert not stored.missing
    assert stored.formats["mtp.0.attn.wq_a"] == "bf16"
    assert {own for m, own in stored.formats.items() if m.endswith("experts")} >= {"nvfp4"}
    runs = runtime_formats(stored, Options())
    assert runs["layers.1.attn.wq_a"] == "bf16"
    assert runs["layers.1.attn.wo_a"] == "fp8_block"
    out = dict(Transform(stored, Options()).apply(torch_tensors(folder).items()))
    assert "layers.0.attn.kv_norm.weight" in out
    assert not [name for name in out if name.startswith("model.")]


def torch_tensors(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
