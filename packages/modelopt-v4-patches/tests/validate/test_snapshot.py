"""Snapshots: usable numbers, names of the model, coverage, and what is only worth a note."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelopt_v4_patches.errors import SnapshotError
from modelopt_v4_patches.snapshot import REQUIRED, Snapshot, config_sha256
from modelopt_v4_patches.validate import Validation, examine
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig, Schema, from_official

CALIBRATED = ("wq_a", "wq_b", "wkv", "wo_b", "indexer_wq_b", "shared_expert")
Q = "model.layers.2.self_attn.q_a_proj.input_quantizer"
FUSED = "model.layers.{}.mlp.experts.{}_proj_input_quantizer"


def amaxes(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """One quantizer per linear, and one per layer and fused parameter for the experts."""
    found = {
        f"{entry.module('hf')}.input_quantizer": torch.tensor(3.0)
        for entry in Schema(ModelConfig.from_dict(config)).entries()
        if entry.role in CALIBRATED and not entry.in_mtp
    }
    for layer in range(config["num_hidden_layers"]):
        for parameter in ("gate_up", "down"):
            found[FUSED.format(layer, parameter)] = torch.tensor(5.0)
        found[f"model.layers.{layer}.mlp.experts.down_proj_weight_quantizers.1"] = torch.tensor(0.5)
        found[f"model.layers.{layer}.self_attn.k_bmm_quantizer"] = torch.tensor(9.0)
    return found


Check = Callable[..., Validation]


@pytest.fixture
def check(healthy, tiny, tmp_path) -> Check:
    config = healthy["official"].config

    def run(change: Any = None, *, against: bool = True, **metadata: str) -> Validation:
        amax = amaxes(config)
        if change is not None:
            change(amax)
        quantizers = {name: {"shape": list(value.shape)} for name, value in amax.items()}
        known = dict.fromkeys(REQUIRED, "1") | {
            "config_sha256": config_sha256(config),
            "quantizers": json.dumps(quantizers),
            "complete": "true",
            **metadata,
        }
        path: Path = tmp_path / "amax.safetensors"
        Snapshot(amax, known).save(path)
        return examine(path, against=tiny if against else None)

    return run


def test_a_healthy_snapshot(check):
    made = check()
    assert made.kind == "snapshot"
    assert made.findings == ()
    coverage = {row.role: (row.calibrated, row.modules, row.largest) for row in made.coverage}
    assert coverage["routed_expert"] == (48, 48, 5.0)
    assert coverage["indexer_wq_b"] == (1, 1, 3.0)
    assert coverage["wq_a"] == (4, 4, 3.0)


def test_without_the_checkpoint_numbers_are_checked(check):
    made = check(lambda amax: amax.update({Q: torch.tensor(0.0)}), against=False)
    assert [f.code for f in made.findings] == ["bad-amax"]
    assert any("need --against" in note for note in made.notes)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_unusable_numbers(check, value: float):
    made = check(lambda amax: amax.update({Q: torch.tensor(value)}))
    found = {(f.code, f.tensor) for f in made.findings}
    assert found == {("bad-amax", Q), ("uncalibrated", "layers.2.attn.wq_a")}


def test_an_amax_of_several_values(check):
    made = check(lambda amax: amax.update({Q: torch.ones(4)}))
    assert [(f.code, f.tensor, f.found) for f in made.findings] == [
        ("amax-not-scalar", Q, "shape [4]")
    ]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.7.self_attn.q_a_proj.input_quantizer",
        "model.layers.1.mlp.experts.down_proj_weight_quantizers.9",
        "model.layers.1.self_attn.compressor.indexer.q_b_proj.input_quantizer",  # ratio 128
        "model.layers.1.odd.weight_quantizer",
    ],
)
def test_quantizers_of_another_model(check, name: str):
    made = check(lambda amax: amax.update({name: torch.tensor(1.0)}))
    assert [(f.code, f.tensor) for f in made.findings] == [("unknown-tensor", name)]


def test_a_layer_that_was_left_out(check):
    made = check(lambda amax: amax.pop(Q))
    (finding,) = made.findings
    assert (finding.code, finding.tensor) == ("uncalibrated", "layers.2.attn.wq_a")
    assert "1 of 4 modules" in finding.found


def test_a_role_that_was_left_out_is_a_note(check):
    def experts_only(amax: dict[str, torch.Tensor]) -> None:
        for name in [name for name in amax if "experts." not in name or "shared" in name]:
            del amax[name]

    made = check(experts_only)
    assert made.findings == ()
    assert any("wq_a was not calibrated" in note for note in made.notes)


def test_uncalibrated_experts_are_counted(check):
    unseen = json.dumps(["layers.1.ffn.experts.2"])
    made = check(lambda amax: amax.pop(FUSED.format(3, "down")), unseen_experts=unseen)
    assert made.findings == ()
    assert "1 expert was never routed to" in made.notes
    assert "4 expert matrices take their layer's maximum at export" in made.notes


def test_unfinished_and_foreign_snapshots(check):
    made = check(complete="false", config_sha256="0" * 64)
    assert {f.code for f in made.findings} == {"incomplete", "other-model"}


def test_a_malformed_one_is_refused(check, tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "other.safetensors"
    save_file({"x": torch.ones(1)}, path, metadata={"format": "dsv4-amax-snapshot"})
    with pytest.raises(SnapshotError, match="snapshot version"):
        examine(path)


def test_official_names_are_those_of_the_schema(healthy):
    """The fixture itself: every calibrated module is one that modelopt would see."""
    names = amaxes(healthy["official"].config)
    assert f"{from_official('layers.2.attn.wq_a', 'hf')}.input_quantizer" in names
    assert len(names) == 4 * 7 + 1 + 4 * 4
