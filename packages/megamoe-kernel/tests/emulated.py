"""Layers on emulated ranks: arguments for the C++ side, and results as tensors.

Loaded by the conftest files of host/ and emulator/, which differ in the kernel that runs and in how
its weights lie.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamoe_kernel import ExpertWeights, QuantizedTokens
from megamoe_kernel.failure import Failure, read_failure
from megamoe_kernel.reference import Activation, RankTokens, mega_moe


class Problem(ctypes.Structure):
    """``Problem`` of layout/problem.hpp."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            "num_ranks", "num_local_experts", "num_shared", "num_topk", "hidden", "intermediate",
            "ring_rows", "block_rows", "wave_blocks", "weight_rows",
        )
    ]  # fmt: skip


class Fault(ctypes.Structure):
    """``Fault`` of csrc/host/faults.hpp."""

    _fields_ = [(name, ctypes.c_int32) for name in ("kind", "field", "rank", "nth", "seen")]


class LayerRun(ctypes.Structure):
    """``LayerRun`` of csrc/host/layer_run.hpp."""

    _fields_ = [
        ("problem", Problem),
        *((name, ctypes.c_int32) for name in ("max_tokens", "num_ctas", "num_launches")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_float) for name in ("input_scale", "shared_input_scale", "limit")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "num_tokens", "x", "x_sf", "x_scale", "topk_idx", "topk_weights", "w13_codes",
                "w13_scales", "w13_alpha", "w2_codes", "w2_scales", "w2_alpha",
            )
        ),
        ("fault", Fault),
        *((name, ctypes.c_void_p) for name in ("output", "failure")),
    ]  # fmt: skip


FAULTS = ("", "drop signal", "double signal", "stale signal", "skip wait", "drop store",
          "weak signal")  # fmt: skip


@dataclass(frozen=True)
class Result:
    """outputs[launch][rank]; failures[rank]: what it gave up; message: why the run was stopped."""

    outputs: list[list[Tensor]]
    failures: list[Failure | None]
    message: str

    @property
    def ended_well(self) -> bool:
        return not self.message and not any(self.failures)


#: A layer's weights and those of its shared expert, to every rank's as LayerRun wants them: its
#: fields w13_codes, w13_scales, ... and tensors [ranks, ...], routed experts before the shared one.
Arrange = Callable[
    [ExpertWeights, ExpertWeights, tuple[ExpertWeights, ExpertWeights] | None, int],
    Mapping[str, Tensor],
]
#: Runs it: arguments, a buffer for the message and its size; see csrc/*/library.cpp.
Call = Callable[..., int]


def run_layer(
    library: ctypes.CDLL,
    call: Call,
    arrange: Arrange,
    launches: Sequence[Sequence[RankTokens]],
    w13: ExpertWeights,
    w2: ExpertWeights,
    activation: Activation,
    *,
    seed: int = 0,
    num_ctas: int = 3,  # odd, so that CTAs share the L1 tasks of a block
    limit: float | None = 10.0,
    shared: tuple[ExpertWeights, ExpertWeights] | None = None,
    ring_rows: int = 1024,
    block_rows: int = 16,
    wave_blocks: int = 2,
    weight_rows: int = 128,
    fault: tuple[str, str, int, int] | None = None,
) -> Result:
    """Run launches, each a list of every rank's tokens, through a kernel.

    library: has megamoe_field. fault: kind (of FAULTS), field, rank, which access.
    """
    num_ranks, hidden = len(launches[0]), w2.rows
    topk = launches[0][0].topk_idx.shape[1]
    everyone = [tokens for ranks in launches for tokens in ranks]
    max_tokens = max(1, *(tokens.num_tokens for tokens in everyone))
    kept: list[Tensor] = []

    def pointer(tensor: Tensor) -> int:
        kept.append(tensor.contiguous())
        return kept[-1].data_ptr()

    def padded(rows: Sequence[Tensor]) -> int:
        raw = [as_bytes(row) for row in rows]
        out = raw[0].new_zeros(len(raw), max_tokens, *raw[0].shape[1:])
        for to, row in zip(out, raw, strict=True):
            to[: row.shape[0]] = row
        return pointer(out)

    arguments = LayerRun(
        Problem(
            num_ranks, w13.num_experts // num_ranks, int(shared is not None), topk, hidden,
            w2.columns, ring_rows, block_rows, wave_blocks, weight_rows,
        ),
        max_tokens, num_ctas, len(launches), seed,
    )  # fmt: skip
    arguments.limit = float("inf") if limit is None else limit
    if w2.input_scale is not None:
        arguments.input_scale = float(w2.input_scale)
    if shared is not None and shared[1].input_scale is not None:
        arguments.shared_input_scale = float(shared[1].input_scale)
    counts = torch.tensor([tokens.num_tokens for tokens in everyone], dtype=torch.int32)
    arguments.num_tokens = pointer(counts)
    quantized = [t.x for t in everyone if isinstance(t.x, QuantizedTokens)]
    if activation == "nvfp4":
        arguments.x = padded([x.codes for x in quantized])
        arguments.x_sf = padded([x.block_scale for x in quantized])
        arguments.x_scale = padded([x.scale for x in quantized])
    else:
        arguments.x = padded([t.x for t in everyone if isinstance(t.x, Tensor)])
    arguments.topk_idx = padded([t.topk_idx.long() for t in everyone])
    arguments.topk_weights = padded([t.topk_weights for t in everyone])
    for name, tensor in arrange(w13, w2, shared, num_ranks).items():
        setattr(arguments, name, pointer(tensor))
    if fault is not None:
        kind, field, rank, nth = fault
        number = library.megamoe_field(field.encode())
        assert number >= 0, f"the buffer has no field {field}"
        arguments.fault = Fault(FAULTS.index(kind), number, rank, nth, 0)
    output = torch.full((len(everyone), max_tokens, hidden), float("nan")).bfloat16()
    failure = torch.zeros(num_ranks, 16, dtype=torch.int32)
    arguments.output, arguments.failure = output.data_ptr(), failure.data_ptr()
    message = ctypes.create_string_buffer(400)
    code = call(ctypes.byref(arguments), message, len(message))
    text = message.value.decode()
    assert code != 2, text
    rows = [y[:count] for y, count in zip(output, counts.tolist(), strict=True)]
    outputs = [rows[i : i + num_ranks] for i in range(0, len(rows), num_ranks)]
    return Result(outputs, [read_failure(words) for words in failure.tolist()], text)


def as_bytes(tensor: Tensor) -> Tensor:
    """One-byte numbers as uint8; others as they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def by_rank(routed: Tensor, extra: Tensor | None, num_ranks: int) -> Tensor:
    """[E, ...] to [ranks, E / ranks (+ 1), ...], the shared expert last on each."""
    parts = list(as_bytes(routed).chunk(num_ranks))
    if extra is not None:
        parts = [torch.cat([part, as_bytes(extra)]) for part in parts]
    return torch.stack(parts)


def compare(
    run: Callable[..., Any],
    launches: Sequence[Sequence[RankTokens]],
    layer: Any,
    activation: Activation,
    *,
    seeds: Sequence[int] = (0,),
    limit: float | None = 10.0,
    shared: Any = None,
    **tiling: int,
) -> None:
    """Run launches under some seeds and compare every rank's output with the reference's."""
    extra = None if shared is None else (shared.w13, shared.w2)
    expected = [
        mega_moe(
            ranks, layer.w13, layer.w2, activation=activation, swiglu_limit=limit, shared=extra
        )
        for ranks in launches
    ]
    for seed in seeds:
        result = run(launches, layer.w13, layer.w2, seed=seed, limit=limit, shared=extra, **tiling)
        assert result.ended_well, (result.message, result.failures)
        for got, want in zip(result.outputs, expected, strict=True):
            for rank_idx, (y, y_ref) in enumerate(zip(got, want, strict=True)):
                assert torch.equal(y, y_ref), f"rank {rank_idx} under seed {seed}"
