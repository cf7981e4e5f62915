"""The stored input_scale of activations: a sane number, and one for what loaders fuse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from ..families import Family
from ..header import shown
from ..reader import Checkpoint, TensorInfo
from ..verify import Finding
from .stored import fault

#: An activation this large means an input_scale of another convention: its reciprocal, above all.
_LARGEST_ACTIVATION: Final = 1e6
#: Nor is the largest one this small: norms put out values near 1, and what lies between two
#: projections is far above it too. DeepSeek's own kernels take no amax below 1e-4.
_SMALLEST_ACTIVATION: Final = 1e-6
#: Above it activations would pass 1344, which norms and the clamped SwiGLU keep them well below.
_LARGEST_SCALE: Final = 0.5
AMAX_STORED: Final = "input-scale-is-amax"


def input_scale(source: Checkpoint, family: Family) -> tuple[TensorInfo, float] | None:
    """The family's input_scale, None if there is none that can be read."""
    info = next((e for e in family.extras if e.name.endswith("input_scale")), None)
    if info is None or (info.dtype, info.nbytes) != ("F32", 4):
        return None
    return info, float(source.read(info.name).view(np.float32)[0])


def check_input_scale(info: TensorInfo, value: float) -> list[Finding]:
    """What is wrong with one value; a stored amax can only be guessed."""
    amax = 2688 * value
    if not _sound(value):
        return [
            fault(
                info,
                "bad-input-scale",
                f"{value:g}",
                "a positive finite number",
                "The module was not calibrated: export with a snapshot, which has a fallback.",
            )
        ]
    expected = "amax / 2688 of the activations that calibration saw"
    if amax > _LARGEST_ACTIVATION:
        return [
            fault(
                info,
                "implausible-input-scale",
                f"{value:g}: activations up to {amax:.3g}",
                expected,
                "It looks like a reciprocal: store amax / 2688, which multiplies.",
                "high",
            )
        ]
    if amax < _SMALLEST_ACTIVATION:
        return [
            fault(
                info,
                "implausible-input-scale",
                f"{value:g}: activations up to {amax:.3g}, larger ones are clipped",
                expected,
                "It is damaged or was never calibrated: export with the snapshot again.",
                "high",
            )
        ]
    if value > _LARGEST_SCALE:
        return [
            fault(
                info,
                AMAX_STORED,
                f"{value:g}: activations up to {amax:.3g}",
                expected,
                "It looks like amax itself: divide by 2688, or export with the snapshot again.",
                "medium",
            )
        ]
    return []


def check_fused_input_scales(source: Checkpoint, group: Sequence[Family]) -> list[Finding]:
    """Whether weights that loaders fuse have one input_scale; ``group``: those weights."""
    found = []
    for family in group:
        read = input_scale(source, family) if family.kind == "nvfp4" else None
        if read is not None and _sound(read[1]):
            found.append(read)
    if len({value for _, value in found}) < 2:
        return []
    return [
        fault(
            found[0][0],
            "fused-input-scale-mismatch",
            ", ".join(f"{shown(info.name)}: {value:g}" for info, value in found),
            "one value: loaders fuse these projections and keep the larger input_scale",
            "Export again, which gives all of them the larger one.",
        )
    ]


def _sound(value: float) -> bool:
    return math.isfinite(value) and value > 0
