"""What every command refuses in the same words: the file, the key or tensor, and the fix."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import from_official
from vllm_dsv4.cli import main
from vllm_dsv4.stored import is_ours, promised

Folder = Callable[..., Path]
MODULE = "layers.0.attn.wq_b"
LAYER = f"quantization_config.quantized_layers['{MODULE}']"


@pytest.fixture
def copy(checkpoint: Folder, tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint("full"), tmp_path / "copy")


def refusal(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says on standard error, in one line."""
    output = folder.with_name("out")
    more = {
        "doctor": [],
        "plan": ["--gpus", "H200:1"],
        "serve": ["--gpus", "H200:1", "--dry-run", "--skip-doctor"],
        "prepare": [str(output)],
    }
    assert main([command, str(folder), *more[command]]) == 2
    assert not output.exists()
    return " ".join(capsys.readouterr().err.split())


def put(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["quantization_config"].update({key: value})


def put_layer(value: object) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["quantization_config"]["quantized_layers"].update({MODULE: value})


CONFIGS = {
    "a word for a layer": (
        put_layer("NVFP4"),
        f"{LAYER} is 'NVFP4'; an object such as {{\"quant_algo\": \"NVFP4\"}} is needed.",
    ),
    "a number for an algorithm": (put_layer({"quant_algo": 4}), f"{LAYER} is {{'quant_algo': 4}};"),
    "a list of layers": (
        put("quantized_layers", ["a"]), "quantization_config.quantized_layers is ['a']; an object",
    ),
    "a word to ignore": (
        put("ignore", "lm_head"), "quantization_config.ignore is 'lm_head'; a list of module names",
    ),
    "a number to ignore": (put("exclude_modules", [1]), "quantization_config.exclude_modules is"),
    "a word for a block's size": (
        put("weight_block_size", "128"),
        "quantization_config.weight_block_size is '128'; a pair of numbers, such as [128, 128],",
    ),
    "half a block's size": (
        put("weight_block_size", [128]), "quantization_config.weight_block_size is [128]; a pair",
    ),
    "no block": (
        lambda config: config.update(quantization_config="NVFP4"),
        "quantization_config is 'NVFP4'; an object is needed.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("command", ["doctor", "plan", "serve", "prepare"])
@pytest.mark.parametrize("case", CONFIGS)
def test_a_value_of_an_unusable_type(
    command: str, case: str, copy: Path, checkpoints: ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    edit, message = CONFIGS[case]
    checkpoints.change_config(copy, edit)
    said = refusal(command, copy, capsys)
    assert f"file config.json: {message}" in said
    assert "Repair it, or export again" in said


LAYERS = {
    "compress_ratios": ([[0], 128, 4, 128, 0], "is [[0], 128, 4, 128, 0]; a list of numbers"),
    "layer_types": (4, "is 4; a list of words"),
    "mlp_layer_types": ([["moe"]], "is [['moe']]; a list of words"),
    "num_hash_layers": ("x", "is 'x'; a number of layers"),
    "num_nextn_predict_layers": (-3, "is -3; a number of MTP blocks"),
    "dspark_target_layer_ids": (2, "is 2; a list of layers"),
}


@pytest.mark.parametrize("command", ["doctor", "plan", "serve", "prepare"])
@pytest.mark.parametrize("key", LAYERS)
def test_layers_of_an_unusable_type(
    command: str, key: str, copy: Path, checkpoints: ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    value, message = LAYERS[key]
    checkpoints.change_config(copy, lambda config: config.update({key: value}))
    said = refusal(command, copy, capsys)
    assert f"file config.json: {key} {message}" in said
    assert said.endswith("Take it from the official config.json.")


@pytest.mark.parametrize("command", ["plan", "serve"])
@pytest.mark.parametrize("key", ["index_topk", "sliding_window", "max_position_embeddings"])
@pytest.mark.parametrize("value", [10**400, -3, "x", True], ids=["huge", "negative", "word", "yes"])
def test_a_size_that_none_can_be_planned_with(
    command: str, key: str, value: object, copy: Path, checkpoints: ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A number of 400 digits was a traceback, a word was taken for the default."""
    checkpoints.change_config(copy, lambda config: config.update({key: value}))
    said = refusal(command, copy, capsys)
    assert f"config.json: {key} is {repr(value)[:9]}" in said
    assert "a positive whole number is needed. Take it from the official config.json." in said


@pytest.mark.parametrize("case", CONFIGS)
def test_the_plugin_refuses_it_of_a_model_on_a_hub(case: str, checkpoint: Folder) -> None:
    edit, message = CONFIGS[case]
    config = json.loads((checkpoint("full") / "config.json").read_text())
    edit(config)
    with pytest.raises(CheckpointError) as caught:
        promised(config)
    assert f"file config.json: {message}" in str(caught.value)


def test_a_layer_that_is_a_word_claims_the_checkpoint_all_the_same() -> None:
    """Else the plugin would stay out, and the error be whatever stock vLLM stumbles over."""
    block: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    config = {"model_type": "deepseek_v4", "quantization_config": block}
    block["quantized_layers"] = {MODULE: "NVFP4"}
    assert is_ours(config)
    block["quantized_layers"] = {MODULE: "FP8_PB_WO"}
    assert not is_ours(config)


def half_renamed(tensors: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.startswith("layers.1.")]:
        tensors[from_official(name, "hf")] = tensors.pop(name)


@pytest.mark.parametrize("command", ["plan", "serve", "prepare"])
def test_names_of_two_schemes(
    command: str, copy: Path, checkpoints: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints.change(copy, half_renamed)
    said = refusal(command, copy, capsys)
    assert "file model.safetensors, tensor model.layers.1." in said
    assert "names of different schemes (official; hf)" in said
    assert "export again into a new one" in said


@pytest.mark.parametrize("command", ["plan", "serve", "prepare"])
def test_tensors_of_another_model(
    command: str, copy: Path, checkpoints: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def rename(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[f"encoder.{name}"] = tensors.pop(name)

    checkpoints.change(copy, rename)
    said = refusal(command, copy, capsys)
    assert f"file {copy}: no name is one of DeepSeek-V4's" in said
    assert "Give the folder of a DeepSeek-V4 checkpoint." in said


@pytest.mark.parametrize("command", ["doctor", "plan", "serve", "prepare"])
def test_a_folder_that_is_none(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "absent"
    said = refusal(command, folder, capsys)
    assert f"error: there is no folder {folder}. Give that of a DeepSeek-V4 checkpoint" in said
    assert "hf download" in said


@pytest.mark.parametrize("command", ["doctor", "plan", "serve", "prepare"])
def test_a_file_where_a_folder_is_wanted(
    command: str, checkpoint: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    file = checkpoint("full") / "config.json"
    said = refusal(command, file, capsys)
    assert f"file {file}: this is a file. Give the folder of a DeepSeek-V4 checkpoint" in said
    assert "there is no folder" not in said
