"""Fitted factors: one for all values, one per half of the rows, one per block."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..blocks import as_blocks, expand_blocks
from .experiment import KnownScales, Trial, on_parts
from .readings import truncate_scales
from .subject import Subject

# Factors that have a name, besides the powers of two that a wrong bias gives.
_NAMED_FACTORS = {
    1.75: "448 / 256, the four-over-six recipe's normalization",
    2.0: "GGML's table holds doubled E2M1 values",
    4.0: "E8M0 bias 125 in place of 127",
    6.0: "E2M1's maximum",
    448.0: "E4M3's maximum",
    2688.0: "6 * 448",
}


def constant_factor(a: Subject, b: Subject, known: KnownScales) -> Iterator[Trial]:
    x, y = a.values, b.values
    if x.shape != y.shape:
        return
    factor = _fit(x, y)
    if factor is not None and factor != 1.0:
        yield Trial(x, y * factor, f"a = b * {factor:.6g}{_name_factor(factor, a, b, known)}")


def _name_factor(factor: float, a: Subject, b: Subject, known: KnownScales) -> str:
    candidates = dict(known)
    for side, subject in (("a", a), ("b", b)):
        if subject.parts is not None:
            candidates[f"{side}'s global scale"] = subject.parts.global_scale
            candidates[f"{side}'s global scale squared"] = subject.parts.global_scale**2
    candidates |= {text: value for value, text in _NAMED_FACTORS.items()}
    for name, value in candidates.items():
        if value not in (0.0, 1.0) and math.isfinite(value):
            if math.isclose(factor, value, rel_tol=1e-4):
                return f", which is {name}"
            if math.isclose(factor * value, 1.0, rel_tol=1e-4):
                return f", which is 1 / ({name})"
    return ""


def half_factors(a: Subject, b: Subject, _: KnownScales) -> Iterator[Trial]:
    x, y = a.values, b.values
    if x.shape != y.shape or x.shape[0] < 2 or x.shape[0] % 2:
        return
    half = x.shape[0] // 2
    top, bottom = _fit(x[:half], y[:half]), _fit(x[half:], y[half:])
    if top is not None and bottom is not None and not _close(top, bottom):
        found = torch.cat((y[:half] * top, y[half:] * bottom))
        yield Trial(x, found, f"a = b * {top:.6g} in the upper rows, * {bottom:.6g} in the lower")


def block_factors(a: Subject, b: Subject, _: KnownScales) -> Iterator[Trial]:
    for trial, _low, _high in _block_fits(a, b):
        yield trial


def _block_fits(a: Subject, b: Subject) -> Iterator[tuple[Trial, float, float]]:
    """For each usual block size, b times the best factor per block, if these factors vary."""
    x, y = a.values, b.values
    if x.shape != y.shape or x.ndim != 2 or a.raw is not None or b.raw is not None:
        return
    for block in ((128, 128), (1, 128), (1, 32), (1, 16)):
        if x.shape[0] <= block[0] and x.shape[1] <= block[1]:
            continue
        power = as_blocks(y.double().square(), block).sum((1, 3))
        product = as_blocks(x.double() * y.double(), block).sum((1, 3))
        # A scale is finite and positive: no other factor counts.
        fits = (power > 0) & (product > 0) & (product / power).isfinite()
        factors = torch.where(fits, product / power, 1.0)
        used = factors[fits]
        if not used.numel() or _close(float(used.min()), float(used.max()), 0.01):
            continue
        low, high = float(used.min()), float(used.max())
        found = y * expand_blocks(factors.float(), block, y.shape)
        size = f"{block[0]}x{block[1]}"
        yield Trial(x, found, f"factors {low:.4g}..{high:.4g} per {size} block"), low, high


def _fit(x: Tensor, y: Tensor) -> float | None:
    """The factor that brings y nearest to x, exact if it is almost a power of two.

    None if no finite positive factor does: no scale is anything else.
    """
    power = float(y.double().square().sum())
    factor = float((x.double() * y.double()).sum()) / power if power > 0 else math.nan
    if not 0 < factor < math.inf:
        return None
    nearest = 2.0 ** round(math.log2(factor))
    return nearest if _close(factor, nearest, 1e-5) else factor


def _close(x: float, y: float, tolerance: float = 1e-3) -> bool:
    return math.isclose(x, y, rel_tol=tolerance)


def truncated(a: Subject, b: Subject, known: KnownScales) -> Iterator[Trial]:
    yield from on_parts(truncate_scales)(a, b, known)
    for trial, low, high in _block_fits(a, b):
        if low >= 0.999 and high < 2.001:
            yield trial._replace(detail=f"b's scales lost their mantissas: {trial.detail}")
        if low > 0.4999 and high <= 1.001:
            yield trial._replace(detail=f"a's scales lost their mantissas: {trial.detail}")
