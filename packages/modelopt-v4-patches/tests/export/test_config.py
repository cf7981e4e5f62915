"""The two configs: a contract on disk, modelopt's own converter, and completeness."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from fnmatch import fnmatchcase
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from modelopt_v4_patches import __version__
from modelopt_v4_patches.config import export_documents
from modelopt_v4_patches.export import ExportOptions, export_checkpoint
from nvfp4_codec.checkpoint import Checkpoint
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig, Schema

ASSETS = Path(__file__).parents[4] / "tests" / "assets"
Build = Callable[..., Path]


def configs(
    folder: Path, options: ExportOptions, weight_only: tuple[str, ...] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    schema = Schema(ModelConfig.from_file(folder / "config.json"))
    with Checkpoint.open(folder) as source:
        files = export_documents(source, schema, options, weight_only)
    return json.loads(files["config.json"]), json.loads(files["hf_quant_config.json"])


@pytest.mark.parametrize("preset", ["full", "experts"])
def test_equals_the_contract(preset: Any, shards: Path, snapshot: Path, tmp_path: Path) -> None:
    """tests/assets/config_*.json is what the vLLM plugin is written against."""
    expected = json.loads((ASSETS / f"config_{preset}.json").read_text())
    expected["quantization_config"]["producer"]["version"] = __version__
    export_checkpoint(shards, snapshot, tmp_path / "out", ExportOptions(preset=preset))
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found == expected
    assert list(found) == list(expected)


@pytest.mark.parametrize("preset", ["full", "experts"])
def test_the_model_stays_as_the_source_says(preset: Any, shards: Path) -> None:
    source = json.loads((shards / "config.json").read_text())
    config, _ = configs(shards, ExportOptions(preset=preset))
    for key in source.keys() - {"quantization_config"}:
        assert config[key] == source[key]
    changed = {"quant_method"} if preset == "full" else set()
    for key in source["quantization_config"].keys() - changed:  # scale_fmt among them
        assert config["quantization_config"][key] == source["quantization_config"][key]


MIXED = ExportOptions(attn="bf16", shared="fp8", wo_a="nvfp4", compressor="nvfp4", kv_cache="none")


@pytest.mark.parametrize(
    "options",
    [ExportOptions(), ExportOptions(mtp="drop"), ExportOptions("experts", wo_a="bf16"), MIXED],
    ids=["full", "no-mtp", "experts-wo_a", "mixed"],
)
def test_each_linear_is_in_quantized_layers_or_in_ignore(
    options: ExportOptions, shards: Path
) -> None:
    schema = Schema(ModelConfig.from_file(shards / "config.json"))
    wo_a = tuple(f"layers.{i}.attn.wo_a" for i in range(4))
    config, _ = configs(shards, options, wo_a if options.wo_a == "nvfp4" else ())
    block = config["quantization_config"]
    assert block["quant_method"] == "modelopt"
    algorithms = {"nvfp4": "NVFP4", "fp8": "FP8_PB_WO"}
    expected = {}
    ignored = set()
    for entry in schema.entries():
        layout = options.layout(entry)
        if layout is None or not entry.template.row.linear:
            continue
        module = entry.module()
        if entry.role == "routed_expert":
            module = module.rsplit(".", 2)[0]
        if layout == "nvfp4":
            expected[module] = "W4A16_NVFP4" if entry.role == "wo_a" else "NVFP4"
        elif layout == "official" and entry.format == "fp8_block":
            expected[module] = algorithms["fp8"]
        else:
            ignored.add(module)
    layers = block["quantized_layers"]
    assert {name: layer["quant_algo"] for name, layer in layers.items()} == expected
    assert set(block["ignore"]) == ignored
    assert len(block["ignore"]) == len(ignored)
    targets = [name for group in block["config_groups"].values() for name in group["targets"]]
    assert sorted(targets) == sorted(expected)


@pytest.mark.parametrize("options", [ExportOptions(), MIXED], ids=["full", "mixed"])
def test_config_json_is_what_modelopt_makes_of_hf_quant_config(
    options: ExportOptions, shards: Path
) -> None:
    """By modelopt's own converter, which hands FP8_PB_WO through with a warning.

    Its file is loaded alone: it needs nothing, and importing modelopt takes many seconds.
    """
    file = distribution("nvidia-modelopt").locate_file("modelopt/torch/export/convert_hf_config.py")
    convert = runpy.run_path(str(file))["convert_hf_quant_config_format"]
    config, document = configs(shards, options, ("layers.0.attn.wo_a",))
    with pytest.warns(UserWarning, match="FP8_PB_WO"):
        expected = convert(document)
    block = config["quantization_config"]
    assert {key: block[key] for key in expected} == expected
    cache = {"dynamic": False, "num_bits": 8, "type": "float"}
    assert block.get("kv_cache_scheme") == (cache if options.kv_cache == "fp8_cast" else None)


def test_experts_has_nvidias_layout(shards: Path) -> None:
    """As modelopt's DeepSeek-V4 example writes it; but MTP's experts are NVFP4 here, so the
    ``mtp.*`` that it ignores, and that readers take for MXFP4, must not be there."""
    config, document = configs(shards, ExportOptions("experts", kv_cache="none"))
    block = config["quantization_config"]
    names = [f"layers.{i}.ffn.experts" for i in range(4)] + ["mtp.0.ffn.experts"]
    assert block["quant_method"] == "fp8"
    assert block["quant_algo"] == "MIXED_PRECISION"
    assert block["moe_quant_algo"] == "NVFP4"
    assert block["kv_cache_quant_algo"] is None
    assert block["group_size"] == 16
    assert block["quantized_layers"] == {
        n: {"quant_algo": "NVFP4", "group_size": 16} for n in names
    }
    values = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group = {"input_activations": values, "weights": values, "targets": ["Linear"]}
    assert block["config_groups"] == {"group_0": group}
    assert block["ignore"][:3] == ["*.attn.*", "*.ffn.shared_experts.*", "head"]
    assert document["quantization"]["exclude_modules"] == block["ignore"]
    assert document["quantization"]["quantized_layers"] == block["quantized_layers"]
    assert config["expert_dtype"] == "fp4"  # without it vLLM reads the experts as FP8


@pytest.mark.parametrize("mtp", ["keep", "drop"])
@pytest.mark.parametrize("dspark", [False, True])
def test_experts_ignores_all_linears_but_the_experts(
    mtp: Any, dspark: bool, small: Build, tmp_path: Path
) -> None:
    keys = {"dspark_target_layer_ids": [1], "dspark_markov_rank": 8} if dspark else {}
    folder = small(tmp_path / "in", **keys)
    config, _ = configs(folder, ExportOptions("experts", mtp=mtp))
    ignore = config["quantization_config"]["ignore"]
    schema = Schema(ModelConfig.from_file(folder / "config.json"))
    stored = [e for e in schema.entries() if e.template.row.linear and not (
        mtp == "drop" and e.in_mtp)]  # fmt: skip
    for entry in stored:
        matched = any(fnmatchcase(entry.module(), glob) for glob in ignore)
        assert matched == (entry.role != "routed_expert"), entry.module()
    for glob in ignore:
        assert any(fnmatchcase(entry.module(), glob) for entry in stored), glob


def test_small_files_come_along_and_code_does_not(
    small: Build, make_snapshot: Build, tmp_path: Path
) -> None:
    """But for the chat encoding, a script that DeepSeek ships instead of a template."""
    folder = small(tmp_path / "in")
    (folder / "encoding").mkdir()
    (folder / "encoding" / "encoding_dsv4.py").write_text("raise SystemExit")
    (folder / "encoding" / "weights.bin").write_text("")
    (folder / "inference").mkdir()
    (folder / "inference" / "model.py").write_text("raise SystemExit")
    (folder / "modeling_deepseek.py").write_text("raise SystemExit")
    snapshot = make_snapshot(folder, tmp_path / "amax.safetensors")
    export_checkpoint(folder, snapshot, tmp_path / "out")
    found = {
        str(path.relative_to(tmp_path / "out"))
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert {name for name in found if not name.endswith(".safetensors")} == {
        "config.json", "hf_quant_config.json", "generation_config.json", "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors.index.json", "export_manifest.json", "encoding/encoding_dsv4.py",
    }  # fmt: skip
