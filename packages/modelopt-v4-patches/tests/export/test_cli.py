"""The command: its flags reach the options, its table and JSON say what was written."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelopt_v4_patches.cli.export import register

Build = Callable[..., Path]


def call(*words: object) -> int:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    arguments = parser.parse_args(["export", *map(str, words), "--workers", "1"])
    code: int = arguments.run(arguments)
    return code


@pytest.fixture
def case(small: Build, make_snapshot: Build, tmp_path: Path) -> tuple[object, ...]:
    source = small(tmp_path / "in")
    name = "model.layers.1.self_attn.kv_proj.input_quantizer"
    snapshot = make_snapshot(source, tmp_path / "amax.safetensors", {name: 99.0})
    return source, tmp_path / "out", "--snapshot", snapshot


def test_shows_what_is_stored_how(
    case: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*case) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["routed_expert", "NVFP4", "18", "0.08"] in lines
    assert ["wo_a", "FP8", "3", "0.02"] in lines
    text = [" ".join(line) for line in lines]
    assert "3 files written, 0 kept from before" in text
    assert "routed experts: exactly the official values" in text
    assert "6 uncalibrated tensors have the input_scale of the model's maximum" in text
    assert "1 fused tensors have their partner's larger input_scale" in text


def test_json(case: tuple[object, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call(*case, "--json", "--preset", "experts") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    written = sorted((tmp_path / "out").glob("*.safetensors"))
    assert found["written"] == [path.name for path in written]
    assert found["bytes"] == sum(path.stat().st_size for path in written)
    stored = {(row["role"], row["format"]): row["tensors"] for row in found["stored"]}
    assert stored["routed_expert", "NVFP4"] == 18
    assert stored["wq_a", "FP8"] == 3
    assert found["requantized_blocks"] == {}
    assert found["borrowed_input_scales"]["mtp.0.ffn.experts.1.w2"] == "model"
    assert found["complete_unchecked"] is False
    assert call(*case, "--json", "--preset", "experts", "--resume") == 0
    assert json.loads(capsys.readouterr().out)["complete_unchecked"] is True


def test_every_flag_reaches_the_config(
    case: tuple[object, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--attn bf16 --shared fp8 --indexer nvfp4 --wo-a bf16 --compressor nvfp4 --mtp drop "
             "--kv-cache none")  # fmt: skip
    assert call(*case, *flags.split()) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    block = config["quantization_config"]
    assert config["num_nextn_predict_layers"] == 0
    assert "kv_cache_scheme" not in block
    layers = {name: layer["quant_algo"] for name, layer in block["quantized_layers"].items()}
    assert layers["layers.0.ffn.shared_experts.w1"] == "FP8_PB_WO"
    assert layers["layers.0.attn.indexer.wq_b"] == "NVFP4"
    assert layers["layers.1.attn.compressor.wgate"] == "NVFP4"
    assert {"layers.0.attn.wq_a", "layers.0.attn.wo_a"} <= set(block["ignore"])


@pytest.mark.parametrize(
    "flag", [["--attn", "int4"], ["--compressor", "fp8"], ["--experts", "fp8"]]
)
def test_there_is_no_flag_for_anything_else(case: tuple[object, ...], flag: list[str]) -> None:
    with pytest.raises(SystemExit):
        call(*case, *flag)
