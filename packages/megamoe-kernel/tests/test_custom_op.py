"""The layer as an operator: the same numbers, eager and compiled; its schema tells the truth."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from megamoe_kernel import (
    BackendError,
    DtypeError,
    LayoutError,
    RoutingError,
    ShapeError,
    SymmBuffer,
    fp8_nvfp4_mega_moe,
    get_symm_buffer_for_nvfp4_mega_moe,
    mega_moe_op,
    prepare_inputs,
    transform_nvfp4_weights_for_mega_moe,
)
from megamoe_kernel.reference import Activation
from nvfp4_codec import quantize_fp8_block

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOPK, LIMIT = 5, 256, 128, 4, 2, 10.0


def _buffer(activation: Activation) -> SymmBuffer:
    return get_symm_buffer_for_nvfp4_mega_moe(
        num_experts=EXPERTS,
        num_max_tokens_per_rank=8,
        num_topk=TOPK,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        activation=activation,
    )


def _inputs(tokens: int = TOKENS, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOPK, -1).indices
    return x, ids, torch.rand(tokens, TOPK, generator=generator)


@pytest.fixture(scope="module", params=["nvfp4", "bf16"])
def case(request: pytest.FixtureRequest, make_layer: Any) -> Any:
    activation = request.param
    arch: Any = "sm_100a" if activation == "nvfp4" else "sm_90a"
    layer, extra = (
        make_layer(EXPERTS, HIDDEN, INTERMEDIATE),
        make_layer(1, HIDDEN, INTERMEDIATE, largest=3.0),
    )
    return SimpleNamespace(
        activation=activation,
        buffer=_buffer(activation),
        weights=transform_nvfp4_weights_for_mega_moe(layer.w13, layer.w2, arch=arch),
        shared=transform_nvfp4_weights_for_mega_moe(extra.w13, extra.w2, arch=arch),
    )


def _expected(case: Any, x: Tensor, ids: Tensor, topk_weights: Tensor, **options: Any) -> Tensor:
    buffer = _buffer(case.activation)
    prepare_inputs(x, buffer, topk_idx=ids, topk_weights=topk_weights)
    y = torch.empty(x.shape, dtype=torch.bfloat16)
    options = {"swiglu_limit": LIMIT, "backend": "reference", **options}
    fp8_nvfp4_mega_moe(y, *case.weights, buffer, activation=case.activation, **options)
    return y


class Model(nn.Module):
    """An operator before and after, two layers on one buffer."""

    def __init__(self, case: Any, **options: Any) -> None:
        super().__init__()
        self.case = case
        self.options = {"swiglu_limit": LIMIT, "backend": "reference", **options}

    def forward(self, x: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
        for _ in range(2):
            x = x + mega_moe_op(
                x * 0.5,
                *self.case.weights,
                self.case.buffer,
                topk_idx=ids,
                topk_weights=topk_weights,
                **self.options,
            )
        return x


def _two_layers(case: Any, x: Tensor, ids: Tensor, topk_weights: Tensor, **options: Any) -> Tensor:
    for _ in range(2):
        x = x + _expected(case, x * 0.5, ids, topk_weights, **options)
    return x


@pytest.mark.parametrize("with_shared", [False, True], ids=["routed", "shared"])
def test_it_is_the_two_functions(case: Any, with_shared: bool) -> None:
    shared = case.shared if with_shared else None
    model = Model(case, shared=shared)
    assert torch.equal(model(*_inputs()), _two_layers(case, *_inputs(), shared=shared))
    assert model(*_inputs(0)).shape == (0, HIDDEN)


@pytest.mark.parametrize("with_shared", [False, True], ids=["routed", "shared"])
def test_a_compiled_model_has_one_graph(case: Any, with_shared: bool) -> None:
    torch._dynamo.reset()
    shared = case.shared if with_shared else None
    counter = CompileCounterWithBackend("aot_eager")
    model = torch.compile(Model(case, shared=shared), backend=counter, fullgraph=True)
    for tokens in (5, 3, 8):
        inputs = _inputs(tokens, seed=tokens)
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 0)
        assert torch.equal(model(*inputs), _two_layers(case, *inputs, shared=shared))
    assert counter.frame_count == 1
    operators = [str(node.target) for node in counter.graphs[0].graph.nodes]
    assert sum("megamoe.nvfp4_mega_moe" in name for name in operators) == 2


def test_the_default_compiler(case: Any) -> None:
    torch._dynamo.reset()
    model = torch.compile(Model(case), fullgraph=True)
    inputs = _inputs()
    expected = _two_layers(case, *inputs)
    # Inductor keeps sums in float32 that eager rounds to BF16.
    y = model(*inputs)
    assert float((y - expected).float().norm() / expected.float().norm()) < 2**-7
    assert torch.equal(model(*inputs), y)


def test_the_schema_and_the_fake_are_true(case: Any) -> None:
    x, ids, topk_weights = _inputs()
    lists = [[w.weight, w.scale, w.alpha, w.input_scale] for w in case.weights]
    arguments = (
        torch.empty_like(x), x, None, ids, topk_weights, *lists, [], [],
        case.buffer.handle, LIMIT, "reference",
    )  # fmt: skip
    operator = torch.ops.megamoe.nvfp4_mega_moe
    found = torch.library.opcheck(operator, arguments)
    assert set(found.values()) == {"SUCCESS"}
    written = [
        argument.name for argument in operator.default._schema.arguments if argument.is_write
    ]
    assert written == ["y"]


def test_fp8_hidden_states_and_gradients(case: Any) -> None:
    x, ids, topk_weights = _inputs()
    fp8 = quantize_fp8_block(x, block=(1, 128), scale_fmt="fp32")
    routing: Any = {"topk_idx": ids.int(), "topk_weights": topk_weights, "backend": "reference"}
    y = mega_moe_op(fp8.weight, *case.weights, case.buffer, scales=fp8.weight_scale, **routing)
    decoded = fp8.weight.float() * fp8.weight_scale.repeat_interleave(128, 1)
    expected = mega_moe_op(decoded.requires_grad_(), *case.weights, case.buffer, **routing)
    assert torch.equal(y, expected)
    assert not expected.requires_grad


def _call(case: Any, **changes: Any) -> Tensor:
    x, ids, topk_weights = _inputs()
    arguments: dict[str, Any] = {
        "x": x, "l1_weights": case.weights[0], "l2_weights": case.weights[1],
        "sym_buffer": case.buffer, "topk_idx": ids, "topk_weights": topk_weights,
        "swiglu_limit": LIMIT, "backend": "reference", **changes,
    }  # fmt: skip
    return mega_moe_op(**arguments)


def test_calls_that_cannot_be(case: Any) -> None:
    x, ids, topk_weights = _inputs()
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"x": x[0]}, ShapeError, r"x is \(256,\), expected hidden states"),
        ({"x": [1.0]}, ShapeError, "x is list"),
        ({"x": x[:, :128]}, ShapeError, r"x has shape \(5, 128\)"),
        ({"x": x.repeat(2, 1)}, ShapeError, "x has 10 tokens, the buffer holds 8"),
        ({"x": x.int()}, DtypeError, "x is torch.int32"),
        ({"topk_idx": ids[:4]}, ShapeError, "topk_idx has shape"),
        ({"topk_weights": topk_weights.double()}, DtypeError, "topk_weights is torch.float64"),
        ({"topk_idx": ids + EXPERTS}, RoutingError, "expected 0 to 3"),
        ({"sym_buffer": case.buffer.x}, DtypeError, "sym_buffer is a Tensor"),
        ({"l1_weights": case.weights[1]}, LayoutError, "l1_weights was transformed as l2"),
        ({"shared": case.shared[0]}, LayoutError, "shared is no pair"),
        ({"shared": case.shared[::-1]}, LayoutError, "shared l1_weights was transformed as l2"),
        ({"backend": "auto"}, BackendError, "backend is 'auto'"),
        ({"backend": "kernel"}, BackendError, "there is no kernel for"),
    ]
    for changes, error, match in cases:
        with pytest.raises(error, match=match):
            _call(case, **changes)


def test_weights_of_another_architecture(make_layer: Any) -> None:
    layer = make_layer(EXPERTS, HIDDEN, INTERMEDIATE)
    l1, l2 = transform_nvfp4_weights_for_mega_moe(layer.w13, layer.w2, arch="sm_90a")
    x, ids, topk_weights = _inputs()
    with pytest.raises((LayoutError, DtypeError), match="sm_90a|scale is NoneType"):
        mega_moe_op(
            x, l1, l2, _buffer("nvfp4"), topk_idx=ids, topk_weights=topk_weights,
            backend="reference",
        )  # fmt: skip


def test_a_buffer_that_is_gone(case: Any) -> None:
    destroyed = _buffer(case.activation)
    destroyed.destroy()
    with pytest.raises(BackendError, match="the buffer was destroyed"):
        _call(case, sym_buffer=destroyed)
    gone = replace(case.buffer)
    handle = gone.handle
    assert handle != case.buffer.handle
    del gone
    gc.collect()
    x, ids, topk_weights = _inputs()
    lists = [[w.weight, w.scale, w.alpha, w.input_scale] for w in case.weights]
    with pytest.raises(BackendError, match=f"there is no buffer {handle}: it was freed"):
        torch.ops.megamoe.nvfp4_mega_moe(
            torch.empty_like(x), x, None, ids, topk_weights, *lists, [], [], handle, LIMIT,
            "reference",
        )  # fmt: skip


def test_tracing_refuses_what_shapes_tell(case: Any) -> None:
    torch._dynamo.reset()
    x, ids, topk_weights = _inputs()
    model = torch.compile(Model(case), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="x has width 128, the buffer 256"):
        model(x[:, :128], ids, topk_weights)
