"""Block scales below E4M3's normal range, moved into it without changing a value."""

from __future__ import annotations

import math
from typing import Final

from torch import Tensor

#: The exponent of E4M3's least normal value, and its largest value.
NORMAL: Final = -6
_LARGEST: Final = 448.0


def lift(weight_scale: Tensor, weight_scale_2: Tensor) -> int:
    """Moves a power of two from weight_scale_2 to the block scales of experts with subnormal ones.

    weight_scale: E4M3 ``[experts, N, K/16]``; weight_scale_2: float32 ``[experts, ...]``. Both
    change in place and their product does not: the largest scale ends above 224 and none
    overflows. Returns the number of scales that are still subnormal.
    """
    left = 0
    for scale, scale_2 in zip(weight_scale, weight_scale_2, strict=True):
        values = scale.float()
        present = values > 0
        small = present & (values < 2.0**NORMAL)
        if not small.any():
            continue
        factor = 2.0 ** math.floor(math.log2(_LARGEST / float(values.max())))
        values *= factor
        scale.copy_(values)
        scale_2 /= factor
        left += int((present & (values < 2.0**NORMAL)).sum())
    return left
