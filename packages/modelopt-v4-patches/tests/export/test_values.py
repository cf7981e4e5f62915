"""What the exported tensors hold, against torch formulas and nvidia-modelopt itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from modelopt_v4_patches.export import ExportOptions, ExportReport, export_checkpoint
from modelopt_v4_patches.validate import validate
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig, Schema

Build = Callable[..., Path]
Export = tuple[ExportOptions, dict[str, Tensor], ExportReport]
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, read by the official library."""
    return {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in load_file(f).items()}


def e2m1(packed: Tensor) -> Tensor:
    """The values of packed codes, low nibble first."""
    codes = torch.stack([packed.view(torch.uint8) & 15, packed.view(torch.uint8) >> 4], -1)
    codes = codes.flatten(-2).int()
    return torch.where(codes >= 8, -1.0, 1.0) * GRID[codes % 8]


def per_block(values: Tensor, scale: Tensor) -> Tensor:
    """values * scale in float64, one scale for so many columns."""
    wide = scale.repeat_interleave(values.shape[-1] // scale.shape[-1], dim=-1)
    return values.double() * wide.double()


def official_expert(tensors: dict[str, Tensor], module: str) -> Tensor:
    exponent = tensors[f"{module}.scale"].view(torch.uint8).double() - 127
    return per_block(e2m1(tensors[f"{module}.weight"]), torch.exp2(exponent))


def official_fp8(tensors: dict[str, Tensor], module: str) -> Tensor:
    weight, scale = tensors[f"{module}.weight"], tensors[f"{module}.scale"]
    scales = torch.exp2(scale.view(torch.uint8).double() - 127)
    scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight.double() * scales[: weight.shape[0], : weight.shape[1]]


def exported(tensors: dict[str, Tensor], module: str) -> Tensor:
    scale = tensors[f"{module}.weight_scale"].double() * tensors[f"{module}.weight_scale_2"]
    return per_block(e2m1(tensors[f"{module}.weight"]), scale)


def experts(tensors: dict[str, Tensor]) -> list[str]:
    found = [n.removesuffix(".weight") for n in tensors if ".experts." in n and n[-6:] == "weight"]
    assert found
    return found


@pytest.fixture(scope="module")
def source(shards: Path) -> dict[str, Tensor]:
    return tensors_of(shards)


@pytest.fixture(scope="module", params=["full", "experts"])
def export(
    request: pytest.FixtureRequest,
    shards: Path,
    snapshot: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Export:
    options = ExportOptions(preset=request.param)
    output = tmp_path_factory.mktemp(request.param) / "out"
    report = export_checkpoint(shards, snapshot, output, options)
    return options, tensors_of(output), report


def test_names_dtypes_and_shapes_are_the_schemas(export: Export, shards: Path) -> None:
    options, tensors, _ = export
    schema = Schema(ModelConfig.from_file(shards / "config.json"))
    dtypes = {
        "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64,
        "F8_E8M0": torch.float8_e8m0fnu, "BF16": torch.bfloat16, "F32": torch.float32,
    }  # fmt: skip
    layouts = [(e, options.layout(e)) for e in schema.entries()]
    specs = [s for e, layout in layouts if layout for s in schema.stored(e, layout)]
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    assert found == {spec.name: (dtypes[spec.dtype], spec.shape) for spec in specs}


def test_every_expert_is_exactly_the_official_one(
    export: Export, source: dict[str, Tensor]
) -> None:
    _, tensors, report = export
    modules = experts(source)
    assert len(modules) == 5 * 16 * 3  # MTP's among them
    for module in modules:
        assert torch.equal(exported(tensors, module), official_expert(source, module)), module
        assert torch.equal(
            tensors[f"{module}.weight"], source[f"{module}.weight"].view(torch.uint8)
        )
        partner = module.replace("w1", "w3")
        assert tensors[f"{module}.weight_scale_2"] == tensors[f"{partner}.weight_scale_2"]
    assert report.requantized == {}


def test_attention_and_shared_experts_are_what_modelopt_makes_of_the_dequantized_weight(
    export: Export, source: dict[str, Tensor], modelopt_nvfp4: Any
) -> None:
    options, tensors, _ = export
    if options.preset == "experts":
        assert all(".experts." in name for name in tensors if name.endswith("weight_scale"))
        return
    modules = [n[:-13] for n in tensors if n.endswith(".weight_scale") and ".experts." not in n]
    assert {module.rsplit(".", 1)[1] for module in modules} == {
        "wq_a", "wq_b", "wkv", "wo_b", "w1", "w2", "w3",
    }  # fmt: skip
    fused = {
        "wq_a": ("wq_a", "wkv"),
        "wkv": ("wq_a", "wkv"),
        "w1": ("w1", "w3"),
        "w3": ("w1", "w3"),
    }
    for module in modules:
        parent, leaf = module.rsplit(".", 1)
        if "indexer" in parent:
            fused_names: tuple[str, ...] = (leaf,)
        else:
            fused_names = fused.get(leaf, (leaf,))
        weight = official_fp8(source, module).bfloat16()
        assert torch.equal(weight.double(), official_fp8(source, module))  # BF16 loses nothing
        amaxes = [official_fp8(source, f"{parent}.{name}").abs().max() for name in fused_names]
        scale_2 = torch.stack(amaxes).max().float() / (6.0 * 448.0)
        expected, scale, _ = modelopt_nvfp4.quantize(weight, 16, None, scale_2, try_tensorrt=False)
        assert tensors[f"{module}.weight_scale_2"] == scale_2, module
        assert torch.equal(tensors[f"{module}.weight"], expected._quantized_data), module
        found = tensors[f"{module}.weight_scale"].view(torch.uint8)
        assert torch.equal(found, scale.view(torch.uint8)), module
        if len(fused_names) == 1:
            own = modelopt_nvfp4.get_weights_scaling_factor_2(weight)
            assert tensors[f"{module}.weight_scale_2"] == own


def test_what_is_kept_is_kept_byte_for_byte(export: Export, source: dict[str, Tensor]) -> None:
    options, tensors, _ = export
    kept = [name for name in tensors if name in source and tensors[name].dtype != torch.uint8]
    for name in kept:
        assert tensors[name].dtype == source[name].dtype
        same = (t.contiguous().view(-1).view(torch.uint8) for t in (tensors[name], source[name]))
        assert torch.equal(*same), name
    fp8 = sum(name.endswith(".wq_a.scale") for name in kept)
    assert fp8 == (1 if options.preset == "full" else 5)  # MTP's stays
    assert sum(name.endswith(".wo_a.scale") for name in kept) == 5
    assert "mtp.0.e_proj.scale" in kept
    assert "layers.2.attn.indexer.compressor.wkv.weight" in kept
    assert "layers.0.ffn.gate.tid2eid" in kept


@pytest.mark.parametrize("preset", ["full", "experts"])
def test_validate_has_nothing_to_say(
    preset: Any, shards: Path, snapshot: Path, tmp_path: Path
) -> None:
    export_checkpoint(shards, snapshot, tmp_path / "out", ExportOptions(preset=preset))
    assert validate(tmp_path / "out", against=shards, sample="all") == []


def test_the_report_counts_what_is_there(export: Export, shards: Path) -> None:
    options, tensors, report = export
    rows = {(row.role, row.format): row for row in report.stored}
    assert rows["routed_expert", "NVFP4"].tensors == 5 * 16 * 3
    assert ("wq_a", "NVFP4") in rows if options.preset == "full" else ("wq_a", "NVFP4") not in rows
    assert sum(row.nbytes for row in report.stored) == sum(t.nbytes for t in tensors.values())
    assert set(report.outcome.written) == {p.name for p in shards.glob("*.safetensors")}


def test_bf16_is_the_dequantized_weight(
    shards: Path, snapshot: Path, source: dict[str, Tensor], tmp_path: Path
) -> None:
    options = ExportOptions("experts", attn="bf16", shared="bf16", indexer="bf16", wo_a="bf16")
    export_checkpoint(shards, snapshot, tmp_path / "out", options)
    tensors = tensors_of(tmp_path / "out")
    for name in (
        "layers.1.attn.wo_b", "layers.3.attn.wo_a", "layers.2.attn.indexer.wq_b",
        "layers.0.ffn.shared_experts.w2",
    ):  # fmt: skip
        assert torch.equal(tensors[f"{name}.weight"].double(), official_fp8(source, name))
        assert tensors[f"{name}.weight"].dtype == torch.bfloat16
        assert f"{name}.scale" not in tensors
    assert "mtp.0.attn.wq_a.scale" in tensors


def test_nvfp4_for_everything_that_may_have_it(
    shards: Path, snapshot: Path, source: dict[str, Tensor], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """wo_a has no input_scale: modelopt has no quantizer there. Compressors share one scale."""
    options = ExportOptions(wo_a="nvfp4", compressor="nvfp4", mtp="drop")
    export_checkpoint(shards, snapshot, tmp_path / "out", options)
    assert "--compressor nvfp4" in caplog.text
    tensors = tensors_of(tmp_path / "out")
    assert not any(name.startswith("mtp.") for name in tensors)
    assert not any(name.endswith(".scale") for name in tensors)
    assert "layers.0.attn.wo_a.weight_scale_2" in tensors
    assert "layers.0.attn.wo_a.input_scale" not in tensors
    base = "layers.2.attn.indexer.compressor"
    largest = max(source[f"{base}.{leaf}.weight"].abs().max() for leaf in ("wkv", "wgate"))
    for leaf in ("wkv", "wgate"):
        assert tensors[f"{base}.{leaf}.weight_scale_2"] == largest.float() / 2688
        assert tensors[f"{base}.{leaf}.input_scale"] == torch.tensor(5.0) / 2688
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0
    assert config["compress_ratios"] == [0, 128, 4, 128, 0]
    assert Schema(ModelConfig.from_dict(config)).match(tensors).ok
    layers = config["quantization_config"]["quantized_layers"]
    assert layers["layers.0.attn.wo_a"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert layers[f"{base}.wkv"] == {"quant_algo": "NVFP4", "group_size": 16}


@pytest.mark.parametrize(("raise_by", "lossy"), [(11, False), (40, True)])
def test_blocks_outside_the_window_of_a_pair_are_requantized_and_counted(
    small: Build, make_snapshot: Build, tmp_path: Path, raise_by: int, lossy: bool
) -> None:
    """w3's largest exponent sets the pair's scale; w1's small blocks fall below the window."""
    w1, w3 = "layers.1.ffn.experts.0.w1", "layers.1.ffn.experts.0.w3"

    def change(tensors: dict[str, Tensor]) -> None:
        scale = tensors[f"{w3}.scale"].view(torch.uint8)
        scale[5] += raise_by

    path = small(tmp_path / "in", change)
    snapshot = make_snapshot(path, tmp_path / "amax.safetensors")
    report = export_checkpoint(path, snapshot, tmp_path / "out")
    source, tensors = tensors_of(path), tensors_of(tmp_path / "out")
    assert tensors[f"{w1}.weight_scale_2"] == tensors[f"{w3}.weight_scale_2"]
    inexact = {}
    for module in experts(source):
        expected, found = official_expert(source, module), exported(tensors, module)
        differ = (expected != found).unflatten(-1, (-1, 32)).any(-1)
        if differ.any():
            inexact[module] = int(differ.sum())
            # the nearest that NVFP4 has at its smallest scale
            step = 2.0**-9 * tensors[f"{module}.weight_scale_2"].double() * 0.25
            assert ((expected - found).abs() <= step).all()
    assert report.requantized == inexact
    assert bool(inexact) == lossy
    manifest = json.loads((tmp_path / "out" / "export_manifest.json").read_text())
    for module, count in inexact.items():
        assert manifest["notes"][f"{module}.weight"] == {"requantized_blocks": count}
