"""NVFP4 without input_scale: the doctor says in advance what the plugin and `serve` refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_codec.cli import main as nvfp4
from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import from_official
from vllm_dsv4.cli import main
from vllm_dsv4.doctor import examine
from vllm_dsv4.errors import OptionError, StoredError
from vllm_dsv4.gpus import parse_gpus
from vllm_dsv4.options import Options, runtime_formats, unscaled
from vllm_dsv4.prepare import prepare_checkpoint
from vllm_dsv4.serve import serve_command
from vllm_dsv4.stored import list_of_experts, read_stored

WO_B = "layers.0.attn.wo_b.weight"
#: The first of each kind of weight: experts of the layers, and of the MTP block.
EXPERTS = [
    f"{block}.ffn.experts.0.w{i}.weight" for block in ("layers.0", "mtp.0") for i in (1, 2, 3)
]
GPUS = parse_gpus("H200:1")


@pytest.fixture(scope="module")
def weight_only(checkpoints, tmp_path_factory) -> Path:
    """What `nvfp4 convert` makes of the official checkpoint: no calibration, so no input_scale."""
    folder: Path = tmp_path_factory.mktemp("converted") / "nvfp4"
    assert nvfp4(["convert", str(checkpoints.TINY), str(folder), "--to", "nvfp4"]) == 0
    layers = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert "W4A16_NVFP4" in {how["quant_algo"] for how in layers["quantized_layers"].values()}
    return folder


def strip(content: Any, *suffixes: str, algorithm: str | None = "W4A16_NVFP4") -> None:
    """Takes the input_scale of modules that end so, and calls them weight-only in config.json."""
    for name in [name for name in content.tensors if name.endswith(".input_scale")]:
        module = name.removesuffix(".input_scale")
        if module.endswith(suffixes):
            del content.tensors[name]
            if algorithm is None:
                del content.quantization["quantized_layers"][module]
            else:
                content.quantization["quantized_layers"][module] = {"quant_algo": algorithm}


def without_wo_b(content: Any, algorithm: str = "W4A16_NVFP4") -> None:
    strip(content, ".attn.wo_b", algorithm=algorithm)


def errors(made: Any) -> list[tuple[str, str]]:
    return [(found.code, found.tensor) for found in made.findings if found.level == "error"]


def test_what_convert_makes_is_not_healthy(weight_only, capsys):
    assert main(["doctor", str(weight_only)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "served by vLLM with the plugin, but not as it is: see missing-input-scale" in out
    assert "missing-input-scale (error: serving fails or is wrong)" in out
    assert f"where {EXPERTS[0]} in model.safetensors, and 5 more" in out
    assert "found NVFP4 without an input_scale, as are 64 of its kind" in out
    assert "fix Export the model again with a calibration of its activations: `dsv4-quantize" in out
    assert "NOT healthy: 6 error, 0 suspected, 2 handled" in out


def test_json_names_every_kind_of_weight(weight_only, capsys):
    assert main(["doctor", str(weight_only), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["healthy"] is False
    found = {f["tensor"]: f for f in document["findings"] if f["level"] == "error"}
    assert sorted(found) == sorted(EXPERTS)
    for finding in found.values():
        assert (finding["code"], finding["evidence"]) == ("missing-input-scale", "certain")
        assert finding["file"] == "model.safetensors"
        assert "`dsv4-quantize calibrate`, then `dsv4-quantize export`" in finding["fix"]
        assert "the plugin refuses it" in finding["effect"]


def test_serve_refuses_it_as_the_doctor_says(weight_only):
    first = examine(weight_only).findings[0]
    with pytest.raises(CheckpointError) as refused:
        serve_command(weight_only, GPUS)
    assert (refused.value.tensor, refused.value.file) == (first.tensor, first.file)
    for text in (first.found, first.expected, first.fix, "missing-input-scale, and 5 more"):
        assert text in str(refused.value)
    assert "--skip-doctor" not in str(refused.value)  # which would not help:
    with pytest.raises(OptionError, match=r"5 NVFP4 linears have no input_scale") as stopped:
        serve_command(weight_only, GPUS, skip_doctor=True)
    assert first.fix in str(stopped.value)


def test_the_plugin_refuses_the_same_weights(weight_only):
    stored = read_stored(weight_only)
    lists = {*(f"layers.{i}.ffn.experts" for i in range(4)), "mtp.0.ffn.experts"}
    assert set(unscaled(stored, Options())) == lists
    told = {
        list_of_experts(tensor.removesuffix(".weight"))
        for _, tensor in errors(examine(weight_only))
    }
    assert told == {"layers.0.ffn.experts", "mtp.0.ffn.experts"}
    with pytest.raises(OptionError, match=r"the first is layers\.0\.ffn\.experts"):
        runtime_formats(stored, Options())


def test_prepare_gives_the_same_fix(weight_only, tmp_path):
    fix = examine(weight_only).findings[0].fix
    with pytest.raises(StoredError) as refused:
        prepare_checkpoint(weight_only, tmp_path / "out")
    assert str(refused.value).endswith(fix)


@pytest.mark.parametrize("algorithm", ["W4A16_NVFP4", "NVFP4"])
def test_what_an_option_moves_is_told_with_the_option(check, only, algorithm: str):
    """Whatever config.json promises: to say W4A16_NVFP4 there would not make the plugin run it."""
    found = only(check(lambda content: strip(content, ".attn.wo_b", algorithm=algorithm)))
    assert (found.code, found.tensor, found.level) == ("missing-input-scale", WO_B, "error")
    assert found.found == "NVFP4 without an input_scale, as are 4 of its kind"
    assert found.fix.startswith("Set attn_dtype to 'fp8' or 'bf16'. Or: Export the model again")


@pytest.mark.parametrize("algorithm", ["W4A16_NVFP4", "NVFP4"])
def test_with_the_option_serve_goes_on(healthy, writer, tmp_path, algorithm: str):
    content = healthy("full")
    without_wo_b(content, algorithm)
    folder = writer(content, tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"wo_b\.weight: NVFP4 without.*Set attn_dtype"):
        serve_command(folder, GPUS)
    with pytest.raises(CheckpointError, match="missing-input-scale"):
        serve_command(folder, GPUS, {"shared_dtype": "fp8"})
    for given in ({"attn_dtype": "fp8"}, {"attn_dtype": "bf16"}):
        assert serve_command(folder, GPUS, given).argv
        assert examine(folder, options=Options(**given)).findings == ()
    elsewhere = json.dumps({"vllm_dsv4": {"attn_dtype": "fp8"}})
    assert serve_command(folder, GPUS, arguments=["--additional-config", elsewhere]).argv


@pytest.mark.parametrize("algorithm", ["W4A16_NVFP4", "NVFP4"])
def test_prepare_makes_fp8_of_it(healthy, writer, tmp_path, algorithm: str):
    content = healthy("full")
    without_wo_b(content, algorithm)
    prepare_checkpoint(writer(content, tmp_path / "c"), tmp_path / "out")
    assert examine(tmp_path / "out").healthy


def test_what_runs_in_another_format_needs_none(check):
    """wo_a, and what is fused with a linear that is not NVFP4, which then runs in BF16."""
    assert check(lambda content: None, "all-nvfp4").findings == ()

    def change(content: Any) -> None:
        strip(content, ".attn.wkv")
        for name in [n for n in content.tensors if n.endswith(".attn.wq_a.weight_scale_2")]:
            module = name.removesuffix(".weight_scale_2")
            for part in ("weight_scale", "weight_scale_2", "input_scale"):
                del content.tensors[f"{module}.{part}"]
            rows, half = content.tensors[f"{module}.weight"].shape
            content.tensors[f"{module}.weight"] = torch.ones(rows, 2 * half, dtype=torch.bfloat16)

    made = check(change)
    assert "fused-format-mismatch" in {found.code for found in made.findings}
    assert made.healthy


@pytest.mark.parametrize("algorithm", ["W4A16_NVFP4", "NVFP4"])
def test_compressors_need_none(healthy, writer, tmp_path, algorithm: str):
    content = healthy("all-nvfp4")
    before = len(content.tensors)
    strip(content, ".compressor.wkv", ".compressor.wgate", ".wo_a", algorithm=algorithm)
    assert len(content.tensors) < before
    folder = writer(content, tmp_path / "c")
    assert examine(folder).findings == ()
    assert serve_command(folder, GPUS).argv


def test_a_way_out_is_offered_only_where_it_is_one(healthy, writer, tmp_path):
    """One of a kind lacks its input_scale: the plugin refuses it too, but in another format."""
    content = healthy("full")
    strip(content, "layers.2.attn.wo_b")
    folder = writer(content, tmp_path / "c")
    with pytest.raises(CheckpointError, match="missing-tensor") as refused:
        serve_command(folder, GPUS)
    assert "--skip-doctor" not in str(refused.value)
    with pytest.raises(CheckpointError, match="--skip-doctor"):
        serve_command(folder, GPUS, {"attn_dtype": "bf16"})
    assert serve_command(folder, GPUS, {"attn_dtype": "bf16"}, skip_doctor=True).argv


def test_a_config_that_does_not_know_of_nvfp4_changes_nothing(check):
    """The plugin goes by what is stored, which it then refuses."""
    made = check(lambda content: strip(content, ".attn.wo_b", algorithm=None))
    assert errors(made) == [("missing-input-scale", WO_B)]
    assert {f.code for f in made.findings if f.level == "handled"} == {"config-disagrees"}


def test_where_some_of_a_kind_have_one_the_others_are_missing_names(check, only):
    found = only(check(lambda content: strip(content, "layers.2.attn.wo_b")))
    assert (found.code, found.tensor) == ("missing-tensor", "layers.2.attn.wo_b.input_scale")


@pytest.mark.parametrize("scheme", ["hf", "half_converted"])
def test_names_are_those_of_the_checkpoint(check, scheme: str):
    suffixes = tuple(f".{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"))
    made = check(lambda content: strip(content, *suffixes, algorithm="NVFP4"), "full", scheme)
    told = {tensor for code, tensor in errors(made) if code == "missing-input-scale"}
    assert told >= {from_official(name, scheme) for name in EXPERTS}


def test_a_checkpoint_that_the_plugin_leaves_alone_is_not_asked(check):
    """Stock vLLM serves it, or nobody: config.json says what is wrong."""

    def change(content: Any) -> None:
        strip(content, ".attn.wo_b")
        content.config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3"}

    assert "missing-input-scale" not in {found.code for found in check(change).findings}
