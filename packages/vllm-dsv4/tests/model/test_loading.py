"""Tiny checkpoints in every style, loaded into vLLM's real model through the real plugin: every
parameter is written exactly once, and holds what the checkpoint means by it."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from .conftest import Vllm
from .expected import Expected, Rank, check
from .wide import make_wide

LINEARS = ("attn.fused_wqa_wkv", "attn.wq_b", "attn.wo_b", "attn.indexer.wq_b",
           "ffn.shared_experts.gate_up_proj", "ffn.shared_experts.down_proj")  # fmt: skip


@pytest.mark.parametrize("scheme", ["official", "hf", "half_converted"])
def test_every_scheme_loads_whole(load: Any, source: Any, oracle: ModuleType, scheme: str) -> None:
    model = load("all-nvfp4", scheme)
    assert model.class_name == "DSV4ForCausalLM"
    check(model, oracle, source("all-nvfp4"))


@pytest.mark.parametrize("variant", ["full", "wo-a-bf16", "no-mtp", "mtp-bf16", "two-scales"])
def test_every_variant_loads_whole(
    load: Any, source: Any, oracle: ModuleType, variant: str
) -> None:
    check(load(variant), oracle, source(variant))


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_linears_run_as_they_are_asked_to(
    load: Any, source: Any, oracle: ModuleType, dtype: str
) -> None:
    options = {"attn_dtype": dtype, "shared_dtype": dtype, "indexer_dtype": dtype}
    model = load("all-nvfp4", options={**options, "wo_a_dtype": dtype})
    check(model, oracle, source("all-nvfp4"))
    own = {"fp8": "Fp8LinearMethod", "bf16": "UnquantizedLinearMethod"}[dtype]
    methods = {
        name: method.partition("/")[0]
        for name, method in model.quant_methods.items()
        if name.endswith((*LINEARS, "attn.wo_a"))
    }
    assert set(methods.values()) == {own}
    assert len(methods) == 4 * 6 + 1


def test_by_default_linears_run_as_they_are_stored(load: Any) -> None:
    methods = load("all-nvfp4").quant_methods
    nvfp4 = [name for name in methods if name.endswith(LINEARS)]
    assert {methods[name].partition("/")[0] for name in nvfp4} == {"ModelOptLinearMethod"}
    compressors = [name for name in methods if name.endswith("fused_wkv_wgate")]
    assert {methods[name] for name in compressors} == {"UnquantizedLinearMethod"}
    experts = [name for name in methods if name.endswith(".routed_experts")]
    assert {methods[name] for name in experts} == {"ModelOptNVFP4Experts"}
    assert (len(nvfp4), len(compressors), len(experts)) == (4 * 5 + 1, 4, 4)


def test_wo_a_gets_the_method_and_the_kernel_that_vllm_gives_an_official_one(
    vllm: Vllm, load: Any, checkpoints: ModuleType
) -> None:
    official = vllm.load(checkpoints.TINY, without_plugin=True)
    assert official.class_name == "DeepseekV4ForCausalLM"
    for variant in ("full", "all-nvfp4", "wo-a-bf16"):
        ours = load(variant)
        for name, method in official.quant_methods.items():
            if name.endswith(".wo_a"):
                assert ours.quant_methods[name] == method
                for part in ("weight", "weight_scale_inv"):
                    a, b = (m.parameters[f"{name}.{part}"] for m in (ours, official))
                    assert (a.dtype, a.shape) == (b.dtype, b.shape)


@pytest.mark.parametrize("mega", [False, True])
def test_experts_that_are_mxfp4_stay_so(
    vllm: Vllm, tmp_path: Path, checkpoint: Any, checkpoints: ModuleType, mega: bool
) -> None:
    """In one layer, beside NVFP4 in the others: byte for byte as an official checkpoint's."""
    folder = tmp_path / "mixed"
    shutil.copytree(checkpoint("full"), folder)
    official = checkpoints.read(checkpoints.TINY)

    def mix(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("layers.1.ffn.experts.")]:
            del tensors[name]
        own = {n: t for n, t in official.items() if n.startswith("layers.1.ffn.experts.")}
        tensors.update({name: tensor.clone() for name, tensor in own.items()})

    checkpoints.change(folder, mix)
    arguments = {"moe_backend": "deep_gemm_mega_moe", "expert_parallel": True} if mega else {}
    model = vllm.load(folder, **arguments)
    stock = vllm.load(checkpoints.TINY, without_plugin=True, **arguments)
    assert set(model.loaded_counts.values()) == {1}
    own = "model.layers.1.ffn.experts."
    names = {name for name in stock.parameters if name.startswith(own) and ".shared_" not in name}
    assert names == {name for name in model.parameters if name.startswith(own)}
    for name in names:
        ours, theirs = (m.parameters[name].contiguous().flatten() for m in (model, stock))
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name
    other = f"{own.replace('.1.', '.2.')}{'' if mega else 'routed_experts.'}w13_weight_scale_2"
    assert other in model.parameters


def test_ranks_of_two(vllm: Vllm, checkpoint: Any, source: Any, oracle: ModuleType) -> None:
    for expert_parallel in (False, True):
        models = vllm.call(
            "load_ranks", folder=checkpoint("all-nvfp4", "hf"), ranks=[0, 1], tp=2,
            expert_parallel=expert_parallel,
        )  # fmt: skip
        for rank, model in enumerate(models):
            check(model, oracle, source("all-nvfp4"), Rank(rank, 2, expert_parallel))


def test_ranks_of_eight(
    vllm: Vllm, tmp_path: Path, checkpoints: ModuleType, oracle: ModuleType
) -> None:
    folder = make_wide(tmp_path, checkpoints)
    for options in ({}, {"shared_dtype": "fp8"}, {"shared_dtype": "bf16"}):
        ranks = list(range(8)) if not options else [0, 1, 7]
        models = vllm.call("load_ranks", folder=folder, ranks=ranks, tp=8, options=options)
        for rank, model in zip(ranks, models, strict=True):
            check(model, oracle, checkpoints.read(folder), Rank(rank, 8))
            # 128 columns on eight ranks: 16 each would do for NVFP4, vLLM gives each a block.
            shape = model.parameters["model.layers.1.ffn.shared_experts.down_proj.weight"].shape
            assert shape[1] == (64 if not options else 128)


def test_pipeline_stages(
    vllm: Vllm, checkpoint: Any, source: Any, oracle: ModuleType, load: Any
) -> None:
    """Each has its layers, and converts no other's."""
    names: set[str] = set()
    for stage in (0, 1):
        before = len(vllm.harness.log())
        model = vllm.load(checkpoint("all-nvfp4", "hf"), pp=2, pp_rank=stage)
        check(model, oracle, source("all-nvfp4"))
        names |= set(model.parameters)
        lines = vllm.harness.log()[before:].splitlines()
        (row,) = [line for line in lines if "layers.*.attn.wo_a" in line]
        assert row.split("layers.*.attn.wo_a")[1].split()[0] == "2"
    assert names == set(load("all-nvfp4", "hf").parameters)


def test_shards_that_tear_apart_what_belongs_together(
    vllm: Vllm, tmp_path: Path, checkpoint: Any, checkpoints: ModuleType, source: Any,
    oracle: ModuleType,
) -> None:  # fmt: skip
    folder = tmp_path / "split"
    shutil.copytree(checkpoint("two-scales"), folder)
    checkpoints.split(folder)
    check(vllm.load(folder), oracle, source("two-scales"))


def test_a_tensor_that_the_model_does_not_have_is_told_once(
    vllm: Vllm, tmp_path: Path, checkpoint: Callable[..., Path], checkpoints: ModuleType
) -> None:
    folder = tmp_path / "more"
    shutil.copytree(checkpoint("full"), folder)

    def add(tensors: dict[str, Any]) -> None:
        for layer in range(4):
            tensors[f"layers.{layer}.attn.position_bias"] = tensors["norm.weight"].clone()

    checkpoints.change(folder, add)
    before = len(vllm.harness.log())
    model = vllm.load(folder)
    assert set(Counter(model.loaded_counts).values()) == {1}
    log = vllm.harness.log()[before:]
    assert log.count("4 x layers.#.attn.position_bias") == 1


def test_after_loading_a_table_says_what_runs_how(vllm: Vllm, checkpoint: Any) -> None:
    before = len(vllm.harness.log())
    vllm.load(checkpoint("two-scales"))
    lines = vllm.harness.log()[before:].splitlines()
    (row,) = [line for line in lines if "layers.*.attn.wo_a" in line]
    assert row.split("layers.*.attn.wo_a")[1].split()[:3] == ["4", "nvfp4", "fp8_block"]
    (row,) = [line for line in lines if "layers.*.ffn.shared_experts.w1" in line]
    assert "4 fused groups had two weight_scale_2" in row


def test_values_that_are_off_would_be_seen(load: Any, source: Any, oracle: ModuleType) -> None:
    """The comparison itself: a nibble, a scale, a lost row."""
    model = load("all-nvfp4")
    for name in (
        "model.layers.1.attn.wq_b.weight",
        "model.layers.2.attn.compressor.fused_wkv_wgate.weight",
        "model.layers.3.ffn.experts.routed_experts.w2_weight_scale",
        "model.layers.0.attn.wo_a.weight_scale_inv",
        "model.layers.0.ffn.gate.weight",
    ):
        parameter = model.parameters[name].clone()
        is_byte = parameter.dtype.itemsize == 1
        parameter.view(torch.uint8 if is_byte else parameter.dtype)[-1, -1] += 1
        changed = type(model)(
            {**model.parameters, name: parameter}, model.loaded_counts, {}, model.class_name
        )
        with pytest.raises(AssertionError):
            Expected(oracle, source("all-nvfp4"), Rank()).check(changed)
