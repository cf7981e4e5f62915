"""From an export's names and config to the official ones; what does not fit is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelopt_v4_patches.finalize import finalize_checkpoint
from nvfp4_codec.checkpoint import Checkpoint, verify_checkpoint
from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig, Schema, Scheme, to_official

DATA = Path(__file__).with_name("data")
TINY = Path(__file__).parents[4] / "tests" / "assets" / "tiny-dsv4"
Make = Callable[..., Path]


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by the safetensors library."""
    return {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in load_file(f).items()}


def assert_same_bytes(source: Path, output: Path, scheme: Scheme) -> None:
    """Every tensor of one is a tensor of the other, under its official name."""
    before, after = stored(source), stored(output)
    official = {name: to_official(name, scheme) for name in before}
    assert set(official.values()) == after.keys()
    for name, tensor in before.items():
        other = after[official[name]]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
        assert torch.equal(
            tensor.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
        )


def assert_ignore_is_exact(output: Path) -> None:
    """Globs and names of ``ignore`` match all unquantized linears, and no quantized one."""
    config = json.loads((output / "config.json").read_text())
    ignore = config["quantization_config"]["ignore"]
    assert len(set(ignore)) == len(ignore)
    tensors = stored(output)
    for entry in Schema(ModelConfig.from_dict(config)).entries():
        if entry.template.row.linear:
            ignored = any(fnmatchcase(entry.module(), pattern) for pattern in ignore)
            assert ignored == (tensors[entry.name()].dtype != torch.uint8), entry.module()
    hf = json.loads((output / "hf_quant_config.json").read_text())
    assert hf["quantization"]["exclude_modules"] == ignore


def test_a_real_export(real_export: Path, tmp_path: Path) -> None:
    """modelopt's own export of the trained model: nothing to add by hand afterwards."""
    output = tmp_path / "out"
    report = finalize_checkpoint(real_export, output, reference_config=TINY)
    assert report.scheme == "half_converted"
    assert report.findings == ()
    assert report.has_mtp is ("mtp" in real_export.name)
    assert_same_bytes(real_export, output, "half_converted")
    assert_ignore_is_exact(output)
    config = json.loads((output / "config.json").read_text())
    with Checkpoint.open(output) as checkpoint:
        model = ModelConfig.from_dict(config)
        assert Schema(model).match(checkpoint.tensors, "official").ok
        assert verify_checkpoint(checkpoint) == []
    if not report.has_mtp:
        assert "layers.*.attn.wo_a" in config["quantization_config"]["ignore"]


def test_transformers_reads_the_new_config_as_it_read_the_old(
    real_export: Path, tmp_path: Path
) -> None:
    from transformers import DeepseekV4Config

    def read(folder: Path) -> dict[str, Any]:
        raw = json.loads((folder / "config.json").read_text())
        config = DeepseekV4Config(**raw).to_dict()
        for rope in config["rope_parameters"].values():
            rope.pop("type", None)
        return {k: v for k, v in config.items() if k not in DIFFERING}

    before = read(real_export)
    for flat in (False, True):
        output = tmp_path / f"flat-{flat}"
        finalize_checkpoint(real_export, output, reference_config=TINY, flat_rope=flat)
        assert read(output) == before


#: Versions, what MTP an export has, and the plan that a config class adds to itself.
DIFFERING = {"quantization_config", "transformers_version", "dtype", "torch_dtype", "rope_scaling",
             "num_nextn_predict_layers", "base_model_ep_plan", "expert_dtype"}  # fmt: skip


@pytest.mark.parametrize("listing", sorted(path.stem for path in DATA.glob("*.json")))
def test_what_other_versions_export(listing: str, tmp_path: Path) -> None:
    """Names, order, dtypes, shapes and config that modelopt wrote there; zeros for the data."""
    document = json.loads((DATA / f"{listing}.json").read_text())
    dtypes = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32,
              "BF16": torch.bfloat16, "I64": torch.int64}  # fmt: skip
    tensors = {
        name: torch.ones(shape).to(dtypes[dtype])
        for name, (dtype, shape) in document["tensors"].items()
    }
    source = tmp_path / "export"
    source.mkdir()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for name in ("config", "hf_quant_config"):
        (source / f"{name}.json").write_text(json.dumps(document[name]))
    official = json.loads((TINY / "config.json").read_text()) | {"n_routed_experts": 2}
    reference = tmp_path / "reference.json"
    reference.write_text(json.dumps(official))
    with pytest.raises(CheckpointError, match="no config.json there"):
        finalize_checkpoint(source, tmp_path / "out", reference_config=reference)
    reference = reference.rename(tmp_path / "config.json")
    report = finalize_checkpoint(source, tmp_path / "out", reference_config=reference)
    assert report.scheme == ("hf" if "5.9" in listing else "half_converted")
    assert_same_bytes(source, tmp_path / "out", report.scheme)
    assert_ignore_is_exact(tmp_path / "out")
    assert report.config.dropped == ()
    assert report.missing_documents == ("tokenizer.json", "tokenizer_config.json")


@pytest.mark.parametrize("scheme", ["hf", "half_converted", "official"])
@pytest.mark.parametrize("mtp", [False, True])
def test_every_scheme_with_and_without_mtp(
    make_export: Make, reference_config: Path, tmp_path: Path, scheme: Scheme, mtp: bool
) -> None:
    source = make_export(scheme=scheme, mtp=mtp)
    output = tmp_path / "out"
    report = finalize_checkpoint(source, output, reference_config=reference_config)
    assert (report.scheme, report.has_mtp) == (scheme, mtp)
    assert_same_bytes(source, output, scheme)
    assert_ignore_is_exact(output)
    official = json.loads(reference_config.read_text())
    config = json.loads((output / "config.json").read_text())
    quantization = config.pop("quantization_config")
    del official["quantization_config"]
    assert quantization["scale_fmt"] == "ue8m0"
    assert quantization["quant_method"] == "modelopt"
    assert config.pop("num_nextn_predict_layers") == mtp
    del official["num_nextn_predict_layers"]
    assert config == official
    assert any("num_nextn_predict_layers is now 0" in n for n in report.config.notes) is not mtp
    index = json.loads((output / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == stored(output).keys()


def test_flat_rope_is_written_beside_the_official_form(
    make_export: Make, reference_config: Path, tmp_path: Path
) -> None:
    source = make_export()
    finalize_checkpoint(source, tmp_path / "o", reference_config=reference_config, flat_rope=True)
    config = json.loads((tmp_path / "o" / "config.json").read_text())
    assert config["rope_scaling"] == json.loads(reference_config.read_text())["rope_scaling"]
    assert config["rope_parameters"]["rope_type"] == "yarn"
    assert config["rope_parameters"]["factor"] == 16
    assert config["rope_parameters"]["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("entries", "kept", "dropped"),
    [
        (["lm_head", "model.layers.1.self_attn.o_a_proj"], ["head", "layers.1.attn.wo_a"], []),
        (["model.layers.*.mlp.gate"], ["layers.*.ffn.gate"], []),
        # half-converted entries beside HF tensors, and a glob that covers quantized ones
        (["model.layers.0.attn.wo_a"], ["layers.0.attn.wo_a"], []),
        (["model.layers.0.self_attn*"], [], ["model.layers.0.self_attn*"]),
        (["model.layers.7.mlp.gate", "*router*"], [], ["model.layers.7.mlp.gate", "*router*"]),
    ],
)
def test_ignore_is_translated_and_completed(
    make_export: Make, reference_config: Path, tmp_path: Path, entries: list[str],
    kept: list[str], dropped: list[str],
) -> None:  # fmt: skip
    source = make_export()
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["ignore"] = entries
    (source / "config.json").write_text(json.dumps(config))
    output = tmp_path / "out"
    report = finalize_checkpoint(source, output, reference_config=reference_config)
    written = json.loads((output / "config.json").read_text())["quantization_config"]["ignore"]
    assert set(kept) <= set(written)
    assert list(report.config.dropped) == dropped
    assert not set(report.config.added) & set(kept)
    assert_ignore_is_exact(output)


def test_mixed_precision_lists_are_translated(
    make_export: Make, reference_config: Path, tmp_path: Path
) -> None:
    names = ["model.layers.0.self_attn.q_a_proj", "model.layers.1.mlp.experts"]
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "config_groups": {"group_0": {"targets": names, "weights": {"num_bits": 4}}},
        "quantized_layers": {name: {"quant_algo": "NVFP4"} for name in names},
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    }
    source = make_export(quantization=quantization)
    output = tmp_path / "out"
    finalize_checkpoint(source, output, reference_config=reference_config)
    written = json.loads((output / "config.json").read_text())["quantization_config"]
    official = ["layers.0.attn.wq_a", "layers.1.ffn.experts"]
    assert written["config_groups"]["group_0"]["targets"] == official
    assert list(written["quantized_layers"]) == official
    hf = json.loads((output / "hf_quant_config.json").read_text())["quantization"]
    assert hf["kv_cache_quant_algo"] == "FP8"
    assert list(hf["quantized_layers"]) == official


def test_tokenizer_files_are_named_or_taken_from_the_reference(
    make_export: Make, reference_config: Path, tmp_path: Path
) -> None:
    source = make_export()
    (source / "tokenizer.json").unlink()
    report = finalize_checkpoint(source, tmp_path / "a", reference_config=reference_config)
    assert report.missing_documents == ("tokenizer.json",)
    assert "tokenizer.json is missing" in report.findings[0]
    (reference_config.parent / "encoding").mkdir()
    for name in ("tokenizer.json", "encoding/encoding.py", "evil.py", "generation_config.json"):
        (reference_config.parent / name).write_text("{}")
    report = finalize_checkpoint(source, tmp_path / "b", reference_config=reference_config.parent)
    assert report.copied_documents == ("tokenizer.json", "encoding/encoding.py")
    assert report.missing_documents == ()
    assert (tmp_path / "b" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "b" / "generation_config.json").read_text() != "{}"  # the export's own
    assert not (tmp_path / "b" / "evil.py").exists()


def test_the_input_is_not_touched_and_a_longer_header_is_copied(
    make_export: Make, reference_config: Path, tmp_path: Path
) -> None:
    """attn.norm becomes attn.kv_norm: alone in a file, its new header does not fit."""
    source = make_export(scheme="half_converted", mtp=True, files=1)
    tensors = load_file(source / "model.safetensors")
    alone = {"mtp.0.attn.norm.weight": tensors.pop("mtp.0.attn.norm.weight")}
    (source / "model.safetensors").unlink()
    weight_map = dict.fromkeys(tensors, "a.safetensors") | dict.fromkeys(alone, "b.safetensors")
    save_file(tensors, source / "a.safetensors")
    save_file(alone, source / "b.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    before = {path: path.read_bytes() for path in source.iterdir()}
    finalize_checkpoint(source, tmp_path / "out", reference_config=reference_config)
    assert_same_bytes(source, tmp_path / "out", "half_converted")
    sizes = [os.stat(folder / "b.safetensors").st_size for folder in (source, tmp_path / "out")]
    assert sizes[1] > sizes[0]
    assert {path: path.read_bytes() for path in source.iterdir()} == before


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def replaced(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


EXPERT = "model.layers.1.mlp.experts.1.up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(f"{EXPERT}.weight_scale"), rf"1 missing: {EXPERT}.weight_scale"),
        (without(f"{EXPERT}.weight_scale_2"), rf"1 missing: {EXPERT}.weight_scale_2"),
        (without(f"{EXPERT}.input_scale"), rf"1 missing: {EXPERT}.input_scale"),
        (without("model.layers.0.self_attn.sinks"), "missing: model.layers.0.self_attn.sinks"),
        (replaced("model.layers.2.self_attn.sinks", torch.ones(2)),
         r"1 not in this model: model.layers.2.self_attn.sinks"),
        (replaced("model.layers.0.self_attn.rotary.inv_freq", torch.ones(2)),
         "1 not in this model: model.layers.0.self_attn.rotary.inv_freq"),
        (replaced(f"{EXPERT}.weight", torch.ones(64, 32, dtype=torch.uint8)),
         rf"tensor {EXPERT}.weight: U8 \[64, 32\]; .* U8 \[64, 64\]"),
        (replaced(f"{EXPERT}.weight_scale", torch.ones(64, 8)), r"F32 \[64, 8\]; .*F8_E4M3"),
        (replaced(f"{EXPERT}.weight_scale_2", torch.ones(2)), r"F32 \[2\]; .* F32 \[\]"),
        (replaced(f"{EXPERT}.weight_scale_2", torch.tensor(float("inf"))), "weight_scale_2 is inf"),
        (replaced("model.layers.0.self_attn.o_a_proj.weight_scale", torch.ones(2)),
         "o_a_proj.weight_scale: belongs to no weight"),
        (replaced("layers.0.attn.wq_a.weight", torch.ones(2)), "mixed checkpoints are refused"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(
    make_export: Make, reference_config: Path, tmp_path: Path,
    change: Callable[[dict[str, Tensor]], None], message: str,
) -> None:  # fmt: skip
    source = make_export(change=change)
    with pytest.raises(CheckpointError, match=message):
        finalize_checkpoint(source, tmp_path / "out", reference_config=reference_config)
    assert not (tmp_path / "out").exists()


def test_many_missing_tensors_are_counted_by_kind(
    make_export: Make, reference_config: Path, tmp_path: Path
) -> None:
    """A whole expert is missed once for each of its weights; what beside them is not known."""
    config = json.loads(reference_config.read_text()) | {"n_routed_experts": 4}
    reference_config.write_text(json.dumps(config))
    source = make_export()
    pattern = r"1[24] missing: .* more \(.*4 x model\.layers\.#\.mlp\.experts\.#\.down_proj\.weight"
    with pytest.raises(CheckpointError, match=pattern):
        finalize_checkpoint(source, tmp_path / "out", reference_config=reference_config)


def test_what_is_no_export_is_refused(
    make_export: Make, reference_config: Path, tmp_path: Path
) -> None:
    source = make_export(files=1)
    for path in (tmp_path / "nothing", source / "model.safetensors"):
        with pytest.raises(
            CheckpointError, match=r"there is no folder .*\. Give that of the export"
        ):
            finalize_checkpoint(path, tmp_path / "out", reference_config=reference_config)
    (source / "config.json").unlink()
    with pytest.raises(CheckpointError, match="no config.json beside the weights"):
        finalize_checkpoint(source, tmp_path / "out", reference_config=reference_config)


def test_a_reference_in_transformers_dialect_is_refused(
    make_export: Make, reference_config: Path, tmp_path: Path
) -> None:
    source = make_export()
    lacking = "compress_ratios, num_hash_layers, topk_method, rope_scaling"
    with pytest.raises(CheckpointError, match=rf"lacks {lacking}, quantization_config.scale_fmt"):
        finalize_checkpoint(source, tmp_path / "out", reference_config=source)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (None, "no quantization_config"),
        ({"quant_method": "fp8"}, "quant_method is 'fp8'"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_algo 'FP8'"),
    ],
)
def test_what_is_not_modelopts_nvfp4_is_refused(
    make_export: Make, reference_config: Path, tmp_path: Path, quantization: Any, message: str
) -> None:
    source = make_export()
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        finalize_checkpoint(source, tmp_path / "out", reference_config=reference_config)


def test_other_values_than_the_references_are_reported(
    make_export: Make, reference_config: Path, tmp_path: Path
) -> None:
    source = make_export()
    config = json.loads((source / "config.json").read_text()) | {"swiglu_limit": 7.0}
    (source / "config.json").write_text(json.dumps(config))
    report = finalize_checkpoint(source, tmp_path / "out", reference_config=reference_config)
    assert any("swiglu_limit is 7.0 in the export and 10.0" in n for n in report.config.notes)
