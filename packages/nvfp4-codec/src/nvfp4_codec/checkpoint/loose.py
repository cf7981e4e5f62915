"""Tensors that are part of a quantized weight by name, whose other parts are missing.

No family is recognised then, so each part looks like a plain tensor that is in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from .families import FLOATS, Family, logical_shape
from .header import shown
from .reader import TensorInfo
from .structure import Problem

#: suffix of a scale -> suffixes of the weights it may belong to, and its dtypes (all if empty)
_SCALES: Final[tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]] = (
    (".weight_scale_2", (".weight", ".weight_packed", ""), ()),
    (".weight_global_scale", (".weight", ".weight_packed", ""), ()),
    (".weight_scale_inv", (".weight", ".weight_packed", ""), ()),
    (".weight_scale", (".weight", ".weight_packed", ""), ()),
    (".scale", (".weight", ""), ("F8_E8M0",)),
    ("_weight_scale_2", ("",), ()),
    ("_weight_global_scale", ("",), ()),
    ("_weight_scale_inv", ("",), ()),
    ("_weight_scale", ("",), ()),
    ("_scales", ("_blocks", ""), ("U8", "F8_E8M0", "F8_E4M3")),
)


def loose_problems(families: Iterable[Family]) -> Iterator[tuple[Family, Problem]]:
    """What is wrong with plain families that were meant to be part of a quantized weight.

    A weight that is absent is told once, at the first of its scales.
    """
    families = list(families)
    tensors = {info.name: info for family in families for info in family.members}
    # a quantizer of another kind keeps more tensors below the weight's own name
    parents = {name.rpartition(".")[0] for name in tensors}
    told: set[str] = set()
    for family in families:
        if family.kind != "plain":
            continue
        problem = _scale_alone(family.weight, tensors)
        if problem is not None:
            if problem.expected in told:
                continue
            told.add(problem.expected)
        if problem is None and family.weight.name not in parents:
            problem = _codes_alone(family.weight, tensors)
        if problem is not None:
            yield family, problem


def _scale_alone(info: TensorInfo, tensors: dict[str, TensorInfo]) -> Problem | None:
    for suffix, weights, dtypes in _SCALES:
        module = info.name.removesuffix(suffix)
        if module == info.name or (dtypes and info.dtype not in dtypes):
            continue
        if any(module + weight in tensors for weight in weights):
            return None
        return Problem(
            "missing-weight",
            "a scale whose weight is absent",
            " or ".join(shown(module + weight) for weight in weights[:2]),
            "Take the weight from the quantizer's output, or remove the scale.",
        )
    return None


def _codes_alone(info: TensorInfo, tensors: dict[str, TensorInfo]) -> Problem | None:
    """Packed E2M1 codes without a scale that could be theirs."""
    suffix = next(
        (s for s in (".weight_packed", ".weight", "_blocks") if info.name.endswith(s)), ""
    )
    if not suffix or info.dtype not in ("U8", "F4") or len(info.shape) < 2:
        return None
    shape = logical_shape(info)
    if shape[-1] % 16:
        return None
    module = info.name.removesuffix(suffix)
    scale = tensors.get(module + ("_scales" if suffix == "_blocks" else ".weight_scale"))
    if scale is None:
        return Problem(
            "missing-weight-scale",
            f"{info.dtype} codes and no block scale beside them",
            f"shape {[*shape[:-1], shape[-1] // 16]} for NVFP4",
            "Take it from the quantizer's output.",
        )
    is_global = any(f"{module}.{name}" in tensors for name in _GLOBALS)
    per_block = scale.shape in ((*shape[:-1], shape[-1] // n) for n in (16, 32))
    if scale.dtype in FLOATS and (is_global or per_block):
        return Problem(
            "scale-dtype",
            f"{shown(scale.name)} {scale.dtype}",
            "F8_E4M3, one per 16 values",
            "Loaders read E4M3 bytes: cast the scale back, or quantize the weight again.",
        )
    return None


_GLOBALS: Final = ("weight_scale_2", "weight_global_scale")
