"""One weight_scale_2 for projections that a runtime fuses (q/k/v, gate/up)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from ..errors import NonFiniteError, ScaleError, ShapeError
from ..formats import E4M3
from ..scales import BLOCK_SIZE
from ..tensors import GlobalScale, NVFP4Tensor, global_scale_value
from .inputs import nvfp4_bytes

_NUM_FINITE = E4M3.max_code + 1


@dataclass(frozen=True)
class UnifiedPart:
    """What a common weight_scale_2 cost one tensor.

    inexact_blocks: blocks (with a non-zero code and scale) whose scale had to be rounded.
    max_relative_error: the largest relative change of such a block's scale, hence of its values.
    """

    num_blocks: int
    inexact_blocks: int
    max_relative_error: float

    @property
    def exact(self) -> bool:
        return self.inexact_blocks == 0


def unify_weight_scale_2(
    tensors: Sequence[NVFP4Tensor],
) -> tuple[list[NVFP4Tensor], list[UnifiedPart]]:
    """Give fused tensors the largest of their global scales; rescale the block scales.

    The factor goes into each block's E4M3 scale, rounded once to nearest even: exact for a
    power of two unless the scale becomes subnormal. The codes are shared with the input, never
    rewritten. A non-zero scale never becomes zero, and none grows, so none saturates.
    Multipliers and Divisors may be mixed; the chosen scale keeps its type.
    Returns the tensors and a report for each. Raises NonFiniteError for NaN scale bytes,
    ScaleError for a global scale that is not positive and finite, ShapeError for no tensors.
    """
    if not tensors:
        raise ShapeError("found no tensors, expected at least one NVFP4Tensor")
    factors = [_exact_multiplier(t.weight_scale_2, i) for i, t in enumerate(tensors)]
    largest = max(range(len(tensors)), key=lambda i: factors[i])
    target = tensors[largest].weight_scale_2
    unified, reports = [], []
    for tensor, factor in zip(tensors, factors, strict=True):
        scale, report = _rescale(tensor, factor / factors[largest])
        unified.append(NVFP4Tensor(tensor.weight, scale, target, tensor.logical_k))
        reports.append(report)
    return unified, reports


def _exact_multiplier(scale: GlobalScale, index: int) -> Fraction:
    value, divides = global_scale_value(scale)
    if not 0 < value < math.inf:
        raise ScaleError(
            f"tensor {index} has the global scale {value!r}, expected a positive finite number"
        )
    return 1 / Fraction(value) if divides else Fraction(value)


def _rescale(tensor: NVFP4Tensor, ratio: Fraction) -> tuple[Tensor, UnifiedPart]:
    weight, scale = nvfp4_bytes(tensor.weight, tensor.weight_scale)
    num_nan = int(((scale & 0x7F) == 0x7F).sum())
    if num_nan:
        raise NonFiniteError(
            f"weight_scale has {num_nan} NaN bytes of {scale.numel()}, expected none; "
            "quantize this tensor again"
        )
    if ratio == 1:
        return tensor.weight_scale, UnifiedPart(scale.numel(), 0, 0.0)
    new_bytes, errors = _scale_map(ratio)
    used = (weight.view(-1, BLOCK_SIZE // 2) & 0x77 != 0).any(-1).view(scale.shape)
    error = errors.to(scale.device)[scale.int()] * used
    report = UnifiedPart(
        scale.numel(), int((error > 0).sum()), float(error.max() if error.numel() else 0)
    )
    return new_bytes.to(scale.device)[scale.int()].view(torch.float8_e4m3fn), report


def _scale_map(ratio: Fraction) -> tuple[Tensor, Tensor]:
    """For each E4M3 byte: the byte nearest to ratio (< 1) times it, and the relative error."""
    values = [Fraction(E4M3.value(code)) for code in range(_NUM_FINITE)]
    new_bytes, errors = list(range(256)), [0.0] * 256
    nearest = 1
    for code in range(1, _NUM_FINITE):
        wanted = ratio * values[code]
        while values[nearest + 1] <= wanted:
            nearest += 1
        below, above = wanted - values[nearest], values[nearest + 1] - wanted
        up = above < below or (above == below and nearest % 2 == 1)
        found = nearest + up
        for sign in (0, E4M3.sign_bit):
            new_bytes[sign + code] = sign + found
            errors[sign + code] = float(abs(values[found] - wanted) / wanted)
    return torch.tensor(new_bytes, dtype=torch.uint8), torch.tensor(errors, dtype=torch.float32)
