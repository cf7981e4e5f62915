"""Where each input_scale comes from, and which snapshots are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modelopt_v4_patches.errors import SnapshotError
from modelopt_v4_patches.export import ExportOptions, ExportReport, export_checkpoint

Build = Callable[..., Path]
Run = Callable[..., tuple[ExportReport, dict[str, float], dict[str, Any]]]

BASE = "model.layers.{}"
EXPERTS = BASE + ".mlp.experts"
WKV = BASE.format(0) + ".self_attn.kv_proj.input_quantizer"
WQ_A = BASE.format(0) + ".self_attn.q_a_proj.input_quantizer"
WO_B = BASE.format(1) + ".self_attn.o_b_proj.input_quantizer"


def gate_up(layer: int) -> str:
    return EXPERTS.format(layer) + ".gate_up_proj_input_quantizer"


def down(layer: int) -> str:
    return EXPERTS.format(layer) + ".down_proj_input_quantizer"


@pytest.fixture
def export(small: Build, make_snapshot: Build, tmp_path: Path) -> Run:
    """Exports the small model with changed amax; the report, scales and notes."""

    def run(
        changes: dict[str, float | None] | None = None,
        options: ExportOptions | None = None,
        **metadata: str,
    ) -> tuple[ExportReport, dict[str, float], dict[str, Any]]:
        path = small(tmp_path / "in")
        snapshot = make_snapshot(path, tmp_path / "amax.safetensors", changes, **metadata)
        output = tmp_path / "out"
        report = export_checkpoint(path, snapshot, output, options)
        tensors = {n: t for f in output.glob("*.safetensors") for n, t in load_file(f).items()}
        scales = {n[:-12]: float(t) for n, t in tensors.items() if n.endswith(".input_scale")}
        notes = json.loads((output / "export_manifest.json").read_text())["notes"]
        return report, scales, notes

    return run


def scale(amax: float) -> float:
    return float(torch.tensor(amax) / (6.0 * 448.0))


def test_each_is_modelopts_activation_scaling_factor(export: Run, modelopt_nvfp4: Any) -> None:
    report, scales, notes = export({WO_B: 0.123456})
    for module, amax in {
        "layers.0.attn.wq_a": 3.0, "layers.0.attn.wkv": 3.0, "layers.1.attn.wo_b": 0.123456,
        "layers.0.attn.indexer.wq_b": 1.5, "layers.1.ffn.shared_experts.w2": 10.0,
        "layers.1.ffn.experts.1.w1": 3.5, "layers.0.ffn.experts.0.w2": 7.25,
    }.items():  # fmt: skip
        quantizer = SimpleNamespace(
            is_enabled=True, maxbound=6.0, export_amax=lambda amax=amax: torch.tensor(amax)
        )
        expected = modelopt_nvfp4.get_activation_scaling_factor(quantizer)
        assert scales[module] == float(expected), module
    own = {name for name in notes if not name.startswith("mtp.")}
    assert own == set()
    assert report.disagreeing == ()


def test_mtp_experts_take_the_models_largest_scale(export: Run) -> None:
    report, scales, notes = export()
    for expert in (0, 1):
        assert scales[f"mtp.0.ffn.experts.{expert}.w1"] == scale(3.5)  # layer 1 has the largest
        assert scales[f"mtp.0.ffn.experts.{expert}.w2"] == scale(8.25)
        note = notes[f"mtp.0.ffn.experts.{expert}.w2.input_scale"]
        assert note == {"input_scale_from": "model"}
    assert set(report.borrowed.values()) == {"model"}
    assert len(report.borrowed) == 6


@pytest.mark.parametrize(
    "bad", [None, 0.0, math.nan, math.inf, 1e-42], ids=["absent", "0", "nan", "inf", "subnormal"]
)
def test_a_layer_without_usable_amax_takes_the_models_largest(export: Run, bad: float) -> None:
    report, scales, notes = export({gate_up(1): bad})
    for leaf in ("w1", "w3"):
        assert scales[f"layers.1.ffn.experts.0.{leaf}"] == scale(2.5)
        assert report.borrowed[f"layers.1.ffn.experts.0.{leaf}"] == "model"
    assert scales["layers.1.ffn.experts.0.w2"] == scale(8.25)  # of its own
    assert "layers.1.ffn.experts.0.w2" not in report.borrowed
    assert notes["layers.1.ffn.experts.1.w3.input_scale"] == {"input_scale_from": "model"}


def test_an_expert_of_its_own_quantizer_takes_the_layers_largest(export: Run) -> None:
    """Snapshots with one quantizer for each expert, the second of them never reached."""
    experts = EXPERTS.format(0)
    each = {f"{experts}.0.{p}_proj.input_quantizer": a for p, a in
            (("gate", 2.0), ("up", 2.0), ("down", 5.0))}  # fmt: skip
    never = {f"{experts}.1.{p}_proj.input_quantizer": 0.0 for p in ("gate", "up", "down")}
    report, scales, _ = export({gate_up(0): None, down(0): None, **each, **never})
    assert scales["layers.0.ffn.experts.1.w1"] == scale(2.0)
    assert scales["layers.0.ffn.experts.1.w2"] == scale(5.0)
    assert report.borrowed["layers.0.ffn.experts.1.w1"] == "layer"
    assert "layers.0.ffn.experts.0.w1" not in report.borrowed


def test_an_unseen_expert_under_a_shared_quantizer_is_reported(export: Run) -> None:
    unseen = json.dumps(["layers.0.ffn.experts.1"])
    report, scales, _ = export(unseen_experts=unseen)
    assert scales["layers.0.ffn.experts.1.w1"] == scales["layers.0.ffn.experts.0.w1"]
    borrowed = {name for name, origin in report.borrowed.items() if origin == "layer"}
    assert borrowed == {f"layers.0.ffn.experts.1.{leaf}" for leaf in ("w1", "w2", "w3")}


def test_fused_projections_get_their_largest_scale(export: Run) -> None:
    report, scales, notes = export({WKV: 11.0, WQ_A: 4.0})
    assert scales["layers.0.attn.wq_a"] == scales["layers.0.attn.wkv"] == scale(11.0)
    assert report.disagreeing == ("layers.0.attn.wq_a",)
    note = notes["layers.0.attn.wq_a.input_scale"]
    assert note == {"input_scale_from": "largest", "own": scale(4.0)}


def test_one_of_two_fused_projections_is_enough(export: Run) -> None:
    report, scales, _ = export({WQ_A: math.nan})
    assert scales["layers.0.attn.wq_a"] == scales["layers.0.attn.wkv"] == scale(3.0)
    assert report.borrowed["layers.0.attn.wq_a"] == "partner"


@pytest.mark.parametrize("bad", [None, 0.0, math.nan], ids=["absent", "0", "nan"])
def test_attention_without_amax_is_refused_by_name(export: Run, bad: float, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"for 1 modules: layers\.1\.attn\.wo_b\. .*--attn"):
        export({WO_B: bad})
    assert not (tmp_path / "out").exists()


def test_it_is_not_asked_of_what_stays_fp8(export: Run) -> None:
    _, scales, _ = export({WO_B: None}, ExportOptions(attn="fp8"))
    assert "layers.1.attn.wo_b" not in scales
    assert "layers.1.ffn.shared_experts.w1" in scales


def test_no_expert_calibrated_at_all(export: Run) -> None:
    with pytest.raises(SnapshotError, match=r"for 12 modules: layers\.0\.ffn\.experts\.0\.w1, "):
        export({gate_up(0): None, gate_up(1): math.nan})


def test_a_snapshot_of_another_model_is_refused(export: Run, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"amax\.safetensors: .*another model"):
        export(config_sha256="0" * 64)
    assert not (tmp_path / "out").exists()


def test_a_snapshot_of_an_unfinished_calibration_is_refused(export: Run) -> None:
    with pytest.raises(SnapshotError, match="layerwise calibration"):
        export(complete="false")
