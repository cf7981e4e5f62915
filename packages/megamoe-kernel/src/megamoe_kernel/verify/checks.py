"""Comparisons with the reference. Each gives findings and raises for nothing that a kernel does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from ..activations import QuantizedTokens, quantize_tokens
from ..api import ACTIVATIONS, Backend, fp8_nvfp4_mega_moe, prepare_inputs
from ..buffer import SymmBuffer, get_symm_buffer_for_nvfp4_mega_moe
from ..errors import BackendError, LaunchError
from ..experts import ExpertWeights
from ..models import MoEShape
from ..reference import Activation, RankTokens, mega_moe
from ..scalar_kernel import run_scalar_layer
from ..weights import Arch, transform_nvfp4_weights_for_mega_moe, untransform_nvfp4_weights
from .cases import Case, random_weights
from .report import Finding

#: Relative error of the whole result, from docs/kernel-contract.md.
BOUNDS: dict[Activation, float] = {"nvfp4": 2e-3, "bf16": 1e-3}
SWIGLU_LIMIT = 10.0
_SEED = 20261130

#: Computes y from what is in the buffer; and what makes it of (w13, w2).
Run = Callable[[Tensor, SymmBuffer], None]
Load = Callable[[ExpertWeights, ExpertWeights], Run]


def check_prepare_inputs(
    device: torch.device, backend: Backend, cases: Iterable[tuple[int, int, torch.dtype]]
) -> Iterator[Finding]:
    """prepare_inputs against quantize_tokens, byte for byte; cases: (tokens, hidden, dtype)."""
    for tokens, hidden, dtype in cases:
        name = f"{tokens} x {hidden} {str(dtype).removeprefix('torch.')}"
        x = _awkward(_hidden_states(tokens, hidden, device)).to(dtype)
        buffer = get_symm_buffer_for_nvfp4_mega_moe(
            num_experts=1, num_max_tokens_per_rank=tokens + 1, num_topk=1, hidden=hidden,
            intermediate=128, activation="nvfp4", device=device,
        )  # fmt: skip
        _poison(buffer)
        try:
            prepare_inputs(x, buffer, backend=backend)
            wrong = _wrong_bytes(buffer, quantize_tokens(x))
        except LaunchError as error:
            yield Finding("prepare_inputs", name, "failed", note=str(error))
            continue
        yield Finding("prepare_inputs", name, "failed" if wrong else "passed", wrong, 0.0)
        buffer.destroy()


def check_transforms(device: torch.device, arch: Arch, shape: MoEShape) -> Finding:
    """transform_nvfp4_weights_for_mega_moe and back, bit for bit."""
    weights = random_weights(shape, device, _SEED)
    back = untransform_nvfp4_weights(*transform_nvfp4_weights_for_mega_moe(*weights, arch=arch))
    wrong = sum(_differing(a, b) for a, b in zip(back, weights, strict=True))
    name = f"{arch}, {shape.num_experts} experts {shape.hidden} x {shape.intermediate}"
    return Finding("transforms", name, "failed" if wrong else "passed", wrong, 0.0)


def public_layer(arch: Arch, backend: Backend = "kernel") -> Load:
    """fp8_nvfp4_mega_moe with weights transformed for this architecture."""

    def load(w13: ExpertWeights, w2: ExpertWeights) -> Run:
        l1, l2 = transform_nvfp4_weights_for_mega_moe(w13, w2, arch=arch)

        def run(y: Tensor, buffer: SymmBuffer) -> None:
            fp8_nvfp4_mega_moe(
                y, l1, l2, buffer, activation=ACTIVATIONS[arch], swiglu_limit=SWIGLU_LIMIT,
                backend=backend,
            )  # fmt: skip

        return run

    return load


def scalar_layer(w13: ExpertWeights, w2: ExpertWeights) -> Run:
    """The layer without tensor cores: what all architectures share, on this GPU."""

    def run(y: Tensor, buffer: SymmBuffer) -> None:
        run_scalar_layer(y, w13, w2, buffer, swiglu_limit=SWIGLU_LIMIT)

    return run


def check_layer(
    name: str, load: Load, activation: Activation, device: torch.device, cases: Sequence[Case]
) -> Iterator[Finding]:
    """A way to compute the layer against reference.mega_moe, case by case.

    Cases of one shape in a row share their weights.
    """
    for shape, group in groupby(cases, key=lambda case: case.shape):
        w13, w2 = random_weights(shape, device, _SEED)
        run = load(w13, w2)
        for case in group:
            x, ids, topk_weights = inputs_of(case, device)
            buffer = _buffer_of(case, activation, device)
            prepare_inputs(x, buffer, topk_idx=ids, topk_weights=topk_weights)
            # What a kernel forgets to write must not look right.
            y = torch.full_like(x, math.nan)
            try:
                run(y, buffer)
                failure = buffer.failure()
            except BackendError as error:
                yield Finding(name, "all cases", "absent", note=str(error))
                return
            except LaunchError as error:
                yield Finding(name, case.name, "failed", note=str(error))
                return  # the GPU's context may be lost
            if failure is not None:
                yield Finding(name, case.name, "failed", note=str(failure))
                continue
            tokens = RankTokens(
                quantize_tokens(x) if activation == "nvfp4" else x, ids, topk_weights
            )
            (expected,) = mega_moe(
                [tokens], w13, w2, activation=activation, swiglu_limit=SWIGLU_LIMIT
            )
            yield _compare(name, case.name, y, expected, BOUNDS[activation])
            buffer.destroy()


def inputs_of(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(x, topk_idx, topk_weights) of a case; BF16 hidden states of about unit size."""
    generator = torch.Generator(device).manual_seed(_SEED + case.tokens)
    x = _hidden_states(case.tokens, case.shape.hidden, device).to(torch.bfloat16)
    ids = case.routing(case.shape, case.tokens, generator)
    weights = torch.rand(ids.shape, generator=generator, device=device) + 0.1
    return x, ids, weights


def _compare(check: str, name: str, y: Tensor, expected: Tensor, bound: float) -> Finding:
    # All tokens as one vector: single elements near a rounding threshold may differ.
    if not y.numel():
        return Finding(check, name, "passed", 0.0, bound)
    difference = (y.double() - expected.double()).norm() / expected.double().norm()
    error = float(difference)
    if not math.isfinite(error):
        wrong = int((~y.isfinite()).sum())
        return Finding(check, name, "failed", None, bound, f"{wrong} values are not finite")
    return Finding(check, name, "passed" if error <= bound else "failed", error, bound)


def _buffer_of(case: Case, activation: Activation, device: torch.device) -> SymmBuffer:
    shape = case.shape
    return get_symm_buffer_for_nvfp4_mega_moe(
        num_experts=shape.num_experts, num_max_tokens_per_rank=max(case.tokens, 1),
        num_topk=shape.num_topk, hidden=shape.hidden, intermediate=shape.intermediate,
        activation=activation, device=device,
    )  # fmt: skip


def _hidden_states(tokens: int, hidden: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(_SEED + hidden)
    return torch.randn(tokens, hidden, generator=generator, device=device)


def _awkward(x: Tensor) -> Tensor:
    """Token 1 is zero, token 2 among float32's smallest numbers, token 3 has one outlier."""
    x[1:2] = 0
    x[2:3] *= 1e-38
    x[3:4, :1] = 3e4
    return x


def _poison(buffer: SymmBuffer) -> None:
    for name in ("x", "x_sf", "x_scale"):
        buffer.field(name).view(torch.uint8).fill_(0xA5)


def _wrong_bytes(buffer: SymmBuffer, expected: QuantizedTokens) -> int:
    """Bytes that differ in the tokens' rows, and bytes that changed behind them."""
    wrong = 0
    for name, tensor in (
        ("x", expected.codes),
        ("x_sf", expected.block_scale),
        ("x_scale", expected.scale.unsqueeze(1)),
    ):
        found = buffer.field(name).view(torch.uint8)
        tokens = tensor.shape[0]
        wrong += int((found[:tokens] != tensor.view(torch.uint8)).sum())
        wrong += int((found[tokens:] != 0xA5).sum())
    return wrong


def _differing(a: ExpertWeights, b: ExpertWeights) -> int:
    pairs = (
        (a.weight, b.weight),
        (a.weight_scale.view(torch.uint8), b.weight_scale.view(torch.uint8)),
        (a.weight_scale_2, b.weight_scale_2),
    )
    return sum(int((x != y).sum()) for x, y in pairs)
