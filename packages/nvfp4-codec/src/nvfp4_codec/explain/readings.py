"""Misreadings: the order of elements, the direction of a scale, the format of its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..formats import as_bytes, decode_e4m3, e8m0_to_fp32, fp32_to_e8m0
from ..swizzle import SwizzledScale, swizzle_blockscale, unswizzle_blockscale
from .experiment import KnownScales, Trial, on_parts
from .subject import Parts, Subject, decode_raw


def swap_nibbles(subject: Subject) -> Iterator[tuple[Tensor, str]]:
    values = subject.values
    if values.shape[-1] % 2 == 0 and subject.raw is None:
        yield _grid(values, 2, 1).flip(-2).flatten(-3), "with its nibbles swapped"


def ggml_order(subject: Subject) -> Iterator[tuple[Tensor, str]]:
    values = subject.values
    for block in (32, 16):
        if values.shape[-1] % block or subject.raw is not None:
            continue
        halves = _grid(values, 2, block // 2).mT.flatten(-3)
        pairs = _grid(values, block // 2, 2).mT.flatten(-3)
        yield pairs, f"read as halves of {block} values (GGML)"
        yield halves, f"written as halves of {block} values (GGML)"


def transpose(subject: Subject) -> Iterator[tuple[Tensor, str]]:
    if subject.values.ndim == 2 and 1 not in subject.values.shape:
        yield subject.values.T, "transposed"


def drop_sign(subject: Subject) -> Iterator[tuple[Tensor, str]]:
    if bool((subject.values < 0).any()):
        yield subject.values.abs(), "without its signs"


def invert_global(parts: Parts) -> Iterator[tuple[Tensor, str]]:
    if parts.global_scale not in (0.0, 1.0):
        direction = "multiplied" if parts.divides else "divided"
        values = replace(parts, divides=not parts.divides).values()
        yield values, f"{direction} by its global scale {parts.global_scale:g}"


def drop_global(parts: Parts) -> Iterator[tuple[Tensor, str]]:
    if parts.global_scale != 1.0:
        values = replace(parts, global_scale=1.0).values()
        yield values, f"without its global scale {parts.global_scale:g}"


def _reorder_scales(parts: Parts) -> Iterator[tuple[Tensor, str]]:
    rows, cols = parts.raw_scale.shape
    if parts.scale_format == "float32" or parts.block[0] != 1:
        return
    if rows % 128 == 0 and cols % 4 == 0:
        linear = unswizzle_blockscale(SwizzledScale.wrap(parts.raw_scale, rows, cols))
        yield replace(parts, raw_scale=linear).values(), "with its scales unswizzled"
    swizzled = swizzle_blockscale(parts.raw_scale).data
    yield replace(parts, raw_scale=swizzled).values(), "with its scales swizzled (128x4)"


def _reorder_raw_scales(a: Subject, b: Subject, _: KnownScales) -> Iterator[Trial]:
    """Scale tensors on their own, of which one may be padded or flat."""
    for linear, other, names in ((a, b, "b holds a's"), (b, a, "a holds b's")):
        if linear.raw is None or other.raw is None:
            continue
        swizzled = decode_raw(swizzle_blockscale(linear.raw).data)
        if swizzled.numel() == other.values.numel():
            detail = f"{names} scales swizzled (128x4)"
            yield Trial(swizzled, other.values.reshape(swizzled.shape), detail)


def swizzled(a: Subject, b: Subject, known: KnownScales) -> Iterator[Trial]:
    yield from on_parts(_reorder_scales)(a, b, known)
    yield from _reorder_raw_scales(a, b, known)


def unit_scales(parts: Parts) -> Iterator[tuple[Tensor, str]]:
    ones = torch.ones_like(parts.scale)
    yield parts.values(ones), "with every block scale one"
    if parts.global_scale != 1.0:
        values = replace(parts, global_scale=1.0).values(ones)
        yield values, "with every block scale and the global scale one"


def swap_scale_format(subject: Subject) -> Iterator[tuple[Tensor, str]]:
    """E8M0 bytes read as E4M3, and the reverse."""
    parts, raw = subject.parts, subject.raw
    if parts is not None and parts.scale_format == "E8M0":
        yield parts.values(decode_e4m3(parts.raw_scale)), "with its E8M0 scales read as E4M3"
    elif parts is not None and parts.scale_format == "E4M3":
        yield parts.values(e8m0_to_fp32(parts.raw_scale)), "with its E4M3 scales read as E8M0"
    elif raw is not None:
        e4m3 = raw.dtype == torch.float8_e4m3fn
        other = (e8m0_to_fp32 if e4m3 else decode_e4m3)(as_bytes(raw)).reshape(subject.values.shape)
        yield other, f"read as {'E8M0' if e4m3 else 'E4M3'}"


def scale_as_integer(subject: Subject) -> Iterator[tuple[Tensor, str]]:
    parts, raw = subject.parts, subject.raw
    if parts is not None and parts.scale_format != "float32":
        values = parts.values(parts.raw_scale.float())
        yield values, f"with its {parts.scale_format} scale bytes taken for integers"
    elif raw is not None:
        yield as_bytes(raw).float().reshape(subject.values.shape), "its bytes taken for integers"


def shift_bias(subject: Subject) -> Iterator[tuple[Tensor, str]]:
    yield subject.values * 4, "times 4"
    yield subject.values / 4, "divided by 4"


def subnormal_scales_as_normal(parts: Parts) -> Iterator[tuple[Tensor, str]]:
    if parts.scale_format == "E4M3":
        byte = parts.raw_scale.int()
        normal = (1 + (byte & 7) / 8) * torch.exp2(((byte >> 3) & 15).float() - 7)
        scale = torch.where(byte & 0x7F == 0, 0.0, torch.where(byte > 127, -normal, normal))
        yield parts.values(scale), "with E4M3 subnormals and NaN decoded by the normal formula"


def truncate_scales(parts: Parts) -> Iterator[tuple[Tensor, str]]:
    if parts.scale_format == "float32":
        floor = e8m0_to_fp32(fp32_to_e8m0(parts.raw_scale, "floor"))
        yield parts.values(floor), "with only the exponents of its float32 scales"


def _grid(values: Tensor, rows: int, cols: int) -> Tensor:
    """Cut the last dimension into [..., rows, cols]."""
    return values.reshape(*values.shape[:-1], -1, rows, cols)
