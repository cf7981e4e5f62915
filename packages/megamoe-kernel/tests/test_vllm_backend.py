"""vLLM's routed experts on this package, by the protocol of vllm-dsv4 and without vLLM."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe_kernel import (
    BackendError,
    LayoutError,
    ScaleError,
    untransform_nvfp4_weights,
)
from megamoe_kernel import api as megamoe_api
from megamoe_kernel.experts import ExpertWeights
from megamoe_kernel.reference import RankTokens, mega_moe
from megamoe_kernel.vllm_backend import MegaMoEBackend

protocol = pytest.importorskip("vllm_dsv4.moe_backend", reason="needs vllm-dsv4: its protocol")

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 5, 256, 128, 4, 2
SHAPE = protocol.MoEShape(
    num_experts=EXPERTS,
    num_local_experts=EXPERTS,
    first_expert=0,
    top_k=TOPK,
    hidden_size=HIDDEN,
    intermediate_size=INTERMEDIATE,
    max_num_tokens=16,
    swiglu_limit=10.0,
    ep_size=1,
)
HOPPER = (9, 0)


@pytest.fixture(scope="module")
def experts(make_layer: Any) -> tuple[Any, Any]:
    """As vllm-dsv4 hands them over: one global scale for gate and up."""
    layer = make_layer(EXPERTS, HIDDEN, INTERMEDIATE)
    return tuple(
        protocol.ExpertWeights(
            w.weight, w.weight_scale, w.weight_scale_2[:, 0].clone(), torch.ones(EXPERTS)
        )
        for w in (layer.w13, layer.w2)
    )  # type: ignore[return-value]


def _tokens(count: int = TOKENS, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, HIDDEN, generator=generator).to(torch.bfloat16)
    ids = torch.rand(count, EXPERTS, generator=generator).topk(TOPK, -1).indices
    return x, ids, torch.rand(count, TOPK, generator=generator)


def _expected(experts: tuple[Any, Any], x: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
    w13, w2 = (
        ExpertWeights(w.weight, w.weight_scale, w.weight_scale_2[:, None].repeat(1, parts))
        for w, parts in zip(experts, (2, 1), strict=True)
    )
    ranks = [RankTokens(x, ids, topk_weights)]
    (y,) = mega_moe(ranks, w13, w2, activation="bf16", swiglu_limit=10.0)
    return y


def test_the_entry_point_names_it() -> None:
    (entry,) = entry_points(group=protocol.GROUP, name="megamoe")
    assert entry.load() is MegaMoEBackend


def test_it_imports_neither_vllm_nor_the_plugin() -> None:
    code = (
        "import sys, megamoe_kernel.vllm_backend\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('vllm', 'vllm_dsv4')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_layers_share_a_buffer_and_give_the_references_numbers(experts: tuple[Any, Any]) -> None:
    backend = MegaMoEBackend(SHAPE, None, backend="reference")
    assert backend.supports(HOPPER, SHAPE) == (True, "")
    layers = [backend.prepare_weights(*experts)]
    buffer = backend._buffer
    flipped = tuple(replace(w, weight=w.weight.flip(0).contiguous()) for w in experts)
    layers.append(backend.prepare_weights(*flipped))
    assert backend._buffer is buffer
    assert buffer is not None
    assert buffer.num_max_tokens_per_rank == SHAPE.max_num_tokens
    assert {w.arch for pair in layers for w in pair} == {"sm_90a"}
    back, _ = untransform_nvfp4_weights(*layers[0])
    assert torch.equal(back.weight, experts[0].weight)
    for count in (5, 16, 0, 1):
        x, ids, topk_weights = _tokens(count, seed=count)
        for weights, given in zip(layers, (experts, flipped), strict=True):
            for indices in (ids, ids.int()):
                y = backend.forward(x, indices, topk_weights, weights)
                assert torch.equal(y, _expected(given, x, ids, topk_weights))


def test_a_compiled_model_keeps_it_whole(experts: tuple[Any, Any]) -> None:
    torch._dynamo.reset()
    backend = MegaMoEBackend(SHAPE, None, backend="reference")
    weights = backend.prepare_weights(*experts)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def model(x: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
        return backend.forward(x * 2, ids, topk_weights, weights) + 1

    x, ids, topk_weights = _tokens()
    expected = _expected(experts, x * 2, ids, topk_weights) + 1
    assert torch.equal(model(x, ids, topk_weights), expected)


@pytest.mark.parametrize(
    ("capability", "changes", "reason"),
    [
        ((10, 0), {}, "9.0 (H100, H200, GH200), not on 10.0"),
        ((8, 9), {}, "not on 8.9"),
        (HOPPER, {"hidden_size": 200}, "hidden is 200, expected a multiple of 128"),
        (HOPPER, {"intermediate_size": 64}, "intermediate is 64"),
        (HOPPER, {"top_k": 40}, "top_k is 40"),
        (HOPPER, {"max_num_tokens": 1 << 21}, "max_num_batched_tokens is 2097152"),
        (HOPPER, {"num_local_experts": 3}, "holds 3 of 4 experts"),
    ],
    ids=str,
)
def test_what_it_refuses_has_a_reason(
    capability: tuple[int, int], changes: dict[str, int], reason: str
) -> None:
    shape = replace(SHAPE, **changes)
    found = MegaMoEBackend(shape, None, backend="reference").supports(capability, shape)
    assert not found.supported
    assert reason in found.reason


def test_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of 2; a wrong division is refused, and so are more ranks than NVLink joins."""
    monkeypatch.setitem(megamoe_api.LAYER_KERNELS, "sm_90a", lambda *_, **__: None)
    shape = replace(SHAPE, ep_size=2, num_local_experts=2, first_expert=2)
    assert MegaMoEBackend(shape, None).supports(HOPPER, shape).supported
    found = MegaMoEBackend(shape, None, backend="reference").supports(HOPPER, shape)
    assert found == (False, "its reference has one rank")
    for changes, reason in (
        ({"first_expert": 1}, "from 1 on; with 2 ranks"),
        ({"num_experts": 5}, "holds 2 of 5 experts"),
        ({"ep_size": 80, "num_experts": 160}, "80 ranks, an NVLink domain has 72"),
    ):
        wrong = replace(shape, **changes)
        assert reason in MegaMoEBackend(wrong, None).supports(HOPPER, wrong).reason


def test_without_a_kernel_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megamoe_api, "LAYER_KERNELS", {})
    monkeypatch.setattr("megamoe_kernel.vllm_backend.LAYER_KERNELS", {})
    found = MegaMoEBackend(SHAPE, None).supports(HOPPER, SHAPE)
    assert found == (False, "this megamoe-kernel has no kernel for sm_90a yet")


def test_what_is_wrong_with_weights_is_named(experts: tuple[Any, Any]) -> None:
    backend = MegaMoEBackend(SHAPE, None, backend="reference")
    with pytest.raises(LayoutError, match="forward came before prepare_weights"):
        backend.forward(*_tokens(), weights=())
    w13, w2 = experts
    broken = replace(w2, weight_scale_2=torch.zeros(EXPERTS))
    with pytest.raises(ScaleError, match="weight_scale_2 of w2 holds 0"):
        backend.prepare_weights(w13, broken)
    weights = MegaMoEBackend(SHAPE, None).prepare_weights(w13, w2)
    on_cpu = MegaMoEBackend(SHAPE, None)
    on_cpu.prepare_weights(w13, w2)
    with pytest.raises(BackendError, match="there is no kernel for"):
        on_cpu.forward(*_tokens(), weights=weights)
