"""A layer straight from a folder: official MXFP4, NVFP4 under each scheme, and broken ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megamoe_kernel import (
    DtypeError,
    ExpertWeights,
    ShapeError,
    load_experts,
    transform_nvfp4_weights_for_mega_moe,
    untransform_nvfp4_weights,
)
from nvfp4_codec import CheckpointError, LosslessError, dequantize_mxfp4, dequantize_nvfp4
from nvfp4_codec.checkpoint import Checkpoint
from nvfp4_codec.schemas.deepseek_v4 import Scheme, from_official

TINY = Path(__file__).parents[3] / "tests" / "assets" / "tiny-dsv4"
CONFIG = {
    "model_type": "deepseek_v4", "vocab_size": 64, "hidden_size": 128,
    "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64,
    "q_lora_rank": 64, "o_lora_rank": 64, "o_groups": 2, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "num_hash_layers": 0, "hc_mult": 4, "index_n_heads": 32,
    "index_head_dim": 64, "compress_ratios": [0, 0], "num_nextn_predict_layers": 0,
    "expert_dtype": "fp4",
}  # fmt: skip

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def folder(tensors: dict[str, Tensor]) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return folder


def _nvfp4(
    layer: Any, scheme: Scheme = "official", *, calibrated: bool = True
) -> dict[str, Tensor]:
    tensors = {}
    for e, ((gate, up), down) in enumerate(zip(layer.gate_up, layer.down, strict=True)):
        for name, tensor in (("w1", gate), ("w3", up), ("w2", down)):
            module = f"layers.1.ffn.experts.{e}.{name}"
            parts = {
                "weight": tensor.weight,
                "weight_scale": tensor.weight_scale,
                "weight_scale_2": tensor.weight_scale_2,
            }
            if calibrated:
                parts["input_scale"] = torch.tensor(0.01 * (1 + e))
            for part, value in parts.items():
                tensors[from_official(f"{module}.{part}", scheme)] = value.clone()
    return tensors


def _values(weights: ExpertWeights, expert: int, part: int) -> Tensor:
    rows = weights.rows // weights.num_parts
    at = slice(part * rows, (part + 1) * rows)
    scales = weights.weight_scale[expert, at], weights.weight_scale_2[expert, part]
    return dequantize_nvfp4(weights.weight[expert, at], *scales, dtype=torch.float32)


@pytest.mark.skipif(not TINY.exists(), reason="needs the repository: reads tests/assets")
@pytest.mark.parametrize("layer", [2, "mtp.0"])
def test_official_experts_are_cast_exactly(layer: int | str) -> None:
    w13, w2 = load_experts(TINY, layer)
    assert (w13.num_experts, w13.rows, w13.columns) == (16, 256, 256)
    assert (w2.num_experts, w2.rows, w2.columns) == (16, 256, 128)
    assert w2.input_scale is None
    block = f"layers.{layer}" if isinstance(layer, int) else layer
    with Checkpoint.open(TINY) as checkpoint:
        for expert in (0, 7, 15):
            for name, weights, part in (("w1", w13, 0), ("w3", w13, 1), ("w2", w2, 0)):
                module = f"{block}.ffn.experts.{expert}.{name}"
                weight = checkpoint.tensor(f"{module}.weight")
                scale = checkpoint.tensor(f"{module}.scale")
                expected = dequantize_mxfp4(weight, scale, dtype=torch.float32)
                assert torch.equal(_values(weights, expert, part), expected)
    l1, l2 = transform_nvfp4_weights_for_mega_moe(w13, w2, arch="sm_90a")
    back, _ = untransform_nvfp4_weights(l1, l2)
    assert torch.equal(back.weight, w13.weight)


@pytest.mark.parametrize("scheme", ["official", "hf", "half_converted"])
def test_nvfp4_experts_are_read_as_they_are(scheme: Scheme, write: Write, make_layer: Any) -> None:
    layer = make_layer(4, 128, 128)
    folder = write(_nvfp4(layer, scheme))
    w13, w2 = load_experts(folder, 1)
    for mine, theirs in ((w13, layer.w13), (w2, layer.w2)):
        assert torch.equal(mine.weight, theirs.weight)
        assert torch.equal(
            mine.weight_scale.view(torch.uint8), theirs.weight_scale.view(torch.uint8)
        )
        assert torch.equal(mine.weight_scale_2, theirs.weight_scale_2)
    assert w2.input_scale is not None
    assert w2.input_scale == torch.tensor(0.04)
    assert w13.input_scale is None


def test_a_rank_reads_its_own_experts_and_the_scale_of_all(write: Write, make_layer: Any) -> None:
    layer = make_layer(4, 128, 128)
    folder = write(_nvfp4(layer))
    w13, w2 = load_experts(folder, 1, experts=range(1, 3))
    assert torch.equal(w13.weight, layer.w13.weight[1:3])
    assert torch.equal(w2.weight_scale_2, layer.w2.weight_scale_2[1:3])
    assert w2.input_scale == torch.tensor(0.04)  # of expert 3
    w13, _ = load_experts(folder, 1, experts=[3, 0])
    assert torch.equal(w13.weight, layer.w13.weight[[3, 0]])


def test_weights_only_exports_have_no_input_scale(write: Write, make_layer: Any) -> None:
    folder = write(_nvfp4(make_layer(4, 128, 128), calibrated=False))
    assert load_experts(folder, 1)[1].input_scale is None


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("2.w3.weight_scale", None, "2.w3.weight_scale: not among"),
        ("2.w3.weight_scale_2", None, "neither NVFP4's weight_scale_2 nor MXFP4's scale"),
        ("1.w2.input_scale", None, "1.w2.input_scale: is missing, though 3 of 4"),
        ("0.w1.weight", lambda t: t[:64], r"is U8 \[64, 64\], expected U8 \[128, 64\]"),
        ("0.w1.weight_scale", lambda t: t.view(torch.uint8), r"is U8 .*expected F8_E4M3"),
        ("0.w1.weight_scale_2", lambda t: torch.ones(2), r"is F32 \[2\], expected F32 \[\]"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_broken_checkpoints_are_named(
    name: str, change: Any, match: str, write: Write, make_layer: Any
) -> None:
    tensors = _nvfp4(make_layer(4, 128, 128))
    key = f"layers.1.ffn.experts.{name}"
    value = tensors.pop(key)
    if change is not None:
        tensors[key] = change(value).clone()
    with pytest.raises(CheckpointError, match=match):
        load_experts(write(tensors), 1)


def test_scalars_may_have_one_dimension(write: Write, make_layer: Any) -> None:
    layer = make_layer(4, 128, 128)
    tensors = {k: v.reshape(1) if v.ndim == 0 else v for k, v in _nvfp4(layer).items()}
    w13, _ = load_experts(write(tensors), 1)
    assert torch.equal(w13.weight_scale_2, layer.w13.weight_scale_2)


def test_what_is_not_there(write: Write, make_layer: Any) -> None:
    folder = write(_nvfp4(make_layer(4, 128, 128)))
    with pytest.raises(CheckpointError, match="expert 4 was asked for, the layer has 0 to 3"):
        load_experts(folder, 1, experts=[0, 4])
    with pytest.raises(CheckpointError, match="layers.0.ffn.experts.0.w1.weight"):
        load_experts(folder, 0)


@pytest.mark.parametrize(
    ("layer", "error", "match"),
    [
        (-1, ShapeError, "layer is -1, expected the index of a main layer"),
        (True, DtypeError, "layer is True"),
        (1.0, DtypeError, r"layer is 1\.0"),
        (None, DtypeError, "layer is None"),
        ("1", ShapeError, "layer is '1', expected .* a block name such as 'mtp.0'"),
        ("", ShapeError, "layer is ''"),
        ("layers.-1", ShapeError, "layer is 'layers.-1'"),
        ("layers.01", ShapeError, "layer is 'layers.01'"),
        ("mtp.0.ffn", ShapeError, "layer is 'mtp.0.ffn'"),
        ("mtp.9", CheckpointError, r"tensor mtp\.9\.ffn\.experts.* not among"),
        (99, CheckpointError, r"tensor layers\.99\.ffn\.experts.* not among"),
    ],
    ids=repr,
)
def test_layers_that_are_not_there(
    layer: Any, error: type[Exception], match: str, write: Write, make_layer: Any
) -> None:
    folder = write(_nvfp4(make_layer(4, 128, 128)))
    with pytest.raises(error, match=match):
        load_experts(folder, layer)
    assert torch.equal(
        load_experts(folder, "layers.1")[0].weight, load_experts(folder, 1)[0].weight
    )


@pytest.mark.parametrize("experts", ["01", 3, [True], [1.0], [[0]], [None]], ids=repr)
def test_what_are_no_expert_ids(experts: Any, write: Write, make_layer: Any) -> None:
    folder = write(_nvfp4(make_layer(4, 128, 128)))
    with pytest.raises(DtypeError, match="experts (is|holds) .*, expected .*expert ids"):
        load_experts(folder, 1, experts=experts)
    for number in (torch.tensor([1, 2]), range(1, 3), (1, 2)):
        assert load_experts(folder, 1, experts=number)[0].num_experts == 2
    with pytest.raises(DtypeError, match="folder is a NoneType, expected a path"):
        load_experts(None, 1)  # type: ignore[arg-type]


def test_mxfp4_that_nvfp4_cannot_hold_is_refused(write: Write) -> None:
    tensors = {}
    for e in range(4):
        for name in ("w1", "w2", "w3"):
            scale = torch.full((128, 4), 120, dtype=torch.uint8)
            scale[0, 0] = 120 - (18 if (e, name) == (2, "w3") else 17)
            module = f"layers.1.ffn.experts.{e}.{name}"
            tensors[f"{module}.weight"] = torch.full((128, 64), 0x11, dtype=torch.int8)
            tensors[f"{module}.scale"] = scale.view(torch.float8_e8m0fnu)
    with pytest.raises(LosslessError, match=r"experts\.2\.w3\.weight: .*spread over 18"):
        load_experts(write(tensors), 1)
    w13, _ = load_experts(write(tensors), 1, experts=[0, 1, 3])
    assert w13.num_experts == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be opened"), (b"{", "not JSON"), (b"\xff\xfe", "not JSON"), (b"[]", "a list")],
)
def test_a_folder_without_a_config_is_named(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_experts(tmp_path, 0)
    assert "config.json" in str(caught.value)
    with pytest.raises(CheckpointError, match="cannot be opened"):
        load_experts(tmp_path / "nowhere", 0)
