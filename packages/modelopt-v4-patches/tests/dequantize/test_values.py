"""The values: transformers' own dequantization, and the formulas written out in torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from modelopt_v4_patches import dequantize_checkpoint
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig, Schema

E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def same(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and a.contiguous().view(-1).view(
        torch.uint8
    ).equal(b.contiguous().view(-1).view(torch.uint8))


def by_formula(weight: Tensor, scale: Tensor) -> Tensor:
    """BF16 of a weight in float32 times its scale, spread over its block."""
    scale = scale.float()
    if weight.dtype == torch.int8:
        codes = weight.view(torch.uint8)
        values = E2M1[torch.stack((codes & 15, codes >> 4), -1).long()].flatten(-2)
        spread = scale.repeat_interleave(32, 1)
    else:
        values = weight.float()
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (values * spread[: values.shape[0], : values.shape[1]]).bfloat16()


def fp32_scales(tensors: dict[str, Tensor]) -> None:
    """Gives the FP8 weights scales that are no powers of two."""
    generator = torch.Generator().manual_seed(1)
    for name, scale in tensors.items():
        if name.endswith(".scale") and tensors[f"{name[:-6]}.weight"].dtype != torch.int8:
            tensors[name] = scale.float() * torch.rand(scale.shape, generator=generator)


def other_names(tensors: dict[str, Tensor]) -> None:
    """The spelling of transformers' FP8 checkpoints, for one of two."""
    for name in [name for name in tensors if name.endswith(".scale")][::2]:
        tensors[f"{name[:-6]}.weight_scale_inv"] = tensors.pop(name)


@pytest.mark.parametrize(
    "change", [None, fp32_scales, other_names], ids=lambda c: getattr(c, "__name__", "official")
)
def test_equal_to_the_formulas_in_torch(
    change: Callable[..., None] | None,
    make_small: Callable[..., Path],
    small_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    source = tensors_of(make_small(tmp_path / "in", change))
    done = dequantize_checkpoint(tmp_path / "in", tmp_path / "out")
    made = tensors_of(tmp_path / "out")
    plain = Schema(ModelConfig.from_dict(small_config)).tensors("plain")
    assert {(n, tuple(t.shape)) for n, t in made.items()} == {(s.name, s.shape) for s in plain}
    applied = 0
    for name, tensor in made.items():
        module = name.removesuffix(".weight")
        scale = source.get(f"{module}.scale", source.get(f"{module}.weight_scale_inv"))
        applied += scale is not None
        expected = source[name] if scale is None else by_formula(source[name], scale)
        assert same(tensor, expected), name
    assert applied == done.weights["fp8_block"] + done.weights["mxfp4"] > 50


@pytest.mark.filterwarnings("ignore")  # transformers imports whatever it finds installed
def test_equal_to_what_transformers_makes_of_the_trained_model(
    tiny: Path, tiny_shards: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if not hasattr(transformers, "DeepseekV4ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no DeepSeek-V4")
    load = transformers.DeepseekV4ForCausalLM.from_pretrained
    theirs = load(
        tiny,
        dtype=torch.bfloat16,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
    ).state_dict()
    dequantize_checkpoint(tiny_shards, tmp_path / "out")
    model, found = load(tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True)
    assert not any(found.values()), found  # nothing missing, unexpected or of another shape
    ours = model.state_dict()
    assert ours.keys() == theirs.keys()
    assert len(ours) > 100
    for name, tensor in ours.items():
        # without a quantizer, transformers keeps some vectors in float32
        assert tensor.dtype == theirs[name].dtype or tensor.ndim < 2, name
        assert same(tensor.to(theirs[name].dtype), theirs[name]), name


def test_index_config_and_small_files(tiny_shards: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    dequantize_checkpoint(tiny_shards, output)
    index = json.loads((output / "model.safetensors.index.json").read_text())
    for file in set(index["weight_map"].values()):
        names = {name for name, home in index["weight_map"].items() if home == file}
        assert names == load_file(output / file).keys()
    size = sum(t.nbytes for t in tensors_of(output).values())
    assert index["metadata"]["total_size"] == size
    before = json.loads((tiny_shards / "config.json").read_text())
    after = json.loads((output / "config.json").read_text())
    assert before.keys() - after.keys() == {"quantization_config", "expert_dtype"}
    assert {key: before[key] for key in after} == after
    assert {path.name for path in output.iterdir()} == {
        "config.json", "tokenizer.json", "model.safetensors.index.json",
        *set(index["weight_map"].values()),
    }  # fmt: skip
