"""What is not the official checkpoint is refused by name, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from modelopt_v4_patches import dequantize_checkpoint
from modelopt_v4_patches.cli import main
from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import from_official

EXPERT = "layers.1.ffn.experts.2.w2"
Tensors = dict[str, Tensor]


def lose_a_norm(tensors: Tensors) -> None:
    del tensors["layers.1.attn_norm.weight"]


def lose_a_scale(tensors: Tensors) -> None:
    del tensors[f"{EXPERT}.scale"]


def lose_all_hashes(tensors: Tensors) -> None:
    for name in [name for name in tensors if "tid2eid" in name]:
        del tensors[name]


def add_a_tensor(tensors: Tensors) -> None:
    tensors["layers.1.attn.rotary.inv_freq"] = torch.ones(3)


def add_a_layer(tensors: Tensors) -> None:
    tensors["layers.7.attn_norm.weight"] = tensors["layers.1.attn_norm.weight"].clone()


def spell_a_scale_twice(tensors: Tensors) -> None:
    tensors[f"{EXPERT}.weight_scale_inv"] = tensors[f"{EXPERT}.scale"].clone()


def cut_a_weight(tensors: Tensors) -> None:
    tensors["layers.0.attn.wq_a.weight"] = tensors["layers.0.attn.wq_a.weight"][:32].clone()


def cut_a_scale(tensors: Tensors) -> None:
    tensors[f"{EXPERT}.scale"] = tensors[f"{EXPERT}.scale"][:, :1].clone()


def swap_a_format(tensors: Tensors) -> None:
    weight = tensors["layers.0.attn.wq_a.weight"]
    tensors["layers.0.attn.wq_a.weight"] = weight.float().bfloat16()


def make_one_nvfp4(tensors: Tensors) -> None:
    rows, columns = tensors[f"{EXPERT}.weight"].shape
    tensors[f"{EXPERT}.weight"] = tensors[f"{EXPERT}.weight"].view(torch.uint8)
    del tensors[f"{EXPERT}.scale"]
    tensors[f"{EXPERT}.weight_scale"] = torch.ones(rows, columns // 8).to(torch.float8_e4m3fn)
    tensors[f"{EXPERT}.weight_scale_2"] = torch.ones(())


def rename_as_transformers_does(tensors: Tensors) -> None:
    renamed = {from_official(name, "hf"): t for name, t in tensors.items() if name[:4] != "mtp."}
    tensors.clear()
    tensors.update(renamed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose_a_norm, "1 missing: layers.1.attn_norm.weight"),
        (lose_a_scale, f"1 missing: {EXPERT}.scale"),
        (lose_all_hashes, r"1 missing: layers\.0\..*tid2eid"),
        (add_a_tensor, "1 unknown: layers.1.attn.rotary.inv_freq"),
        (add_a_layer, "1 unknown: layers.7.attn_norm.weight"),
        (spell_a_scale_twice, f"1 duplicate: {EXPERT}"),
        (cut_a_weight, r"wq_a.weight: F8_E4M3 \[32, 160\]; config.json asks for.*\[96, 160\]"),
        (cut_a_scale, rf"{EXPERT}.scale: .*asks for F8_E8M0 or F32 \[160, 3\]"),
        (swap_a_format, r"wq_a.weight: BF16 .*asks for F8_E4M3"),
        (make_one_nvfp4, f"{EXPERT}.weight: this weight is NVFP4.*nvfp4 convert"),
        (rename_as_transformers_does, "the names are transformers' .*layers.0.attn.wq_a"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refused_by_name(
    change: Callable[[Tensors], None],
    message: str,
    make_small: Callable[..., Path],
    tmp_path: Path,
) -> None:
    source = make_small(tmp_path / "in", change)
    with pytest.raises(CheckpointError, match=message):
        dequantize_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_dequantized_already_is_refused(small: Path, tmp_path: Path) -> None:
    dequantize_checkpoint(small, tmp_path / "bf16")
    with pytest.raises(CheckpointError, match=r"none of the \d+ weights .*already"):
        dequantize_checkpoint(tmp_path / "bf16", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_models_config_and_none_at_all(
    make_small: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_small(tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "n_routed_experts": 4}))
    with pytest.raises(CheckpointError, match=r"24 missing: .* x layers.#.ffn.experts.#.w1.scale"):
        dequantize_checkpoint(source, tmp_path / "out")
    (source / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        dequantize_checkpoint(source, tmp_path / "out")


def test_the_command(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "out")
    words = ["dequant", str(small), output, "--workers", "1"]
    assert main(words) == 0
    assert "mxfp4" in capsys.readouterr().out
    assert main(words) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*words, "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["complete_unchecked"] is True
