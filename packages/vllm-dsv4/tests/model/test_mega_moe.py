"""NVFP4 experts in the layout of vLLM's MegaMoE kernel, which is written down again here.

vLLM's own class does the packing; what is tested is that it gets its NVFP4 format, every tensor,
and one weight_scale_2 for w1 and w3.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_dsv4.testing import RemoteError

from .conftest import Vllm
from .expected import Rank, check, within

MEGA = {"moe_backend": "deep_gemm_mega_moe", "expert_parallel": True}


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of gate and up in turns of eight."""
    turns = [rows.unflatten(0, (-1, 8)) for rows in (gate, up)]
    return torch.stack(turns, 1).flatten(0, 2)


def utccp(rows: Tensor) -> Tensor:
    """Scale row 32 j + i of 128 goes to row 4 i + j."""
    blocks: Tensor = rows.unflatten(0, (-1, 4, 32))
    return blocks.transpose(1, 2).flatten(0, 2)


def scale_bytes(packed: Tensor) -> Tensor:
    """Four block scales in each int32 along K; [N, K/4] to [N, K]."""
    return packed.contiguous().flatten().view(torch.uint8).reshape(len(packed), -1)


def experts_are_packed(
    model: Any, oracle: ModuleType, source: Mapping[str, Tensor], block: str, prefix: str,
    first: int = 0,
) -> None:  # fmt: skip
    own = {
        name.removeprefix(f"{prefix}."): value
        for name, value in model.parameters.items()
        if name.startswith(f"{prefix}.")
    }
    for local in range(own["w13_weight"].shape[0]):
        expert = f"{block}.ffn.experts.{first + local}"
        weights = [source[f"{expert}.{w}.weight"] for w in ("w1", "w3")]
        packed = own["w13_weight"][local].view(torch.uint8)
        assert torch.equal(packed, interleaved(*weights))
        w2 = own["w2_weight"][local].view(torch.uint8)
        assert torch.equal(w2, source[f"{expert}.w2.weight"])
        scale = source[f"{expert}.w2.weight_scale"].view(torch.uint8)
        assert torch.equal(scale_bytes(own["w2_weight_scale"][local]), utccp(scale))
        for name in ("weight_scale_2", "input_scale"):
            assert own[f"w2_{name}"][local] == source[f"{expert}.w2.{name}"]

        largest = max(source[f"{expert}.{w}.weight_scale_2"] for w in ("w1", "w3"))
        assert own["w13_weight_scale_2"][local] == largest
        found = scale_bytes(own["w13_weight_scale"][local])
        raw = [source[f"{expert}.{w}.weight_scale"].view(torch.uint8) for w in ("w1", "w3")]
        if len({float(source[f"{expert}.{w}.weight_scale_2"]) for w in ("w1", "w3")}) == 1:
            assert torch.equal(found, utccp(interleaved(*raw)))
        else:  # rescaled: what it means must be what was meant
            row = torch.arange(256)[:, None].expand(256, 1)
            order = utccp(interleaved(row[:128], row[128:])).flatten()
            plain = torch.empty_like(found)
            plain[order] = found
            values = oracle.nvfp4(torch.cat(weights), plain.view(torch.float8_e4m3fn), largest)
            meant = torch.cat([oracle.values(source, f"{expert}.{w}") for w in ("w1", "w3")])
            assert within(values, meant, 2**-4, float(largest) * 6 * 2**-10)


@pytest.mark.parametrize("variant", ["full", "experts", "two-scales"])
def test_experts_are_in_the_kernels_layout(
    load: Any, source: Any, oracle: ModuleType, variant: str
) -> None:
    model = load(variant, **MEGA)
    check(model, oracle, source(variant))
    for layer in range(4):
        prefix = f"model.layers.{layer}.ffn.experts"
        experts_are_packed(model, oracle, source(variant), f"layers.{layer}", prefix)


def test_ranks_of_two(vllm: Vllm, checkpoint: Any, source: Any, oracle: ModuleType) -> None:
    for mtp in (False, True):
        models = vllm.call(
            "load_ranks", folder=checkpoint("full"), ranks=[0, 1], tp=2, mtp=mtp, **MEGA
        )
        for rank, model in enumerate(models):
            # Tokens are split over the ranks, so each has the whole shared expert.
            check(model, oracle, source("full"), Rank(rank, 2, True, replicated=True))
            block, prefix = "layers.1", "model.layers.1.ffn.experts"
            if mtp:
                block, prefix = "mtp.0", "model.layers.4.mtp_block.ffn.experts"
            experts_are_packed(model, oracle, source("full"), block, prefix, 8 * rank)


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_shared_experts_that_it_can_run_are_fused(
    load: Any, source: Any, oracle: ModuleType, dtype: str
) -> None:
    model = load("full", options={"shared_dtype": dtype}, **MEGA)
    check(model, oracle, source("full"))
    assert not [name for name in model.parameters if ".shared_experts." in name]
    stored = source("full")
    shared = "layers.1.ffn.shared_experts"
    w1, w2, w3 = (oracle.values(stored, f"{shared}.w{i}") for i in (1, 2, 3))
    prefix = "model.layers.1.ffn.experts.shared"
    l1, l2 = (model.parameters[f"{prefix}_l{i}_weight"].double() for i in (1, 2))
    if dtype == "fp8":
        scales = (scale_bytes(model.parameters[f"{prefix}_l{i}_weight_scale"]) for i in (1, 2))
        # One E8M0 for 32 columns, in UTCCP order.
        plain = [s.unflatten(0, (-1, 32, 4)).transpose(1, 2).flatten(0, 2) for s in scales]
        wide = [2.0 ** (s.double() - 127).repeat_interleave(32, 1) for s in plain]
        l1, l2 = l1 * wide[0], l2 * wide[1]
    relative = {"fp8": 2**-4, "bf16": 2**-7}[dtype]
    for found, meant in ((l1, interleaved(w1, w3)), (l2, w2)):
        assert within(found, meant, relative, float(meant.abs().amax()) * 2**-17)


def test_nvfp4_shared_experts_run_beside_it(load: Any) -> None:
    methods = load("full", **MEGA).quant_methods
    own = [m for name, m in methods.items() if ".shared_experts." in name]
    assert len(own) == 8
    assert {method.partition("/")[0] for method in own} == {"ModelOptLinearMethod"}


def test_the_second_projections_input_is_quantized_with_one_scale(
    vllm: Vllm, checkpoint: Any, source: Any
) -> None:
    """The largest of all experts', those of other ranks among them; vLLM keeps it in BF16."""
    found = vllm.call("l2_activation_scales", folder=checkpoint("full"), tp=2, rank=1, **MEGA)
    stored = source("full")
    for layer, scale in enumerate(found):
        names = [f"layers.{layer}.ffn.experts.{e}.w2.input_scale" for e in range(16)]
        assert scale == pytest.approx(max(float(stored[name]) for name in names), rel=2**-8)


def test_without_expert_parallelism_it_is_refused(vllm: Vllm, checkpoint: Any) -> None:
    with pytest.raises(RemoteError, match="enable-expert-parallel"):
        vllm.load(checkpoint("full"), moe_backend="deep_gemm_mega_moe")


def test_stock_vllm_cannot(vllm: Vllm, checkpoint: Any) -> None:
    """NVIDIA's layout under MegaMoE: what the plugin is for."""
    with pytest.raises(RemoteError):
        vllm.load(checkpoint("experts"), without_plugin=True, **MEGA)
