"""The mega-MoE layer in plain torch: the definition of correct for every backend.

A result is rounded at the points named below and nowhere else. Everything between two points is
exact, or rounded to float32 after each operation in the order written.

========  ==============================================================================
point     what is rounded
========  ==============================================================================
INPUT     hidden states to NVFP4 with a float32 scale per token ("nvfp4"), or to BF16 ("bf16")
L1_SUM    each dot product of L1 to float32: sum of x * w, both without their float32 scales
L1_SCALE  gate = sum * (x_scale * alpha_gate), up = sum * (x_scale * alpha_up), in float32
SWIGLU    h = gate / (1 + exp(-gate)) * up, after the clamp, in float32
HIDDEN    h to NVFP4 with the layer's one input_scale ("nvfp4"), or to BF16 ("bf16")
L2_SUM    each dot product of L2 to float32
L2_SCALE  sum * (input_scale * alpha) ("nvfp4"), sum * alpha ("bf16"), in float32
SLOT      the result of a token's expert to BF16: what an expert's rank sends back
COMBINE   the shared expert's slot, then topk_weight * slot for slot 0, 1, ...: float32, each
          product and each sum rounded
OUTPUT    the sum to BF16
========  ==============================================================================

A dot product is formed in float64 and rounded once: what a float32 accumulator approximates in
whatever order, and independent of TF32 settings. For "nvfp4" that sum is exact, because products of
E2M1 and UE4M3 are whole multiples of 2^-20, as long as their magnitudes add up to less than 2^33.
``accumulate=torch.float64`` leaves out the roundings to float32 (L1_SUM to SWIGLU, L2_SUM,
L2_SCALE, COMBINE) and keeps the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .activations import QuantizedTokens, quantize_intermediate, unscaled_values
from .errors import DtypeError, RecipeError, RoutingError, ScaleError, ShapeError
from .experts import (
    BLOCK_SIZE,
    W2,
    W13,
    ExpertWeights,
    as_w2,
    as_w13,
    check_dtype,
    check_shape,
    check_values,
)
from .weights import check_pair

Activation = Literal["nvfp4", "bf16"]
Tokens = QuantizedTokens | Tensor

NO_EXPERT = -1


@dataclass(frozen=True, eq=False)
class RankTokens:
    """What one rank brings: its tokens and where they go.

    x: QuantizedTokens (activation "nvfp4") or bfloat16 ``[T, hidden]`` ("bf16").
    topk_idx: int32 or int64 ``[T, k]``, global expert ids; -1 leaves a slot empty.
    topk_weights: float32 ``[T, k]``; what stands beside -1 is not read.
    """

    x: Tokens
    topk_idx: Tensor
    topk_weights: Tensor

    @property
    def num_tokens(self) -> int:
        return self.topk_idx.shape[0]


def mega_moe(
    ranks: Sequence[RankTokens],
    w13: W13,
    w2: W2,
    *,
    activation: Activation,
    swiglu_limit: float | None = None,
    shared: tuple[W13, W2] | None = None,
    accumulate: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Compute the layer for all ranks of an expert-parallel group, in one process.

    ranks: each rank's tokens; a rank may have none. Which rank owns an expert changes no result.
    w13, w2: all experts of the layer. shared: one more expert, (w13, w2), that every token visits
        on its own rank; its result is added without a weight. Its intermediate may differ.
    accumulate: float32, or float64 to leave out the roundings to float32.
    swiglu_limit: gate is limited to at most this, up to plus and minus this; None: no limit.
        DeepSeek-V4 has 10.
    Returns each rank's output, bfloat16 ``[T, hidden]``.
    Raises RoutingError for expert ids that do not exist, ScaleError for "nvfp4" without
    w2.input_scale, NonFiniteError (of nvfp4_codec) if the intermediate has NaN or Inf.
    """
    w13, w2 = as_w13(w13), as_w2(w2)
    check_pair(w13, w2)
    check_values("w13", w13.weight)
    check_limit(swiglu_limit)
    if accumulate not in (torch.float32, torch.float64):
        raise DtypeError(f"accumulate is {accumulate}, expected torch.float32 or torch.float64")
    if not isinstance(ranks, Sequence):
        raise DtypeError(f"ranks is a {type(ranks).__name__}, expected a list of RankTokens")
    if not ranks:
        raise ShapeError("there are no ranks, expected at least one")
    dense = None if shared is None else _check_shared(shared, w13)
    for rank_idx, tokens in enumerate(ranks):
        check_tokens(f"rank {rank_idx}", tokens, activation, w13)
        if tokens.topk_idx.shape[1] != ranks[0].topk_idx.shape[1]:
            raise ShapeError(
                f"topk_idx of rank {rank_idx} has {tokens.topk_idx.shape[1]} slots, rank 0's has "
                f"{ranks[0].topk_idx.shape[1]}; fill up with {NO_EXPERT}"
            )
    if w13.num_experts % len(ranks):
        raise ShapeError(f"{w13.num_experts} experts do not divide into {len(ranks)} ranks")

    # Dispatch and combine move bytes and round nothing, so ranks compute as one.
    everyone = _concatenate(ranks)
    shape = (*everyone.topk_idx.shape, w2.rows)
    slots = torch.zeros(shape, dtype=torch.bfloat16, device=w2.weight.device)
    for expert in range(w13.num_experts):
        token, slot = (everyone.topk_idx == expert).nonzero(as_tuple=True)
        if token.numel():
            x = _select(everyone.x, token)
            y = run_expert(x, w13, w2, expert, swiglu_limit, accumulate)
            slots[token, slot] = y.to(torch.bfloat16)  # SLOT
    extra = None
    if dense is not None and everyone.num_tokens:
        y = run_expert(everyone.x, *dense, 0, swiglu_limit, accumulate)
        extra = y.to(torch.bfloat16)  # SLOT
    y = combine(slots, everyone.topk_idx, everyone.topk_weights, extra, accumulate)
    return list(y.split([rank.num_tokens for rank in ranks]))


def run_expert(
    x: Tokens,
    w13: ExpertWeights,
    w2: ExpertWeights,
    expert: int,
    swiglu_limit: float | None,
    accumulate: torch.dtype = torch.float32,
) -> Tensor:
    """One expert's result for these tokens, ``[T, hidden]`` in the dtype accumulate."""
    gate, up = linear1(x, w13, expert, accumulate)
    h = swiglu(gate, up, swiglu_limit)
    return linear2(round_hidden(h, x, w2), w2, expert, accumulate)


def linear1(
    x: Tokens, w13: ExpertWeights, expert: int, accumulate: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Gate and up, ``[T, intermediate]`` each: L1_SUM and L1_SCALE."""
    sums = _dot(x, w13, expert).to(accumulate)
    alpha = w13.weight_scale_2[expert].to(accumulate)
    factor = alpha.expand(sums.shape[0], 2)
    if isinstance(x, QuantizedTokens):
        factor = x.scale.to(accumulate).unsqueeze(1) * alpha
    gate, up = sums.chunk(2, dim=-1)
    return gate * factor[:, :1], up * factor[:, 1:]


def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """``silu(gate) * up`` after the clamp: SWIGLU. The clamp of gate has no lower end."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1 + (-gate).exp()) * up


def round_hidden(h: Tensor, like: Tokens, w2: ExpertWeights) -> Tokens:
    """The intermediate in the format in which x came: HIDDEN."""
    if not isinstance(like, QuantizedTokens):
        return h.to(torch.bfloat16)
    return quantize_intermediate(h.float(), required_input_scale(w2.input_scale))


def linear2(
    h: Tokens, w2: ExpertWeights, expert: int, accumulate: torch.dtype = torch.float32
) -> Tensor:
    """The down projection, ``[T, hidden]``: L2_SUM and L2_SCALE."""
    factor = w2.weight_scale_2[expert].to(accumulate)
    if isinstance(h, QuantizedTokens):
        factor = required_input_scale(w2.input_scale).to(accumulate) * factor
    return _dot(h, w2, expert).to(accumulate) * factor


def combine(
    slots: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    shared: Tensor | None = None,
    accumulate: torch.dtype = torch.float32,
) -> Tensor:
    """Sum a rank's slots ``[T, k, hidden]`` by their weights: COMBINE and OUTPUT."""
    tokens, num_slots, hidden = slots.shape
    total = torch.zeros(tokens, hidden, dtype=accumulate, device=slots.device)
    if shared is not None:
        total = shared.to(accumulate)
    for slot in range(num_slots):
        product = topk_weights[:, slot, None].to(accumulate) * slots[:, slot].to(accumulate)
        used = (topk_idx[:, slot] != NO_EXPERT).unsqueeze(1)
        total = torch.where(used, total + product, total)
    return total.to(torch.bfloat16)


def check_limit(swiglu_limit: float | None) -> None:
    if swiglu_limit is None:
        return
    is_number = isinstance(swiglu_limit, int | float) and not isinstance(swiglu_limit, bool)
    limits = torch.finfo(torch.float32)
    if not is_number or not limits.smallest_normal <= swiglu_limit <= limits.max:
        raise RecipeError(
            f"swiglu_limit is {swiglu_limit}, expected a positive number (10 for DeepSeek-V4), or "
            "None for no clamp"
        )


def check_tokens(name: str, tokens: RankTokens, activation: str, w13: ExpertWeights) -> None:
    """Refuse tokens of another form than the activation's, and expert ids out of range."""
    if not isinstance(tokens, RankTokens):
        raise DtypeError(f"{name} is a {type(tokens).__name__}, expected RankTokens")
    device = w13.weight.device
    check_routing(name, tokens.topk_idx, tokens.topk_weights, w13.num_experts, device)
    count, hidden = tokens.num_tokens, w13.columns
    if activation == "nvfp4" and isinstance(tokens.x, QuantizedTokens):
        x = tokens.x
        blocks = (count, hidden // BLOCK_SIZE)
        _check(f"codes of {name}", x.codes, torch.uint8, (count, hidden // 2), device)
        _check(f"block_scale of {name}", x.block_scale, torch.float8_e4m3fn, blocks, device)
        _check(f"scale of {name}", x.scale, torch.float32, (count,), device)
    elif activation == "bf16" and isinstance(tokens.x, Tensor):
        _check(f"x of {name}", tokens.x, torch.bfloat16, (count, hidden), device)
    else:
        found = tokens.x.dtype if isinstance(tokens.x, Tensor) else type(tokens.x).__name__
        raise DtypeError(
            f"x of {name} is {found}, expected QuantizedTokens for activation 'nvfp4', bfloat16 "
            f"for 'bf16'; the activation is {activation!r}"
        )


def check_routing(
    name: str, topk_idx: Tensor, topk_weights: Tensor, num_experts: int, device: torch.device
) -> None:
    check_dtype(f"topk_idx of {name}", topk_idx, torch.int64, torch.int32)
    check_dtype(f"topk_weights of {name}", topk_weights, torch.float32)
    if topk_idx.ndim != 2 or topk_idx.shape != topk_weights.shape:
        raise ShapeError(
            f"topk_idx of {name} has shape {tuple(topk_idx.shape)} and topk_weights "
            f"{tuple(topk_weights.shape)}, expected [tokens, k] twice"
        )
    for part, tensor in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        _check_device(f"{part} of {name}", tensor, device)
    wrong = (topk_idx < NO_EXPERT) | (topk_idx >= num_experts)
    if bool(wrong.any()):
        raise RoutingError(
            f"topk_idx of {name} holds {int(topk_idx[wrong][0])}, expected 0 to {num_experts - 1}, "
            f"or {NO_EXPERT} for an empty slot"
        )


def _check(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    check_dtype(name, tensor, dtype)
    check_shape(name, tensor, shape)
    _check_device(name, tensor, device)


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ShapeError(f"{name} is on {tensor.device}, the weights on {device}")


def required_input_scale(input_scale: Tensor | None) -> Tensor:
    """The layer's L2 activation scale; ScaleError if it was never given."""
    if input_scale is None:
        raise ScaleError(
            "w2 has no input_scale, which activation 'nvfp4' needs to requantize the intermediate; "
            "export with calibration, or pass l2_input_scale to the transform "
            "(swiglu_limit^2 / 2688 covers everything that SwiGLU can produce)"
        )
    return input_scale


def _check_shared(
    shared: tuple[W13, W2], w13: ExpertWeights
) -> tuple[ExpertWeights, ExpertWeights]:
    """The shared expert's weights, stacked: one expert of the layer's hidden size and device."""
    if not isinstance(shared, tuple | list) or len(shared) != 2:
        raise DtypeError(f"shared is a {type(shared).__name__}, expected the pair (w13, w2)")
    gate_up, down = as_w13(shared[0]), as_w2(shared[1])
    try:
        check_pair(gate_up, down)
    except ShapeError as error:
        raise ShapeError(f"shared: {error}") from error
    if (gate_up.num_experts, gate_up.columns) != (1, w13.columns):
        raise ShapeError(
            f"shared is {gate_up.num_experts} experts of hidden {gate_up.columns}, expected one of "
            f"hidden {w13.columns}"
        )
    if gate_up.weight.device != w13.weight.device:
        raise ShapeError(f"shared is on {gate_up.weight.device}, w13 on {w13.weight.device}")
    return gate_up, down


def _dot(x: Tokens, weights: ExpertWeights, expert: int) -> Tensor:
    """Dot products of unscaled values in float64, ``[T, N]``."""
    values = x.unscaled() if isinstance(x, QuantizedTokens) else x.double()
    w = unscaled_values(weights.weight[expert], weights.weight_scale[expert])
    return values @ w.mT


def _concatenate(ranks: Sequence[RankTokens]) -> RankTokens:
    def cat(tensors: Sequence[Tensor]) -> Tensor:
        raw = [t.view(torch.uint8) if t.element_size() == 1 else t for t in tensors]
        return torch.cat(raw).view(tensors[0].dtype)

    xs = [rank.x for rank in ranks]
    x: Tokens
    if isinstance(xs[0], QuantizedTokens):
        quantized = [x for x in xs if isinstance(x, QuantizedTokens)]
        x = QuantizedTokens(
            cat([q.codes for q in quantized]),
            cat([q.block_scale for q in quantized]),
            cat([q.scale for q in quantized]),
        )
    else:
        x = cat([x for x in xs if isinstance(x, Tensor)])
    topk_idx = cat([rank.topk_idx.long() for rank in ranks])
    return RankTokens(x, topk_idx, cat([rank.topk_weights for rank in ranks]))


def _select(x: Tokens, token: Tensor) -> Tokens:
    if isinstance(x, QuantizedTokens):
        scale = x.block_scale.view(torch.uint8)[token].view(torch.float8_e4m3fn)
        return QuantizedTokens(x.codes[token], scale, x.scale[token])
    return x[token]
