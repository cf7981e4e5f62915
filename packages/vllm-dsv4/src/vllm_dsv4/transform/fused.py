"""One weight_scale_2 and one input_scale for NVFP4 linears that vLLM runs as one.

vLLM keeps one weight_scale_2 of a fused pair, the larger, and leaves the block scales as they
are: the other half comes out scaled wrongly, and nothing fails. So both leave here with the
larger one, the other's block scales multiplied by the ratio and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from torch import Tensor

from nvfp4_codec.convert import UnifiedPart, rescale_weight_scale
from nvfp4_codec.errors import ScaleError

Scales = dict[str, Tensor]


def with_one_scale(
    scales: Mapping[str, Scales], weights: Mapping[str, Tensor]
) -> tuple[Mapping[str, Scales], tuple[UnifiedPart, ...]]:
    """The scales of a group of fused linears, made to agree; all by module.

    scales: of each module weight_scale, weight_scale_2 and input_scale. weights: the codes, as far
    as they are at hand; they only make the count of inexact blocks exact. A block whose scale
    would round to zero vanishes: it was below 2^-18 of the largest that the group can hold.
    Returns the same tensors, and an empty report, where they agree already. Raises ScaleError for a
    weight_scale_2 that is not positive and finite.
    """
    factors = {module: _factor(parts["weight_scale_2"], module) for module, parts in scales.items()}
    inputs = {module: float(parts["input_scale"]) for module, parts in scales.items()}
    agree = len(set(factors.values())) == 1
    if agree and len(set(inputs.values())) == 1:  # of most experts
        return scales, ()
    largest = max(factors, key=factors.__getitem__)
    input_scale = scales[max(inputs, key=inputs.__getitem__)]["input_scale"]
    made: dict[str, Scales] = {}
    report = []
    for module, parts in scales.items():
        scale = parts["weight_scale"]
        if not agree:
            scale, part = rescale_weight_scale(
                scale,
                Fraction(factors[module]) / Fraction(factors[largest]),
                weight=weights.get(module),
                underflow="zero",
            )
            report.append(part)
        made[module] = {
            "weight_scale": scale,
            "weight_scale_2": scales[largest]["weight_scale_2"],
            "input_scale": input_scale,
        }
    return made, tuple(report)


def _factor(scale_2: Tensor, module: str) -> float:
    value = float(scale_2)
    if not 0 < value < math.inf:
        raise ScaleError(
            f"weight_scale_2 of {module} is {value:g}; a positive finite number is needed. The "
            "tensor was not calibrated, or was all zero: quantize it again"
        )
    return value
