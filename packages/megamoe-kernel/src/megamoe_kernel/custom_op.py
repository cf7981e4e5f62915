"""The layer as one torch operator: for models under torch.compile and in CUDA graphs.

``torch.ops.megamoe.nvfp4_mega_moe`` writes y, which its schema says, and nothing else that a graph
can see: hidden states and routing go through a SymmBuffer, named by its handle, which is no input
of the graph. It must not be one: functionalization copies written inputs, and a copy is not
where peers look. So both halves, prepare_inputs and the layer, are one operator, and what one call
leaves in the buffer no other reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .api import (
    ACTIVATIONS,
    Backend,
    check_backend,
    check_buffer,
    check_is_pair,
    fp8_nvfp4_mega_moe,
    prepare_inputs,
)
from .buffer import SymmBuffer, find_buffer
from .errors import DtypeError, ShapeError
from .weights import Layer, MegaMoEWeights, check_layers

Pair = tuple[MegaMoEWeights, MegaMoEWeights]


def mega_moe_op(
    x: Tensor,
    l1_weights: MegaMoEWeights,
    l2_weights: MegaMoEWeights,
    sym_buffer: SymmBuffer,
    *,
    topk_idx: Tensor,
    topk_weights: Tensor,
    scales: Tensor | None = None,
    swiglu_limit: float | None = None,
    shared: Pair | None = None,
    backend: Backend = "kernel",
) -> Tensor:
    """prepare_inputs and fp8_nvfp4_mega_moe as one operator; returns bfloat16 ``[T, hidden]``.

    x, scales, topk_idx, topk_weights: as for prepare_inputs; the routing is required.
    l1_weights, l2_weights, shared, swiglu_limit, backend: as for fp8_nvfp4_mega_moe; the activation
    is the buffer's.
    sym_buffer: overwritten by each call. Calls that share it follow each other on one stream; the
        caller keeps it as long as graphs that were compiled or captured with it. For several ranks
        each call is collective: all make the same ones in the same order, with 0 tokens too.
    Traceable by torch.compile(fullgraph=True), with any number of tokens in one graph. CUDA graphs
    capture it once a call outside has compiled the kernels. Inference only: no gradient flows.
    Raises what the two functions raise: when the operator runs, or, where shapes and dtypes alone
    tell, when it is traced.
    """
    check_buffer(sym_buffer)
    check_layers(l1_weights, l2_weights)
    l1_shared: list[Tensor | None] = []
    l2_shared: list[Tensor | None] = []
    if shared is not None:
        check_is_pair(shared)
        check_layers(*shared, "shared ")
        l1_shared, l2_shared = _tensors(shared[0]), _tensors(shared[1])
    if not isinstance(x, Tensor) or x.ndim != 2:
        found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(f"x is {found}, expected hidden states [tokens, hidden]")
    y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    torch.ops.megamoe.nvfp4_mega_moe(
        y, x.detach(), scales, topk_idx, topk_weights,
        _tensors(l1_weights), _tensors(l2_weights), l1_shared, l2_shared,
        sym_buffer.handle, swiglu_limit, backend,
    )  # fmt: skip
    return y


def _run(
    y: Tensor,
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    l1: Sequence[Tensor | None],
    l2: Sequence[Tensor | None],
    l1_shared: Sequence[Tensor | None],
    l2_shared: Sequence[Tensor | None],
    buffer: int,
    swiglu_limit: float | None,
    backend: str,
) -> None:
    sym_buffer = find_buffer(buffer)
    chosen = check_backend(backend)
    shared: Pair | None = None
    if l1_shared:
        shared = _weights("l1", l1_shared, sym_buffer), _weights("l2", l2_shared, sym_buffer)
    prepare_inputs(
        x,
        sym_buffer,
        scales,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        backend="reference" if chosen == "reference" else None,
    )
    fp8_nvfp4_mega_moe(
        y,
        _weights("l1", l1, sym_buffer),
        _weights("l2", l2, sym_buffer),
        sym_buffer,
        activation=sym_buffer.activation,
        swiglu_limit=swiglu_limit,
        shared=shared,
        backend=chosen,
    )


def _trace(
    y: Tensor,
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    l1: Sequence[Tensor | None],
    l2: Sequence[Tensor | None],
    l1_shared: Sequence[Tensor | None],
    l2_shared: Sequence[Tensor | None],
    buffer: int,
    swiglu_limit: float | None,
    backend: str,
) -> None:
    """What tracing checks: nothing that would fix the number of tokens."""
    sym_buffer = find_buffer(buffer)
    check_backend(backend)
    if x.shape[1] != sym_buffer.hidden:
        raise ShapeError(f"x has width {x.shape[1]}, the buffer {sym_buffer.hidden}")
    if topk_idx.ndim != 2 or topk_idx.shape[1] != sym_buffer.num_topk:
        raise ShapeError(
            f"topk_idx has shape {tuple(topk_idx.shape)}, expected [tokens, {sym_buffer.num_topk}]"
        )
    if topk_weights.dtype != torch.float32:
        raise DtypeError(f"topk_weights is {topk_weights.dtype}, expected {torch.float32}")


_SCHEMA = (
    "(Tensor(a!) y, Tensor x, Tensor? scales, Tensor topk_idx, Tensor topk_weights, "
    "Tensor?[] l1, Tensor?[] l2, Tensor?[] l1_shared, Tensor?[] l2_shared, "
    "SymInt buffer, float? swiglu_limit, str backend) -> ()"
)
torch.library.custom_op(
    "megamoe::nvfp4_mega_moe", _run, mutates_args=("y",), schema=_SCHEMA
).register_fake(_trace)


def _tensors(weights: MegaMoEWeights) -> list[Tensor | None]:
    return [weights.weight, weights.scale, weights.alpha, weights.input_scale]


def _weights(
    layer: Layer, tensors: Sequence[Tensor | None], sym_buffer: SymmBuffer
) -> MegaMoEWeights:
    """Weights again, of the sizes that the buffer is for."""
    weight, scale, alpha, input_scale = tensors
    assert weight is not None and alpha is not None  # mega_moe_op's own lists  # noqa: PT018
    (arch,) = (
        arch for arch, activation in ACTIVATIONS.items() if activation == sym_buffer.activation
    )
    rows, columns = 2 * sym_buffer.intermediate, sym_buffer.hidden
    if layer == "l2":
        rows, columns = sym_buffer.hidden, sym_buffer.intermediate
    return MegaMoEWeights(layer, arch, rows, columns, weight, scale, alpha, input_scale)
