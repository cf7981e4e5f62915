"""The draft model: MTP blocks in every style, or none."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from vllm_dsv4.testing import RemoteError

from .conftest import Vllm
from .expected import Rank, check


@pytest.mark.parametrize(
    ("variant", "scheme"),
    [
        ("full", "official"),       # FP8 blocks, NVFP4 experts
        ("all-nvfp4", "hf"),        # the same under HF's names, which leave MTP blocks alone
        ("full", "half_converted"),
        ("mtp-bf16", "official"),   # told by dtype
    ],
)  # fmt: skip
def test_the_draft_loads_whole(
    load: Any, source: Any, oracle: ModuleType, variant: str, scheme: str
) -> None:
    model = load(variant, scheme, mtp=True)
    assert model.class_name == "DSV4MTP"
    check(model, oracle, source(variant))
    methods = {n: m.partition("/")[0] for n, m in model.quant_methods.items()}
    own = "UnquantizedLinearMethod" if variant == "mtp-bf16" else "Fp8LinearMethod"
    assert methods["model.layers.4.e_proj"] == own
    assert methods["model.layers.4.mtp_block.attn.fused_wqa_wkv"] == own
    # wo_a is converted, as in the main model.
    assert methods["model.layers.4.mtp_block.attn.wo_a"] == "Fp8LinearMethod"
    experts = "model.layers.4.mtp_block.ffn.experts.routed_experts"
    assert methods[experts] == "ModelOptNVFP4Experts"


def test_experts_in_bf16_run_so(
    vllm: Vllm, checkpoint: Any, checkpoints: ModuleType, oracle: ModuleType, tmp_path: Path
) -> None:
    """As modelopt leaves the MTP blocks' experts; the main model's are NVFP4."""

    def edit(tensors: dict[str, Any]) -> None:
        names = [name for name in tensors if name.startswith("mtp.0.ffn.experts.")]
        for module in {name.rpartition(".")[0] for name in names}:
            values = oracle.values(tensors, module).bfloat16()
            for part in ("weight_scale", "weight_scale_2", "input_scale"):
                del tensors[f"{module}.{part}"]
            tensors[f"{module}.weight"] = values

    folder = checkpoints.change(shutil.copytree(checkpoint("full"), tmp_path / "bf16"), edit)
    experts = "model.layers.4.mtp_block.ffn.experts.routed_experts"
    draft = vllm.load(folder, mtp=True)
    assert draft.quant_methods[experts].partition("/")[0] == "UnquantizedFusedMoEMethod"
    stored = checkpoints.read(folder)
    w13 = draft.parameters[f"{experts}.w13_weight"]
    for index in (0, 15):
        pair = [stored[f"mtp.0.ffn.experts.{index}.{w}.weight"] for w in ("w1", "w3")]
        assert torch.equal(w13[index], torch.cat(pair))


def test_ranks_of_two(vllm: Vllm, checkpoint: Any, source: Any, oracle: ModuleType) -> None:
    models = vllm.call("load_ranks", folder=checkpoint("full"), ranks=[0, 1], tp=2, mtp=True)
    for rank, model in enumerate(models):
        check(model, oracle, source("full"), Rank(rank, 2))


def test_without_mtp_blocks_only_speculation_fails(
    vllm: Vllm, load: Any, checkpoint: Any, checkpoints: ModuleType, tmp_path: Path
) -> None:
    load("no-mtp")
    lost = tmp_path / "lost"  # its config.json still has one
    shutil.copytree(checkpoint("full"), lost)
    checkpoints.change(lost, _without_mtp)
    vllm.load(lost)
    for folder in (checkpoint("no-mtp"), lost):
        with pytest.raises(RemoteError, match="no MTP blocks. Leave --speculative-config away"):
            vllm.load(folder, mtp=True)


def _without_mtp(tensors: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.startswith("mtp.")]:
        del tensors[name]


def test_an_official_checkpoint_drafts_as_ever(
    vllm: Vllm, checkpoints: ModuleType, tmp_path: Path
) -> None:
    ours = vllm.load(checkpoints.TINY, mtp=True)
    stock = vllm.load(checkpoints.TINY, mtp=True, without_plugin=True)
    assert stock.class_name == "DeepSeekV4MTP"
    assert ours.loaded_counts == stock.loaded_counts
    assert ours.quant_methods == stock.quant_methods
