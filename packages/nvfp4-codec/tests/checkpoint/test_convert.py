"""Converted checkpoints: bytes equal to the library functions, values equal to the source."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nvfp4_codec import dequantize_mxfp4, dequantize_nvfp4, quantize_nvfp4
from nvfp4_codec.checkpoint import (
    Checkpoint,
    ConvertOptions,
    QuantizeOptions,
    convert_checkpoint,
    find_families,
    quantize_checkpoint,
    verify_checkpoint,
)
from nvfp4_codec.checkpoint.cast import ScaleCaster, weight_scale_2
from nvfp4_codec.checkpoint.values import load_values
from nvfp4_codec.convert import joint_weight_scale_2, mxfp4_to_nvfp4
from nvfp4_codec.errors import CheckpointError

Shards = Mapping[str, Mapping[str, Tensor]]
Write = Callable[[Path, Shards], Path]


def flat(shards: Shards) -> dict[str, Tensor]:
    return {name: tensor for tensors in shards.values() for name, tensor in tensors.items()}


def loaded(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("top", range(9, 255))
def test_the_cast_table_is_the_library_function(top: int) -> None:
    """Every scale byte of every window, against nvfp4_codec.convert."""
    scales = np.arange(max(top - 17, 0), top + 1, dtype=np.uint8)
    codes = torch.arange(len(scales) * 16, dtype=torch.int64).to(torch.uint8).view(1, -1) | 1
    made = mxfp4_to_nvfp4(codes, torch.from_numpy(scales).view(1, -1))
    cast = torch.from_numpy(ScaleCaster().cast(scales, top))
    assert same_bits(made.weight_scale, cast.view(1, -1))
    assert float(made.weight_scale_2) == np.frombuffer(weight_scale_2(top), np.float32)[0]
    assert made.lossless_mask.all()
    assert same_bits(made.weight, codes)


def test_mxfp4_to_nvfp4_keeps_every_nibble_and_value(
    tmp_path: Path, write_checkpoint: Write, mxfp4_shards: Shards
) -> None:
    source_path = write_checkpoint(tmp_path / "in", mxfp4_shards)
    original = flat(mxfp4_shards)
    with Checkpoint.open(source_path) as source:
        report = convert_checkpoint(source, tmp_path / "out", ConvertOptions("nvfp4"))
    assert (len(report.converted), report.remarks) == (6, {})
    made = loaded(tmp_path / "out")
    for expert in range(2):
        base = f"layers.0.ffn.experts.{expert}"
        pair = [original[f"{base}.{name}.scale"] for name in ("w1", "w3")]
        joint = joint_weight_scale_2(pair)
        assert joint != joint_weight_scale_2(pair[1:])  # or the test would show nothing
        for name in ("w1", "w2", "w3"):
            weight, scale = original[f"{base}.{name}.weight"], original[f"{base}.{name}.scale"]
            expected = mxfp4_to_nvfp4(weight, scale, weight_scale_2=None if name == "w2" else joint)
            parts = [made[f"{base}.{name}.weight{part}"] for part in ("", "_scale", "_scale_2")]
            assert same_bits(parts[0], weight)
            assert all(same_bits(a, b) for a, b in zip(parts, expected[:3], strict=True))
            for dtype in (torch.bfloat16, torch.float32):
                assert same_bits(
                    dequantize_nvfp4(parts[0], parts[1], parts[2], dtype=dtype),
                    dequantize_mxfp4(weight, scale, dtype=dtype),
                )
    for name in ("norm.weight", "head.weight", "layers.0.attn.wq_a.weight"):
        assert same_bits(made[name], original[name])
    assert not any(name.endswith("w3.scale") for name in made)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["hidden_size"] == 64
    assert config["quantization_config"]["quant_algo"] == "MIXED_PRECISION"
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert not (tmp_path / "out" / "modeling_evil.py").exists()
    with Checkpoint.open(tmp_path / "out") as out:
        assert [f.code for f in verify_checkpoint(out)] == ["scales-all-ones"]  # wq_a, as made


@pytest.mark.parametrize("case", ["low", "zero", "nan", "tiny", "all zero", "zero on top"])
def test_what_the_table_cannot_do_goes_through_the_library(tmp_path: Path, case: str) -> None:
    """Outside the window, blocks of zeros with odd scales, NaN, exponents near the end."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randint(0, 256, (4, 64), generator=generator, dtype=torch.uint8)
    scale = torch.randint(110, 120, (4, 4), generator=generator, dtype=torch.uint8)
    if case == "low":
        scale[0, 0] = 90
    elif case == "zero":
        scale[0, 0], weight[0, :16] = 0, 0x80
    elif case == "zero on top":
        scale[0], weight[0] = 200, 0x08
    elif case == "nan":
        scale[0, 0] = 255
    elif case == "tiny":
        scale -= 110
    else:
        weight &= 0x88
    path = tmp_path / "in.safetensors"
    save_file({"a.weight": weight, "a.scale": scale.view(torch.float8_e8m0fnu)}, path)

    def run(output: str, **options: bool) -> dict[str, Tensor]:
        with Checkpoint.open(path) as source:
            convert_checkpoint(source, tmp_path / output, ConvertOptions("nvfp4", **options))
        return load_file(tmp_path / output)

    if case == "nan":
        with pytest.raises(CheckpointError, match=r"in\.safetensors, tensor a\.weight: .*NaN"):
            run("out.safetensors")
        return
    if case == "low":
        with pytest.raises(CheckpointError, match=r"1 of 16 blocks.*--allow-lossy"):
            run("out.safetensors")
        assert not (tmp_path / "out.safetensors").exists()
        made = run("lossy.safetensors", allow_lossy=True)
    else:
        made = run("out.safetensors")
    expected = mxfp4_to_nvfp4(weight, scale, outside="requantize")
    assert same_bits(made["a.weight"], expected.weight)
    assert same_bits(made["a.weight_scale"], expected.weight_scale)
    assert same_bits(made["a.weight_scale_2"], expected.weight_scale_2)


def test_allow_lossy_continues_what_was_refused(tmp_path: Path, write_checkpoint: Write) -> None:
    """Finished shards stay finished: the option changes nothing in them."""
    good = torch.full((2, 2), 120, dtype=torch.uint8)
    bad = torch.tensor([[120, 90], [120, 120]], dtype=torch.uint8)
    codes = torch.full((2, 32), 0x77, dtype=torch.uint8)
    shards = {
        f"model-{i}.safetensors": {
            f"{name}.weight": codes.clone(), f"{name}.scale": scale.view(torch.float8_e8m0fnu),
        }
        for i, (name, scale) in enumerate((("a", good), ("b", bad)))
    }  # fmt: skip
    path = write_checkpoint(tmp_path / "in", shards)
    with Checkpoint.open(path) as source:
        with pytest.raises(CheckpointError, match="allow-lossy"):
            convert_checkpoint(source, tmp_path / "out", ConvertOptions("nvfp4"))
        report = convert_checkpoint(
            source, tmp_path / "out", ConvertOptions("nvfp4", allow_lossy=True), resume=True
        )
    assert report.outcome is not None
    assert report.outcome.kept == ("model-0.safetensors",)
    assert list(report.remarks) == ["b.weight"]


def test_gpt_oss_blocks_become_one_packed_tensor(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 256, (2, 8, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(115, 125, (2, 8, 4), generator=generator, dtype=torch.uint8)
    path = tmp_path / "in.safetensors"
    save_file({"experts.up_blocks": blocks, "experts.up_scales": scales}, path)
    with Checkpoint.open(path) as source:
        convert_checkpoint(source, tmp_path / "out.safetensors", ConvertOptions("nvfp4"))
        convert_checkpoint(source, tmp_path / "bf16.safetensors", ConvertOptions("bf16"))
    made = load_file(tmp_path / "out.safetensors")
    assert same_bits(made["experts.up"], blocks.view(2, 8, 64))
    dense = load_file(tmp_path / "bf16.safetensors")["experts.up"]
    assert dense.shape == (2, 8, 128)
    scale_2 = made["experts.up_weight_scale_2"]
    assert same_bits(
        dense, dequantize_nvfp4(made["experts.up"], made["experts.up_weight_scale"], scale_2)
    )


def test_bf16_dequantizes_every_family(
    tmp_path: Path, write_checkpoint: Write, mxfp4_shards: Shards
) -> None:
    path = write_checkpoint(tmp_path / "in", mxfp4_shards)
    with Checkpoint.open(path) as source:
        convert_checkpoint(source, tmp_path / "out", ConvertOptions("bf16"))
        made = loaded(tmp_path / "out")
        for family in find_families(source.tensors):
            expected = (
                load_values(source, family, torch.bfloat16)
                if family.kind != "plain"
                else source.tensor(family.weight.name)
            )
            assert same_bits(made.pop(f"{family.module}.weight"), expected)
    assert not made


def test_compressed_tensors_and_back(
    tmp_path: Path, write_checkpoint: Write, nvfp4_tensors: Mapping[str, Tensor]
) -> None:
    path = write_checkpoint(tmp_path / "in", {"model.safetensors": nvfp4_tensors})
    with Checkpoint.open(path) as source:
        convert_checkpoint(source, tmp_path / "ct", ConvertOptions("compressed-tensors"))
    made = loaded(tmp_path / "ct")
    module = "layers.0.mlp.down_proj"
    value = nvfp4_tensors[f"{module}.weight_scale_2"]
    assert made[f"{module}.weight_global_scale"].tolist() == [float(1 / value)]
    assert same_bits(made[f"{module}.weight_packed"], nvfp4_tensors[f"{module}.weight"])
    with Checkpoint.open(tmp_path / "ct") as source:
        assert verify_checkpoint(source) == []
        convert_checkpoint(source, tmp_path / "back", ConvertOptions("nvfp4"))
    back = loaded(tmp_path / "back")
    assert same_bits(back[f"{module}.weight_scale"], nvfp4_tensors[f"{module}.weight_scale"])
    assert float(back[f"{module}.weight_scale_2"]) == pytest.approx(float(value), rel=2**-22)


def test_fp8_block_has_true_scales(
    tmp_path: Path, write_checkpoint: Write, nvfp4_tensors: Mapping[str, Tensor]
) -> None:
    path = write_checkpoint(tmp_path / "in", {"model.safetensors": nvfp4_tensors})
    with Checkpoint.open(path) as source:
        report = convert_checkpoint(source, tmp_path / "out", ConvertOptions("fp8-block"))
        first = load_values(source, report.converted[0])
    assert len(report.remarks) == len(report.converted)
    for remark in report.remarks.values():
        assert re.fullmatch(r"FP8: [234]\d\.\d dB, worst [1-9]\.\d %", remark)
    with Checkpoint.open(tmp_path / "out") as out:
        family = next(
            f for f in find_families(out.tensors) if f.module == report.converted[0].module
        )
        assert family.kind == "fp8-block"
        values = load_values(out, family)
    assert (values - first).square().sum() < 1e-3 * first.square().sum()


def test_quantize_writes_the_librarys_bytes(
    tmp_path: Path, write_checkpoint: Write, float_shards: Shards
) -> None:
    path = write_checkpoint(tmp_path / "in", float_shards)
    with Checkpoint.open(path) as source:
        report = quantize_checkpoint(source, tmp_path / "out")
    original, made = flat(float_shards), loaded(tmp_path / "out")
    layer = "model.layers.0"
    groups = [
        [f"{layer}.self_attn.{name}_proj" for name in "qkv"],
        [f"{layer}.mlp.{name}_proj" for name in ("gate", "up")],  # in two shards
        [f"{layer}.mlp.down_proj"],
    ]
    for group in groups:
        amax = max(float(original[f"{m}.weight"].abs().max()) for m in group)
        for module in group:
            expected = quantize_nvfp4(
                original[f"{module}.weight"], weight_scale_2=torch.tensor(amax) / 2688
            )
            parts = [made[f"{module}.weight{part}"] for part in ("", "_scale", "_scale_2")]
            for part, wanted in zip(parts, expected, strict=True):
                assert isinstance(wanted, Tensor)
                assert same_bits(part, wanted)
    reasons = {d.family.module: d.reason for d in report.decisions if not d.quantize}
    for module, word in {
        "model.embed_tokens": "embedding",
        "lm_head": "head",
        f"{layer}.mlp.gate": "router",
        f"{layer}.input_layernorm": "norm",
        f"{layer}.odd": "K = 20",
        "step": "I64",
    }.items():
        assert word in reasons[module]
        name = module if module == "step" else f"{module}.weight"
        assert same_bits(made[name], original[name])
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["quant_algo"]) == ("modelopt", "W4A16_NVFP4")
    assert {"lm_head", "model.embed_tokens", f"{layer}.mlp.gate"} <= set(config["ignore"])
    with Checkpoint.open(tmp_path / "out") as out, Checkpoint.open(path) as source:
        assert verify_checkpoint(out, source) == []


def test_globs_choose_weights(
    tmp_path: Path, write_checkpoint: Write, float_shards: Shards
) -> None:
    path = write_checkpoint(tmp_path / "in", float_shards)
    options = QuantizeOptions(include=("lm_head*", "*_proj.weight"), exclude=("*.v_proj.*",))
    with Checkpoint.open(path) as source:
        report = quantize_checkpoint(source, tmp_path / "out", options)
        chosen = {d.family.module.rpartition(".")[2] for d in report.decisions if d.quantize}
        assert chosen == {"lm_head", "q_proj", "k_proj", "gate_proj", "up_proj", "down_proj"}
        with pytest.raises(CheckpointError, match="matches none"):
            quantize_checkpoint(source, tmp_path / "x", QuantizeOptions(include=("nope*",)))
        with pytest.raises(CheckpointError, match="none of the"):
            quantize_checkpoint(source, tmp_path / "x", QuantizeOptions(exclude=("*",)))


@pytest.mark.parametrize(
    ("value", "message"), [(0.0, "zero_amax"), (float("nan"), "NaN or Inf"), (float("inf"), "Inf")]
)
def test_unquantizable_weights_are_named(tmp_path: Path, value: float, message: str) -> None:
    path = tmp_path / "in.safetensors"
    bad = torch.zeros(4, 32)
    bad[1, 3] = value
    save_file({"fine.weight": torch.randn(4, 32), "bad.weight": bad}, path)
    with (
        Checkpoint.open(path) as source,
        pytest.raises(CheckpointError, match=rf"in\.safetensors, tensor bad\.weight: .*{message}"),
    ):
        quantize_checkpoint(source, tmp_path / "out.safetensors")
    with Checkpoint.open(path) as source:
        options = QuantizeOptions(zero_amax="one", nonfinite="saturate")
        quantize_checkpoint(source, tmp_path / "fixed.safetensors", options)


def test_incomplete_families_are_refused_by_name(
    tmp_path: Path, nvfp4_tensors: Mapping[str, Tensor]
) -> None:
    path = tmp_path / "in.safetensors"
    module = "layers.0.mlp.down_proj"
    save_file({k: v for k, v in nvfp4_tensors.items() if k != f"{module}.weight_scale_2"}, path)
    with (
        Checkpoint.open(path) as source,
        pytest.raises(CheckpointError, match=rf"{module}\.weight: missing-weight-scale-2"),
    ):
        convert_checkpoint(source, tmp_path / "out.safetensors", ConvertOptions("bf16"))
    with (
        Checkpoint.open(path) as source,
        pytest.raises(CheckpointError, match="nothing to convert to nvfp4"),
    ):
        convert_checkpoint(source, tmp_path / "out.safetensors", ConvertOptions("nvfp4"))
