"""Rounding differences: codes that are one step apart, and values rounded twice."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..formats import as_bytes, decode_e4m3, encode_e4m3
from .experiment import KnownScales, Trial
from .subject import Subject

MAX_SINGLE_STEPS = 0.25  # above this share it is no matter of a few ties


def single_steps(a: Subject, b: Subject, _: KnownScales) -> Iterator[Trial]:
    """Codes and scales that differ do so by one code of their format."""
    counts = []
    if not torch.equal(a.values.isfinite(), b.values.isfinite()):
        return  # from the largest number to NaN is one code, but no rounding
    if a.parts is not None and b.parts is not None:
        left, right = a.parts, b.parts
        same = (left.scale_format, left.block, left.global_scale, left.divides)
        if same != (right.scale_format, right.block, right.global_scale, right.divides):
            return
        element_bits = 8 if left.scale_format == "float32" or left.block[0] > 1 else 4
        pairs = [("codes", left.codes, right.codes, 1 << (element_bits - 1))]
        if left.scale_format != "float32":
            pairs.append(("scales", left.raw_scale, right.raw_scale, 128))
        elif not torch.equal(left.raw_scale, right.raw_scale):
            return
    elif a.raw is not None and b.raw is not None and a.raw.dtype == b.raw.dtype:
        pairs = [("scales", as_bytes(a.raw), as_bytes(b.raw), 128)]
    else:
        return
    for name, x, y, sign_bit in pairs:
        if x.shape != y.shape:
            return
        steps = (_signed_order(x, sign_bit) - _signed_order(y, sign_bit)).abs()
        if int(steps.max()) > 1 or float((steps > 0).float().mean()) > MAX_SINGLE_STEPS:
            return
        counts.append(f"{int((steps > 0).sum())} of {steps.numel()} {name}")
    yield Trial(a.values, a.values, f"{' and '.join(counts)} differ, each by one step")


def _signed_order(codes: Tensor, sign_bit: int) -> Tensor:
    """An integer that grows with the value; +0 and -0 are both 0."""
    magnitude = (codes & (sign_bit - 1)).int()
    return torch.where((codes & sign_bit) > 0, -magnitude, magnitude)


def double_rounding(a: Subject, b: Subject, _: KnownScales) -> Iterator[Trial]:
    """E4M3 bytes that come from unrounded values by way of bfloat16."""
    for source, coded, names in ((a, b, "b is a"), (b, a, "a is b")):
        if coded.raw is None or coded.raw.dtype != torch.float8_e4m3fn:
            continue
        if source.raw is not None or source.parts is not None:
            continue
        twice = decode_e4m3(encode_e4m3(source.values.bfloat16().float()))
        once = decode_e4m3(encode_e4m3(source.values))
        if not torch.equal(twice, once):
            yield Trial(coded.values, twice, f"{names} rounded to bfloat16, then to E4M3")
