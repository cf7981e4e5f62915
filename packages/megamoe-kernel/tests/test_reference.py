"""The reference against loops over single numbers, which share none of its code."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megamoe_kernel import (
    DtypeError,
    ExpertWeights,
    QuantizedTokens,
    RecipeError,
    RoutingError,
    ScaleError,
    ShapeError,
    quantize_tokens,
)
from megamoe_kernel.activations import unscaled_values
from megamoe_kernel.reference import (
    Activation,
    RankTokens,
    combine,
    linear1,
    linear2,
    mega_moe,
    round_hidden,
    run_expert,
    swiglu,
)
from nvfp4_codec import NonFiniteError

f32 = np.float32
ACTIVATIONS: tuple[Activation, ...] = ("nvfp4", "bf16")

# Everything from here to naive_layer is the oracle: formats from their definition, Python numbers.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
UE4M3 = [
    (code & 7) * 2.0**-9 if code < 8 else (8 + (code & 7)) * 2.0 ** ((code >> 3) - 10)
    for code in range(127)
]


def nearest(value: float, table: Sequence[float]) -> int:
    """The index of the nearest entry; a tie goes to the even index."""
    return min(range(len(table)), key=lambda i: (abs(table[i] - value), i % 2))


def to_bf16(value: float) -> float:
    (bits,) = struct.unpack("<I", struct.pack("<f", f32(value)))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    (rounded,) = struct.unpack("<f", struct.pack("<I", bits))
    return float(rounded)


def nvfp4_values(row: Sequence[float], scale: Any) -> list[float]:
    """E2M1 * block scale of a row that is quantized with a float32 scale."""
    values = []
    for start in range(0, len(row), 16):
        block = [f32(v) for v in row[start : start + 16]]
        largest = max(abs(v) for v in block)
        wanted = min(max(largest / (f32(6) * scale), f32(2.0**-9)), f32(448))
        block_scale = UE4M3[nearest(float(wanted), UE4M3)]
        for v in block:
            normalized = float(v / (f32(block_scale) * scale))
            magnitude = MAGNITUDES[nearest(abs(normalized), MAGNITUDES)]
            values.append(math.copysign(magnitude, normalized) * block_scale)
    return values


def stored_values(codes: Tensor, scales: Tensor) -> list[list[float]]:
    """E2M1 * block scale of packed rows."""
    rows = []
    for row, raw in zip(codes.tolist(), scales.view(torch.uint8).tolist(), strict=True):
        nibbles = [nibble for byte in row for nibble in (byte & 15, byte >> 4)]
        signed = [MAGNITUDES[n & 7] * (-1 if n & 8 else 1) for n in nibbles]
        rows.append([v * UE4M3[raw[k // 16]] for k, v in enumerate(signed)])
    return rows


def naive_hidden(
    x: Sequence[float], x_scale: float, w13: ExpertWeights, e: int, limit: float | None
) -> list[float]:
    """L1 and SwiGLU of one token and one expert."""
    rows = stored_values(w13.weight[e], w13.weight_scale[e])
    sums = [math.fsum(a * b for a, b in zip(x, row, strict=True)) for row in rows]
    alpha_gate, alpha_up = w13.weight_scale_2[e].tolist()
    h = []
    for j in range(len(rows) // 2):
        gate = sums[j] * (x_scale * alpha_gate)
        up = sums[len(rows) // 2 + j] * (x_scale * alpha_up)
        if limit is not None:
            gate = min(gate, limit)
            up = min(max(up, -limit), limit)
        h.append(gate / (1 + math.exp(-gate)) * up)
    return h


def naive_layer(
    tokens: RankTokens,
    w13: ExpertWeights,
    w2: ExpertWeights,
    limit: float | None,
    shared: tuple[ExpertWeights, ExpertWeights] | None,
) -> Tensor:
    if isinstance(tokens.x, QuantizedTokens):
        xs = stored_values(tokens.x.codes, tokens.x.block_scale)
        scales = tokens.x.scale.tolist()
    else:
        xs, scales = tokens.x.float().tolist(), [1.0] * tokens.num_tokens

    def visit(t: int, w13: ExpertWeights, w2: ExpertWeights, e: int) -> list[float]:
        h = naive_hidden(xs[t], scales[t], w13, e, limit)
        factor = w2.weight_scale_2[e, 0].item()
        if isinstance(tokens.x, QuantizedTokens):
            assert w2.input_scale is not None
            input_scale = w2.input_scale.item()
            h = nvfp4_values(h, f32(input_scale))
            factor = input_scale * factor
        else:
            h = [to_bf16(v) for v in h]
        rows = stored_values(w2.weight[e], w2.weight_scale[e])
        return [to_bf16(math.fsum(map(float.__mul__, h, row)) * factor) for row in rows]

    outputs = []
    for t in range(tokens.num_tokens):
        total = visit(t, *shared, 0) if shared else [0.0] * w2.rows
        for slot, e in enumerate(tokens.topk_idx[t].tolist()):
            if e >= 0:
                weight = tokens.topk_weights[t, slot].item()
                total = [a + weight * b for a, b in zip(total, visit(t, w13, w2, e), strict=True)]
        outputs.append([to_bf16(v) for v in total])
    return torch.tensor(outputs).to(torch.bfloat16)


def exact(y: Tensor) -> Tensor:
    return y.view(torch.int16)


def relative_error(y: Tensor, expected: Tensor) -> float:
    return float((y.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("limit", [None, 10.0, 0.25], ids=["no limit", "limit 10", "limit 0.25"])
@pytest.mark.parametrize("with_shared", [False, True], ids=["routed", "shared"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_loops_over_single_numbers(
    activation: Activation,
    with_shared: bool,
    limit: float | None,
    make_layer: Any,
    make_tokens: Any,
) -> None:
    layer = make_layer(4, 64, 32, gain=3.0)
    extra = make_layer(1, 64, 32, seed=1, largest=3.0)
    shared = (extra.w13, extra.w2) if with_shared else None
    tokens = make_tokens(5, 64, 4, 3, activation, masked=0.2)
    assert (tokens.topk_idx == -1).any()
    (y,) = mega_moe(
        [tokens],
        layer.w13,
        layer.w2,
        activation=activation,
        swiglu_limit=limit,
        shared=shared,
        accumulate=torch.float64,
    )
    expected = naive_layer(tokens, layer.w13, layer.w2, limit, shared)
    assert torch.equal(exact(y), exact(expected))
    assert y.float().abs().max() > 0.1


def test_combine_rounds_each_product_and_each_sum_to_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    slots = torch.randn(7, 3, 32, generator=generator).to(torch.bfloat16)
    weights = torch.rand(7, 3, generator=generator)
    weights[:, 1] = float("nan")  # beside -1: not read
    y = combine(slots, torch.tensor([[0, -1, 5]] * 7), weights)
    w, s = weights.numpy(), slots.float().numpy()
    expected = torch.from_numpy((w[:, :1] * s[:, 0]) + (w[:, 2:] * s[:, 2])).to(torch.bfloat16)
    assert torch.equal(exact(y), exact(expected))


def plain_layer(
    tokens: RankTokens, w13: ExpertWeights, w2: ExpertWeights, limit: float, fault: str = ""
) -> Tensor:
    """The layer as one would write it in float32, scales multiplied in early; with a fault."""

    def values(weights: ExpertWeights, e: int) -> Tensor:
        scale = weights.weight_scale_2[e].repeat_interleave(weights.rows // weights.num_parts)
        if fault == "alpha of gate for up":
            scale = weights.weight_scale_2[e, 0].expand(weights.rows)
        return unscaled_values(weights.weight[e], weights.weight_scale[e]).float() * scale[:, None]

    if isinstance(tokens.x, QuantizedTokens):
        scale = tokens.x.scale.mean() if fault == "one scale for all tokens" else tokens.x.scale
        x = tokens.x.unscaled().float() * scale.expand(tokens.num_tokens)[:, None]
    else:
        x = tokens.x.float()

    def hidden(h: Tensor) -> Tensor:
        if fault == "intermediate not rounded":
            return h
        rounded = (
            quantize_tokens(h) if fault == "scale per token" else round_hidden(h, tokens.x, w2)
        )
        if isinstance(rounded, QuantizedTokens):
            return rounded.unscaled().float() * rounded.scale[:, None]
        return rounded.float()

    y = torch.zeros(tokens.num_tokens, w2.rows)
    for e in range(w13.num_experts):
        token, slot = (tokens.topk_idx == e).nonzero(as_tuple=True)
        weight = tokens.topk_weights[token, slot, None]
        early = weight if fault == "weight before L2" else torch.ones_like(weight)
        gate, up = (x[token] @ values(w13, e).T).chunk(2, dim=-1)
        if fault == "gate and up swapped":
            gate, up = up, gate
        if fault != "no clamp":
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if fault == "gate clamped below":
            gate = gate.clamp(min=-limit)
        h = torch.nn.functional.silu(gate) * up * early
        result = (hidden(h) @ values(w2, e).T).to(torch.bfloat16).float()
        y.index_add_(0, token, result * (weight / early))
    return y.to(torch.bfloat16)


# What docs/kernel-contract.md asks of a backend.
GATES = {"nvfp4": 2e-3, "bf16": 1e-3}
LIMIT = 1.0


def _gated(make_layer: Any, make_tokens: Any, activation: Activation) -> tuple[Any, Any, Tensor]:
    layer = make_layer(8, 256, 128, gain=3.0)
    tokens = make_tokens(48, 256, 8, 2, activation)
    (y,) = mega_moe([tokens], layer.w13, layer.w2, activation=activation, swiglu_limit=LIMIT)
    return layer, tokens, y


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_plain_float32_layer_passes_the_gate(
    activation: Activation, make_layer: Any, make_tokens: Any
) -> None:
    layer, tokens, y = _gated(make_layer, make_tokens, activation)
    other = plain_layer(tokens, layer.w13, layer.w2, LIMIT)
    assert relative_error(other, y) < GATES[activation]
    (double,) = mega_moe(
        [tokens],
        layer.w13,
        layer.w2,
        activation=activation,
        swiglu_limit=LIMIT,
        accumulate=torch.float64,
    )
    assert relative_error(double, y) < GATES[activation]


@pytest.mark.parametrize(
    ("activation", "fault"),
    [
        *((a, f) for a in ACTIVATIONS for f in (
            "no clamp", "gate clamped below", "gate and up swapped", "alpha of gate for up",
            "intermediate not rounded", "weight before L2",
        )),
        ("nvfp4", "one scale for all tokens"),
        ("nvfp4", "scale per token"),
    ],
)  # fmt: skip
def test_a_wrong_layer_does_not_pass_the_gate(
    activation: Activation, fault: str, make_layer: Any, make_tokens: Any
) -> None:
    layer, tokens, y = _gated(make_layer, make_tokens, activation)
    other = plain_layer(tokens, layer.w13, layer.w2, LIMIT, fault)
    assert relative_error(other, y) > 2 * GATES[activation]


@pytest.mark.parametrize("accumulate", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_ranks_compute_what_one_rank_computes(
    activation: Activation, accumulate: torch.dtype, make_layer: Any, make_tokens: Any
) -> None:
    """A hot expert, empty experts, empty slots, a rank without tokens, a token without experts."""
    layer = make_layer(8, 64, 32)
    tokens = make_tokens(12, 64, 5, 3, activation, masked=0.3)  # experts 5 to 7 stay empty
    tokens.topk_idx[:, 0] = 2
    tokens.topk_idx[4] = -1
    options: Any = {"activation": activation, "swiglu_limit": 10.0, "accumulate": accumulate}
    (whole,) = mega_moe([tokens], layer.w13, layer.w2, **options)
    ranks = list(_split(tokens, [5, 0, 6, 1]))
    parts = mega_moe(ranks, layer.w13, layer.w2, **options)
    assert [part.shape for part in parts] == [(5, 64), (0, 64), (6, 64), (1, 64)]
    assert torch.equal(exact(torch.cat(parts)), exact(whole))
    assert not whole[4].any()
    assert whole[3].any()
    # Each token alone: nothing depends on the company.
    alone = [mega_moe([t], layer.w13, layer.w2, **options)[0] for t in _split(tokens, [1] * 12)]
    assert torch.equal(exact(torch.cat(alone)), exact(whole))


def _split(tokens: RankTokens, sizes: list[int]) -> Iterator[RankTokens]:
    start = 0
    for size in sizes:
        at = slice(start, start + size)
        x = tokens.x
        if isinstance(x, QuantizedTokens):
            x = QuantizedTokens(x.codes[at], x.block_scale[at], x.scale[at])
        else:
            x = x[at]
        yield RankTokens(x, tokens.topk_idx[at], tokens.topk_weights[at])
        start += size


def test_nobody_has_tokens(make_layer: Any, make_tokens: Any) -> None:
    layer = make_layer(4, 64, 32)
    ranks = [make_tokens(0, 64, 4, 2, "bf16")] * 2
    shared = make_layer(1, 64, 32, seed=1, largest=3.0)
    for extra in (None, (shared.w13, shared.w2)):
        parts = mega_moe(ranks, layer.w13, layer.w2, activation="bf16", shared=extra)
        assert [part.shape for part in parts] == [(0, 64), (0, 64)]


def test_a_token_without_experts_gets_the_shared_expert(make_layer: Any, make_tokens: Any) -> None:
    layer, shared = make_layer(4, 64, 32), make_layer(1, 64, 32, seed=1, largest=3.0)
    tokens = make_tokens(3, 64, 4, 2, "bf16")
    tokens.topk_idx[:] = -1
    tokens.topk_weights[:] = float("nan")
    (y,) = mega_moe(
        [tokens], layer.w13, layer.w2, activation="bf16", shared=(shared.gate_up, shared.down)
    )
    alone = run_expert(tokens.x, shared.w13, shared.w2, 0, None).to(torch.bfloat16)
    assert torch.equal(exact(y), exact(alone))


def test_an_expert_may_fill_two_slots(make_layer: Any, make_tokens: Any) -> None:
    layer = make_layer(2, 64, 32)
    tokens = make_tokens(3, 64, 2, 2, "bf16")
    tokens.topk_idx[:] = 1
    tokens.topk_weights[:] = torch.tensor([0.25, 0.5])
    (twice,) = mega_moe([tokens], layer.w13, layer.w2, activation="bf16")
    tokens.topk_idx[:, 0] = -1
    tokens.topk_weights[:, 1] = 0.75
    (once,) = mega_moe([tokens], layer.w13, layer.w2, activation="bf16")
    assert torch.equal(exact(twice), exact(once))


def test_the_stages_are_the_layer(make_layer: Any, make_tokens: Any) -> None:
    """What a kernel is debugged with: each stage by itself, L1_SCALE written out."""
    layer = make_layer(2, 64, 32)
    tokens = make_tokens(4, 64, 2, 1, "nvfp4")
    x = tokens.x
    gate, up = linear1(x, layer.w13, 1)
    sums = (
        x.unscaled() @ unscaled_values(layer.w13.weight[1], layer.w13.weight_scale[1]).T
    ).float()
    alpha = layer.w13.weight_scale_2[1].numpy()
    factor = x.scale.numpy()[:, None] * alpha[None]
    assert np.array_equal(gate.numpy(), sums[:, :32].numpy() * factor[:, :1])
    assert np.array_equal(up.numpy(), sums[:, 32:].numpy() * factor[:, 1:])
    hidden = round_hidden(swiglu(gate, up, 10.0), x, layer.w2)
    y = linear2(hidden, layer.w2, 1)
    assert torch.equal(y, run_expert(x, layer.w13, layer.w2, 1, 10.0))


def test_swiglu_clamps_gate_above_and_up_on_both_sides() -> None:
    big = torch.tensor([-50.0, -3.0, 0.0, 3.0, 50.0])
    h = swiglu(big, torch.full((5,), 99.0), 2.0)
    limited = torch.tensor([-50.0, -3.0, 0.0, 2.0, 2.0])
    assert torch.allclose(h, torch.nn.functional.silu(limited) * 2)
    assert h[0] != swiglu(torch.tensor(-2.0), torch.tensor(99.0), 2.0)
    assert torch.equal(swiglu(torch.tensor(1.0), torch.tensor(-99.0), 2.0),
                       -swiglu(torch.tensor(1.0), torch.tensor(99.0), 2.0))  # fmt: skip
    assert torch.equal(swiglu(big, big, None), big / (1 + (-big).exp()) * big)
    assert swiglu(torch.tensor(-200.0), torch.tensor(1.0), None) == 0  # exp overflows to inf


def test_the_results_do_not_depend_on_torchs_settings(make_layer: Any, make_tokens: Any) -> None:
    layer, tokens = make_layer(2, 64, 32), make_tokens(6, 64, 2, 1, "nvfp4")
    (expected,) = mega_moe([tokens], layer.w13, layer.w2, activation="nvfp4")
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    try:
        torch.set_float32_matmul_precision("medium")
        torch.set_default_dtype(torch.bfloat16)
        with torch.inference_mode():
            (y,) = mega_moe([tokens], layer.w13, layer.w2, activation="nvfp4")
            again = quantize_tokens(torch.ones(2, 64, dtype=torch.bfloat16))
        assert again.scale.dtype == torch.float32
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)
    assert torch.equal(exact(y), exact(expected))


@pytest.mark.parametrize("bad", [-2, 4, 1000])
def test_expert_ids_out_of_range_are_refused(bad: int, make_layer: Any, make_tokens: Any) -> None:
    layer, tokens = make_layer(4, 64, 32), make_tokens(3, 64, 4, 2, "bf16")
    tokens.topk_idx[1, 1] = bad
    with pytest.raises(RoutingError, match=f"rank 0 holds {bad}, expected 0 to 3, or -1"):
        mega_moe([tokens], layer.w13, layer.w2, activation="bf16")


def test_mismatches_are_refused(make_layer: Any, make_tokens: Any) -> None:
    layer, tokens = make_layer(4, 64, 32), make_tokens(3, 64, 4, 2, "bf16")
    other = make_layer(4, 64, 48)
    run: Any = lambda *ranks, w2=layer.w2, **options: mega_moe(  # noqa: E731
        ranks, layer.w13, w2, **{"activation": "bf16", **options}
    )
    with pytest.raises(ShapeError, match="4 experts of 64x64 and w2 4 of 64x48"):
        run(tokens, w2=other.w2)
    with pytest.raises(DtypeError, match="bfloat16, expected QuantizedTokens"):
        run(tokens, activation="nvfp4")
    with pytest.raises(DtypeError, match="the activation is 'fp8'"):
        run(tokens, activation="fp8")
    with pytest.raises(ShapeError, match="4 experts do not divide into 3 ranks"):
        run(tokens, tokens, tokens)
    with pytest.raises(ShapeError, match="no ranks"):
        run()
    for none_in_float32 in (0, 1e-60):
        with pytest.raises(RecipeError, match=f"swiglu_limit is {none_in_float32}"):
            run(tokens, swiglu_limit=none_in_float32)
    with pytest.raises(DtypeError, match="topk_weights of rank 0 is torch.float64"):
        run(replace(tokens, topk_weights=tokens.topk_weights.double()))
    with pytest.raises(ShapeError, match=r"topk_idx of rank 0 has shape \(3, 1\)"):
        run(replace(tokens, topk_idx=tokens.topk_idx[:, :1]))
    with pytest.raises(ShapeError, match=r"x of rank 0 has shape \(3, 32\)"):
        run(replace(tokens, x=tokens.x[:, :32]))
    q = quantize_tokens(tokens.x)
    for name, part in (("block_scale", q.block_scale[:, :2]), ("scale", q.scale[:2])):
        with pytest.raises(ShapeError, match=f"{name} of rank 0 has shape"):
            run(replace(tokens, x=replace(q, **{name: part})), activation="nvfp4")


def test_shared_is_one_expert_of_the_layers_hidden_size(make_layer: Any, make_tokens: Any) -> None:
    layer, tokens = make_layer(4, 64, 32), make_tokens(3, 64, 4, 2, "bf16")
    one, wide, long = make_layer(1, 64, 32), make_layer(1, 128, 32), make_layer(1, 64, 48)

    def run(shared: Any) -> Tensor:
        (y,) = mega_moe([tokens], layer.w13, layer.w2, activation="bf16", shared=shared)
        return y

    assert run((long.w13, long.w2)).shape == (3, 64)
    with pytest.raises(DtypeError, match=r"shared is a ExpertWeights, expected the pair"):
        run(one.w13)
    with pytest.raises(ShapeError, match="shared is 4 experts of hidden 64, expected one of"):
        run((layer.w13, layer.w2))
    with pytest.raises(ShapeError, match="shared is 1 experts of hidden 128, .* hidden 64"):
        run((wide.w13, wide.w2))
    with pytest.raises(ShapeError, match="shared: w13 is 1 experts of 64x64 and w2 1 of 64x48"):
        run((one.w13, long.w2))
    short = replace(
        one.w2, weight=one.w2.weight[:, :1], weight_scale=one.w2.weight_scale[:, :1]
    )  # would broadcast
    with pytest.raises(ShapeError, match="shared: .* and w2 1 of 1x32"):
        run((one.w13, short))


def test_arguments_of_other_kinds_are_refused(make_layer: Any, make_tokens: Any) -> None:
    layer, tokens = make_layer(4, 64, 32), make_tokens(3, 64, 4, 2, "bf16")
    run: Any = lambda ranks, **options: mega_moe(  # noqa: E731
        ranks, layer.w13, layer.w2, activation="bf16", **options
    )
    for dtype in (torch.float16, torch.bfloat16, torch.int32):
        with pytest.raises(DtypeError, match=f"accumulate is {dtype}, expected torch.float32"):
            run([tokens], accumulate=dtype)
    with pytest.raises(DtypeError, match="ranks is a RankTokens, expected a list"):
        run(tokens)
    with pytest.raises(DtypeError, match="rank 0 is a Tensor, expected RankTokens"):
        run([tokens.x])
    narrow = replace(
        tokens, topk_idx=tokens.topk_idx[:, :1], topk_weights=tokens.topk_weights[:, :1]
    )
    with pytest.raises(ShapeError, match="topk_idx of rank 1 has 1 slots, rank 0's has 2"):
        run([tokens, narrow])


def test_tokens_of_other_kinds_are_refused(make_layer: Any, make_tokens: Any) -> None:
    layer = make_layer(4, 64, 32)
    bf16, fp4 = (make_tokens(3, 64, 4, 2, activation) for activation in ("bf16", "nvfp4"))
    q = fp4.x
    cases: list[tuple[Any, type[Exception], str]] = [
        (replace(bf16, topk_idx=bf16.topk_idx.tolist()), DtypeError, "topk_idx of rank 0 is list"),
        (replace(bf16, topk_idx=bf16.topk_idx.bool()), DtypeError, "is torch.bool"),
        (replace(bf16, topk_weights=[[1.0]]), DtypeError, "topk_weights of rank 0 is list"),
        (replace(bf16, x=bf16.x.tolist()), DtypeError, "x of rank 0 is list"),
        (replace(bf16, x=bf16.x.float()), DtypeError, "x of rank 0 is torch.float32"),
        (replace(bf16, x=bf16.x.to_sparse()), DtypeError, "x of rank 0 is torch.sparse_coo"),
        (replace(bf16, x=bf16.x.to("meta")), ShapeError, "x of rank 0 is on meta, the weights on"),
        (replace(bf16, topk_idx=bf16.topk_idx.to("meta")), ShapeError, "topk_idx of rank 0 is on"),
        (replace(bf16, topk_weights=bf16.topk_weights.to("meta")), ShapeError, "topk_weights of"),
    ]
    for name, value, match in (
        ("codes", q.codes.view(torch.int8), "codes of rank 0 is torch.int8"),
        ("codes", q.codes.tolist(), "codes of rank 0 is list"),
        ("block_scale", q.block_scale.view(torch.uint8), "block_scale of rank 0 is torch.uint8"),
        ("block_scale", q.block_scale.float(), "block_scale of rank 0 is torch.float32"),
        ("scale", q.scale.double(), "scale of rank 0 is torch.float64"),
        ("scale", None, "scale of rank 0 is NoneType"),
    ):
        cases.append((replace(fp4, x=replace(q, **{name: value})), DtypeError, match))
    for tokens, error, match in cases:
        activation: Any = "nvfp4" if isinstance(tokens.x, QuantizedTokens) else "bf16"
        with pytest.raises(error, match=match):
            mega_moe([tokens], layer.w13, layer.w2, activation=activation)
    with pytest.raises(ShapeError, match="w13 is a meta tensor"):
        mega_moe([bf16], layer.w13.to("meta"), layer.w2.to("meta"), activation="bf16")


def test_what_the_intermediate_needs(make_layer: Any, make_tokens: Any) -> None:
    layer, tokens = make_layer(2, 64, 32), make_tokens(3, 64, 2, 1, "nvfp4")
    with pytest.raises(ScaleError, match=r"no input_scale.*l2_input_scale"):
        mega_moe([tokens], layer.w13, replace(layer.w2, input_scale=None), activation="nvfp4")
    tokens.x.scale[:] = float("inf")
    with pytest.raises(NonFiniteError):
        mega_moe([tokens], layer.w13, layer.w2, activation="nvfp4")
