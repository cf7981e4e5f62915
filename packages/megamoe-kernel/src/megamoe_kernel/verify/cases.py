"""The problems that a layer is verified and timed on: random, never zero, and the awkward ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..experts import ExpertWeights
from ..models import MoEShape

#: One rank's experts of DeepSeek-V4-Pro at EP 8, of Flash at EP 8, and something tiny.
PRO = MoEShape(48, 6, 7168, 3072)
FLASH = MoEShape(32, 6, 4096, 2048)
TINY = MoEShape(8, 2, 512, 256)

Routing = Callable[[MoEShape, int, torch.Generator], Tensor]


@dataclass(frozen=True)
class Case:
    """A layer, a number of tokens, and which experts they ask for."""

    name: str
    shape: MoEShape
    tokens: int
    routing: Routing


def spread(shape: MoEShape, tokens: int, generator: torch.Generator) -> Tensor:
    """Every token picks different experts at random."""
    scores = torch.rand(tokens, shape.num_experts, generator=generator, device=generator.device)
    return scores.topk(shape.num_topk, -1).indices


def hot(shape: MoEShape, tokens: int, generator: torch.Generator) -> Tensor:
    """All tokens want expert 0 first; half of the experts get none."""
    half = MoEShape(max(shape.num_experts // 2, shape.num_topk), shape.num_topk, 0, 0)
    ids = spread(half, tokens, generator)
    ids[:, 0] = 0
    return ids


def masked(shape: MoEShape, tokens: int, generator: torch.Generator) -> Tensor:
    """A third of the slots is empty (-1), and the first token has no expert at all."""
    ids = spread(shape, tokens, generator)
    drawn = torch.rand(ids.shape, generator=generator, device=generator.device)
    ids[drawn < 1 / 3] = -1
    ids[:1] = -1
    return ids


CASES: tuple[Case, ...] = (
    *(Case(f"tiny, {n} tokens", TINY, n, spread) for n in (1, 2, 7, 33)),
    Case("tiny, no token", TINY, 0, spread),
    Case("tiny, hot expert", TINY, 64, hot),
    Case("tiny, empty slots", TINY, 64, masked),
    *(Case(f"Flash EP 8, {n} tokens", FLASH, n, spread) for n in (1, 19, 128)),
    Case("Flash EP 8, hot expert", FLASH, 128, hot),
    *(Case(f"Pro EP 8, {n} tokens", PRO, n, spread) for n in (1, 8, 64, 257)),
    Case("Pro EP 8, empty slots", PRO, 64, masked),
)


def random_weights(
    shape: MoEShape, device: torch.device | str, seed: int
) -> tuple[ExpertWeights, ExpertWeights]:
    """Random (w13, w2): all codes, ordinary block scales, global scales that differ."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=generator, dtype=torch.uint8, device=device)

    def experts(rows: int, columns: int, parts: int) -> ExpertWeights:
        count = shape.num_experts
        # Block scales from 1/2 to 2: values with a mean square of about 15, so that this global
        # scale keeps the size of what passes through. Times 4 in L1, to reach SwiGLU's clamp.
        scales = draw(0x30, 0x40, count, rows, columns // 16).view(torch.float8_e4m3fn)
        factors = torch.rand(count, parts, generator=generator, device=device) + 0.5
        factors *= 4 if parts == 2 else 1
        input_scale = torch.tensor(10.0**2 / 2688, device=device) if parts == 1 else None
        return ExpertWeights(
            draw(0, 256, count, rows, columns // 2),
            scales,
            factors / (15.0 * columns) ** 0.5,
            input_scale,
        )

    w13 = experts(2 * shape.intermediate, shape.hidden, 2)
    return w13, experts(shape.hidden, shape.intermediate, 1)
