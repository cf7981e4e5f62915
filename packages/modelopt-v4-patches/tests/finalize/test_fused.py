"""Fused projections with two weight_scale_2: reported, and made one without changing much."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from modelopt_v4_patches.finalize import Report, finalize_checkpoint
from nvfp4_codec.checkpoint import Checkpoint, verify_checkpoint
from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import to_official

Make = Callable[..., Path]
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
PAIRS = (
    ("self_attn.q_a_proj", "self_attn.kv_proj"),
    ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    ("mlp.experts.1.gate_proj", "mlp.experts.1.up_proj"),
)


def stored(folder: Path) -> dict[str, Tensor]:
    return {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in load_file(f).items()}


def values(tensors: dict[str, Tensor], module: str) -> Tensor:
    """e2m1 * weight_scale * weight_scale_2 in float64."""
    packed = tensors[f"{module}.weight"]
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()
    scale = tensors[f"{module}.weight_scale"].double().repeat_interleave(16, dim=-1)
    return GRID[codes].double() * scale * tensors[f"{module}.weight_scale_2"].double()


def with_ratio(ratio: float) -> Callable[[dict[str, Tensor]], None]:
    """All groups agree but three pairs of layer 0, where one is ``ratio`` times the other."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith("weight_scale_2"):
                tensors[name] = torch.tensor(2.0**-12)
        for _, second in PAIRS:
            tensors[f"model.layers.0.{second}.weight_scale_2"] *= ratio

    return change


def findings(report: Report) -> list[str]:
    return [finding for finding in report.findings if "weight_scale_2" in finding]


def test_differing_groups_are_counted_with_their_largest_ratio(
    make_export: Make, reference_config: Path, tmp_path: Path
) -> None:
    source = make_export(change=with_ratio(0.1))
    report = finalize_checkpoint(source, tmp_path / "out", reference_config=reference_config)
    counts = {kind: (n, len(report.differing.get(kind, ()))) for kind, n in report.groups.items()}
    assert counts == {
        "layers.*.attn.wq_a+wkv": (2, 1),
        "layers.*.ffn.shared_experts.w1+w3": (2, 1),
        "layers.*.ffn.experts.*.w1+w3": (4, 1),
        "layers.*.attn.compressor.wkv+wgate": (2, 0),
        "layers.*.attn.indexer.compressor.wkv+wgate": (1, 0),
    }
    assert len(findings(report)) == 3
    assert all("by up to 10 times" in finding for finding in findings(report))
    # what is reported is what the codec's own verification sees, where it knows the pair
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        seen = {f.tensor for f in verify_checkpoint(checkpoint) if f.code == "fused-scale-mismatch"}
    assert seen == {"layers.0.ffn.shared_experts.w1.weight", "layers.0.ffn.experts.1.w1.weight"}


@pytest.mark.parametrize("ratio", [0.5, 4.0, 0.37, 1 / 300])
def test_unify_gives_one_scale_and_the_nearest_values(
    make_export: Make, reference_config: Path, tmp_path: Path, ratio: float
) -> None:
    source = make_export(change=with_ratio(ratio))
    output = tmp_path / "out"
    report = finalize_checkpoint(source, output, reference_config=reference_config, unify=True)
    assert findings(report) == []
    assert report.written is not None
    before, after = stored(source), stored(output)
    changed = set()
    for name, tensor in before.items():
        other = after[to_official(name, "hf")]
        if not torch.equal(tensor.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)):
            changed.add(name)
    expected = set()
    for first, second in PAIRS:
        smaller = second if ratio < 1 else first
        expected |= {f"model.layers.0.{smaller}.{p}" for p in ("weight_scale", "weight_scale_2")}
        modules = [to_official(f"model.layers.0.{m}", "hf") for m in (first, second)]
        assert len({float(after[f"{m}.weight_scale_2"]) for m in modules}) == 1
        for module, official in zip((first, second), modules, strict=True):
            old, new = values(before, f"model.layers.0.{module}"), values(after, official)
            step = 2.0**-9 * float(after[f"{official}.weight_scale_2"])
            # half a step of E4M3: 2^-4 of a normal scale, 2^-10 among the subnormals
            bound = torch.maximum(old.abs() * 2.0**-4, torch.tensor(6 * step / 2))
            assert ((old - new).abs() <= bound * (1 + 1e-6)).all()
            if ratio == 0.5:
                assert torch.equal(old, new)
    assert changed == expected
    unified = report.written.unified
    assert {kind: cost.groups for kind, cost in unified.items()} == {
        "layers.*.attn.wq_a+wkv": 1,
        "layers.*.ffn.shared_experts.w1+w3": 1,
        "layers.*.ffn.experts.*.w1+w3": 1,
    }
    exact = all(cost.inexact_blocks == 0 for cost in unified.values())
    assert exact == (ratio in (0.5, 4.0))
    with Checkpoint.open(output) as checkpoint:
        assert not any(f.code == "fused-scale-mismatch" for f in verify_checkpoint(checkpoint))


def test_an_interrupted_unify_is_resumed_to_the_same_bytes_and_the_same_report(
    make_export: Make, reference_config: Path, tmp_path: Path
) -> None:
    """The two files tear pairs apart; the first is finished when the kill comes."""
    source = make_export(change=with_ratio(0.37))

    def run(output: Path, **options: Any) -> Report:
        return finalize_checkpoint(
            source, output, reference_config=reference_config, unify=True, **options
        )

    clean = run(tmp_path / "clean")

    class Killed(BaseException):
        pass

    def kill(step: str) -> None:
        if step == "rename" and (tmp_path / "out" / "model-00001-of-00002.safetensors").exists():
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path / "out", fault=kill)
    with pytest.raises(CheckpointError, match="Pass --resume"):
        run(tmp_path / "out")
    resumed = run(tmp_path / "out", resume=True)
    assert resumed.written is not None
    assert clean.written is not None
    assert resumed.written.outcome.kept == ("model-00001-of-00002.safetensors",)
    assert resumed.written.unified == clean.written.unified
    assert digests(tmp_path / "out") == digests(tmp_path / "clean")
    with pytest.raises(CheckpointError, match="not what it wrote|another size or header"):
        finalize_checkpoint(source, tmp_path / "out", reference_config=reference_config,
                            flat_rope=True, resume=True)  # fmt: skip


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_a_half_quantized_group_is_a_finding(
    make_export: Make, reference_config: Path, tmp_path: Path
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        module = "model.layers.0.self_attn.kv_proj"
        for part in ("weight_scale", "weight_scale_2", "input_scale"):
            del tensors[f"{module}.{part}"]
        tensors[f"{module}.weight"] = torch.ones(64, 128, dtype=torch.bfloat16)

    source = make_export(change=change)
    report = finalize_checkpoint(source, tmp_path / "out", reference_config=reference_config)
    assert report.half_quantized == ("layers.0.attn.wkv",)
    assert any("the first is layers.0.attn.wkv" in finding for finding in report.findings)
