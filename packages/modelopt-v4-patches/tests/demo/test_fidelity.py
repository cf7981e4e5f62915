"""Errors by role, against torch formulas."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelopt_v4_patches.quality.broken import e8m0_as_e4m3
from modelopt_v4_patches.quality.fidelity import MTP, PARTS, compare_weights
from nvfp4_codec.checkpoint import Checkpoint, Family
from nvfp4_codec.checkpoint.values import load_values


def test_the_official_checkpoint_is_itself(tiny: Path) -> None:
    found = compare_weights(tiny, tiny)
    assert set(found.sqnr) == {*PARTS.values(), MTP, "others"}
    assert set(found.sqnr.values()) == {math.inf}
    assert found.nvfp4 == frozenset()
    assert found.quantized
    assert found.error("experts") == 0.0
    assert found.expert_gain == 1.0


def test_cast_experts_are_equal_and_listed(tiny: Path, experts_nvfp4: Path) -> None:
    found, official = compare_weights(experts_nvfp4, tiny), compare_weights(tiny, tiny)
    assert found.error("experts") == found.error(MTP) == 0.0
    assert found.digest == official.digest
    assert len(found.nvfp4) == 5 * 16 * 3  # four layers and the MTP block
    assert "layers.3.ffn.experts.15.w2" in found.nvfp4


def test_a_changed_weight_shows_in_its_part_only(tiny: Path, tmp_path: Path) -> None:
    shutil.copy(tiny / "config.json", tmp_path)
    tensors = load_file(tiny / "model.safetensors")
    name = "layers.1.attn.compressor.wkv.weight"
    tensors[name] = (tensors[name].float() * 1.25).bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    found = compare_weights(tmp_path, tiny)
    changed = {part for part, value in found.sqnr.items() if value < math.inf}
    assert changed == {"compressor"}
    parts = [
        tensor.double().square().sum()
        for other, tensor in load_file(tiny / "model.safetensors").items()
        if ".compressor.w" in other
    ]
    before = load_file(tiny / "model.safetensors")[name].double()
    noise = (tensors[name].double() - before).square().sum()
    expected = float((noise / torch.stack(parts).sum()).sqrt())
    assert found.error("compressor") == pytest.approx(expected, rel=1e-9)
    assert found.digest != compare_weights(tiny, tiny).digest


def test_a_wrong_reading_is_measured_as_read(tiny: Path) -> None:
    found = compare_weights(tiny, tiny, e8m0_as_e4m3)
    assert found.error("experts") > 1
    assert found.error("attn") > 1
    assert found.sqnr["compressor"] == math.inf


def _shrunk(checkpoint: Checkpoint, family: Family) -> Tensor:
    factor = 0.875 if ".ffn.experts." in family.weight.name else 1
    return factor * load_values(checkpoint, family)


def test_smaller_experts_have_a_gain_below_one(tiny: Path) -> None:
    found = compare_weights(tiny, tiny, _shrunk)
    assert found.expert_gain == pytest.approx(0.875, abs=1e-12)
    assert found.error("experts") == pytest.approx(0.125, abs=1e-12)
    assert found.sqnr["shared"] == math.inf
