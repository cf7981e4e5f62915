"""The layer in a model on a Hopper GPU: the operator, compiled, in CUDA graphs, in vLLM's hook."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe_kernel import (
    get_symm_buffer_for_nvfp4_mega_moe,
    mega_moe_op,
    transform_nvfp4_weights_for_mega_moe,
)
from megamoe_kernel.api import LAYER_KERNELS
from megamoe_kernel.reference import RankTokens, mega_moe
from megamoe_kernel.verify.cases import TINY, random_weights
from megamoe_kernel.verify.checks import BOUNDS
from megamoe_kernel.vllm_backend import MegaMoEBackend

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

DEVICE, LIMIT, MOST = "cuda", 10.0, 64


@pytest.fixture(autouse=True, scope="module")
def needs_a_kernel() -> None:
    if "sm_90a" not in LAYER_KERNELS:
        pytest.skip("needs the layer's kernel for sm_90a, which is not written")


@pytest.fixture(scope="module")
def layer() -> Any:
    w13, w2 = random_weights(TINY, torch.device(DEVICE), seed=0)
    buffer = get_symm_buffer_for_nvfp4_mega_moe(
        num_experts=TINY.num_experts,
        num_max_tokens_per_rank=MOST,
        num_topk=TINY.num_topk,
        hidden=TINY.hidden,
        intermediate=TINY.intermediate,
        activation="bf16",
        device=DEVICE,
    )
    weights = transform_nvfp4_weights_for_mega_moe(w13, w2, arch="sm_90a")
    return SimpleNamespace(w13=w13, w2=w2, buffer=buffer, weights=weights)


def _tokens(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(count, TINY.hidden, generator=generator, device=DEVICE).bfloat16()
    scores = torch.rand(count, TINY.num_experts, generator=generator, device=DEVICE)
    weights = torch.rand(count, TINY.num_topk, generator=generator, device=DEVICE)
    return x, scores.topk(TINY.num_topk, -1).indices, weights


def _assert_right(y: Tensor, layer: Any, x: Tensor, ids: Tensor, topk_weights: Tensor) -> None:
    ranks = [RankTokens(x, ids, topk_weights)]
    (expected,) = mega_moe(ranks, layer.w13, layer.w2, activation="bf16", swiglu_limit=LIMIT)
    error = (y.float() - expected.float()).norm() / expected.float().norm()
    assert float(error) < BOUNDS["bf16"]


def _model(layer: Any) -> Any:
    def model(x: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
        return mega_moe_op(
            x + 0,
            *layer.weights,
            layer.buffer,
            topk_idx=ids,
            topk_weights=topk_weights,
            swiglu_limit=LIMIT,
        )

    return model


@pytest.mark.parametrize("count", [1, 7, MOST])
def test_the_operator(layer: Any, count: int) -> None:
    inputs = _tokens(count, seed=count)
    _assert_right(_model(layer)(*inputs), layer, *inputs)


# Of torch 2.11: an import of its own, and a capture with which it warms up.
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script_method.*:DeprecationWarning", "ignore:The CUDA Graph is empty"
)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model(layer: Any, mode: str) -> None:
    torch._dynamo.reset()
    model = torch.compile(_model(layer), fullgraph=True, mode=mode)
    for seed in range(4):  # CUDA graphs of "reduce-overhead" are recorded on the way
        inputs = _tokens(7, seed)
        _assert_right(model(*inputs).clone(), layer, *inputs)


def test_a_graph_takes_new_tokens(layer: Any) -> None:
    model, inputs = _model(layer), _tokens(7, seed=0)
    model(*inputs)  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(*inputs)
    for seed in range(1, 4):
        fresh = _tokens(7, seed)
        for static, tensor in zip(inputs, fresh, strict=True):
            static.copy_(tensor)
        y.fill_(float("nan"))
        graph.replay()
        _assert_right(y, layer, *fresh)


def test_vllms_hook(layer: Any) -> None:
    shape = SimpleNamespace(
        num_experts=TINY.num_experts,
        num_local_experts=TINY.num_experts,
        first_expert=0,
        top_k=TINY.num_topk,
        hidden_size=TINY.hidden,
        intermediate_size=TINY.intermediate,
        max_num_tokens=MOST,
        swiglu_limit=LIMIT,
        ep_size=1,
    )
    backend = MegaMoEBackend(shape, None)
    assert backend.supports(torch.cuda.get_device_capability(), shape) == (True, "")
    scale_2 = layer.w13.weight_scale_2.amax(1)
    w13 = SimpleNamespace(
        weight=layer.w13.weight, weight_scale=layer.w13.weight_scale, weight_scale_2=scale_2
    )
    w2 = SimpleNamespace(
        weight=layer.w2.weight,
        weight_scale=layer.w2.weight_scale,
        weight_scale_2=layer.w2.weight_scale_2[:, 0],
    )
    weights = backend.prepare_weights(w13, w2)
    inputs = _tokens(MOST, seed=1)
    y = backend.forward(*inputs, weights)
    both = torch.stack((scale_2, scale_2), 1)
    _assert_right(y, SimpleNamespace(w13=_with(layer.w13, both), w2=layer.w2), *inputs)


def _with(weights: Any, scale_2: Tensor) -> Any:
    return type(weights)(weights.weight, weights.weight_scale, scale_2, weights.input_scale)
