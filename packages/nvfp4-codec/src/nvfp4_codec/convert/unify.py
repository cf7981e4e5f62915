"""One weight_scale_2 for projections that a runtime fuses (q/k/v, gate/up)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from ..checks import check_choice
from ..errors import DtypeError, LosslessError, NonFiniteError, ScaleError, ShapeError
from ..formats import E4M3
from ..scales import BLOCK_SIZE
from ..tensors import NVFP4Tensor
from .inputs import exact_multiplier, nvfp4_bytes, nvfp4_tensor, refuse_nan_scales

UnderflowPolicy = Literal["error", "floor", "zero"]

_NUM_FINITE = E4M3.max_code + 1


@dataclass(frozen=True)
class UnifiedPart:
    """What a common weight_scale_2 cost one tensor.

    inexact_blocks: blocks (with a non-zero code and scale) whose scale had to be rounded.
    max_relative_error: the largest relative change of such a block's scale, hence of its values.
    underflowed_blocks: those of them whose scale would round to zero (see underflow there).
    """

    num_blocks: int
    inexact_blocks: int
    max_relative_error: float
    underflowed_blocks: int = 0

    @property
    def exact(self) -> bool:
        return self.inexact_blocks == 0


@dataclass(frozen=True)
class Unified:
    """What common weight_scale_2 cost many fused groups.

    groups: that had more than one. blocks, inexact_blocks, vanished_blocks: of these groups.
    max_relative_error: of a block's scale, hence of its values.
    """

    groups: int = 0
    blocks: int = 0
    inexact_blocks: int = 0
    vanished_blocks: int = 0
    max_relative_error: float = 0.0

    def plus(self, parts: Collection[UnifiedPart]) -> Unified:
        """With one more group."""
        return Unified(
            self.groups + 1,
            self.blocks + sum(part.num_blocks for part in parts),
            self.inexact_blocks + sum(part.inexact_blocks for part in parts),
            self.vanished_blocks + sum(part.underflowed_blocks for part in parts),
            max(self.max_relative_error, *(part.max_relative_error for part in parts)),
        )


def unify_weight_scale_2(
    tensors: Sequence[NVFP4Tensor], *, underflow: UnderflowPolicy = "error"
) -> tuple[list[NVFP4Tensor], list[UnifiedPart]]:
    """Give fused tensors the largest of their global scales; rescale the block scales.

    The ratio of the global scales (at most 1) goes into each block's E4M3 scale, rounded once
    to nearest even. That is exact for a power of two unless the scale becomes subnormal; it
    moves a block by at most 2^-4 while its scale stays normal, by up to a factor of two among
    the subnormals. No scale saturates. The codes are shared with the input, never rewritten.
    underflow: what to do with blocks that hold a non-zero value and whose scale would round to
        zero (at or below 2^-10, half of E4M3's smallest). "error" raises LosslessError;
        "floor" gives them the smallest scale 2^-9, so that their values grow, without bound as
        the ratio shrinks; "zero" gives them the scale zero, so that they vanish.
    Multipliers and Divisors may be mixed; the chosen scale keeps its type.
    Returns the tensors and a report for each. Raises NonFiniteError for NaN scale bytes,
    ScaleError for a global scale that is not positive or decodes to Inf, ShapeError for no
    tensors, DtypeError for anything but NVFP4Tensors.
    """
    check_choice("underflow", underflow, UnderflowPolicy)
    if not isinstance(tensors, Sequence):
        raise DtypeError(f"tensors is a {type(tensors).__name__}, expected a list of NVFP4Tensors")
    if not tensors:
        raise ShapeError("found no tensors, expected at least one NVFP4Tensor")
    for index, tensor in enumerate(tensors):
        nvfp4_tensor(tensor, f"tensor {index}")
    factors = [
        exact_multiplier(t.weight_scale_2, f"weight_scale_2 of tensor {i}")
        for i, t in enumerate(tensors)
    ]
    largest = max(range(len(tensors)), key=lambda i: factors[i])
    target = tensors[largest].weight_scale_2
    unified, reports = [], []
    for index, (tensor, factor) in enumerate(zip(tensors, factors, strict=True)):
        nvfp4_bytes(tensor.weight, tensor.weight_scale)  # for its checks
        try:
            scale, report = rescale_weight_scale(
                tensor.weight_scale,
                factor / factors[largest],
                weight=tensor.weight,
                underflow=underflow,
            )
        except (NonFiniteError, LosslessError) as error:
            raise type(error)(f"tensor {index}: {error}") from None
        unified.append(NVFP4Tensor(tensor.weight, scale, target, tensor.logical_k))
        reports.append(report)
    return unified, reports


def rescale_weight_scale(
    weight_scale: Tensor,
    ratio: Fraction,
    *,
    weight: Tensor | None = None,
    underflow: UnderflowPolicy = "error",
) -> tuple[Tensor, UnifiedPart]:
    """Block scales for a global scale that is larger: multiplied by ratio, rounded to nearest even.

    What `unify_weight_scale_2` does to each tensor, for loaders that see the scales without the
    codes. weight_scale: float8_e4m3fn. ratio: old / new global scale, above 0 and at most 1.
    weight: the codes; without them the report counts every block whose scale is not zero.
    Raises NonFiniteError for NaN scale bytes, LosslessError as underflow says, ScaleError for
    another ratio.
    """
    if not 0 < ratio <= 1:
        raise ScaleError(
            f"ratio is {float(ratio):.4g}, expected a number above 0 and at most 1: the common "
            "global scale is the largest"
        )
    scale = weight_scale.contiguous().view(torch.uint8)
    refuse_nan_scales(scale)
    if ratio == 1:
        return weight_scale, UnifiedPart(scale.numel(), 0, 0.0)
    new, errors, vanishing = _scale_map(ratio, floor=0 if underflow == "zero" else 1)
    counts = _counts(scale, weight, errors)
    num_underflowed = int(counts[vanishing].sum())
    if num_underflowed and underflow == "error":
        raise LosslessError(
            f"{num_underflowed} of {scale.numel()} blocks have a scale that "
            f"rounds to zero in E4M3 when multiplied by {float(ratio):.4g} (its weight_scale_2 / "
            "the largest one); quantize the tensors again with a common weight_scale_2, or pass "
            "underflow='floor' (these values grow) or underflow='zero' (they vanish)"
        )
    inexact = (errors > 0) & (counts > 0)
    report = UnifiedPart(
        scale.numel(),
        int(counts[inexact].sum()),
        float(errors[inexact].max()) if bool(inexact.any()) else 0.0,
        num_underflowed,
    )
    rescaled = new.to(scale.device)[scale.int()]
    return rescaled.view(torch.float8_e4m3fn).view(weight_scale.shape), report


def _counts(scale: Tensor, weight: Tensor | None, errors: Tensor) -> Tensor:
    """How many blocks with a non-zero code have each scale byte, on the CPU.

    Blocks are looked at only if some of their bytes cannot be kept: most ratios are exact.
    """
    flat = scale.flatten()
    counts = torch.bincount(flat, minlength=256).cpu()
    if weight is None or not bool(((errors > 0) & (counts > 0)).any()):
        return counts
    codes = weight.contiguous().view(torch.uint8)
    if codes.storage_offset() % 8 == 0:  # a block is one integer
        used = codes.view(-1).view(torch.int64) & 0x7777777777777777 != 0
    else:
        used = (codes.view(-1, BLOCK_SIZE // 2) & 0x77 != 0).any(-1)
    return torch.bincount(flat[used], minlength=256).cpu()


def _scale_map(ratio: Fraction, floor: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each E4M3 byte: the byte nearest to ratio (< 1) times it, but of magnitude floor at
    least; the relative error of that; whether the nearest is zero though the scale is not.
    """
    values = [Fraction(E4M3.value(code)) for code in range(_NUM_FINITE)]
    new_bytes, errors, vanishing = list(range(256)), [0.0] * 256, [False] * 256
    nearest = 0
    for code in range(1, _NUM_FINITE):
        wanted = ratio * values[code]
        while values[nearest + 1] <= wanted:
            nearest += 1
        below, above = wanted - values[nearest], values[nearest + 1] - wanted
        up = above < below or (above == below and nearest % 2 == 1)
        found = max(nearest + up, floor)
        for sign in (0, E4M3.sign_bit):
            new_bytes[sign + code] = sign + found
            errors[sign + code] = float(abs(values[found] - wanted) / wanted)
            vanishing[sign + code] = nearest + up == 0
    return (
        torch.tensor(new_bytes, dtype=torch.uint8),
        torch.tensor(errors, dtype=torch.float64),  # a floored scale may be off by 2^200
        torch.tensor(vanishing),
    )
