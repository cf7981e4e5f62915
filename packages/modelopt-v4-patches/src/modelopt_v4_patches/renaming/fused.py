"""Projections that loaders fuse must have one weight_scale_2; exports often give them two.

A loader keeps one of the two (vLLM 0.33: the larger, without touching the block scales), so the
other half of the fused matrix comes out scaled wrongly: nothing fails, the text is garbled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from nvfp4_codec import NVFP4Tensor, UnifiedPart, unify_weight_scale_2
from nvfp4_codec.checkpoint import Checkpoint, TensorInfo
from nvfp4_codec.checkpoint.families import pattern
from nvfp4_codec.checkpoint.header import shown
from nvfp4_codec.errors import CheckpointError, CodecError
from nvfp4_codec.schemas.deepseek_v4 import fused_with
from nvfp4_codec.schemas.deepseek_v4.recognize import Recognized


@dataclass(frozen=True)
class FusedGroup:
    """Official modules that are fused, and the weight_scale_2 of each."""

    modules: tuple[str, ...]
    scales: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Largest weight_scale_2 / smallest."""
        return max(self.scales) / min(self.scales)

    @property
    def kind(self) -> str:
        """What it is, indices left out: ``layers.*.ffn.experts.*.w1+w3``."""
        return "+".join((pattern(self.modules[0]), *(m.rsplit(".")[-1] for m in self.modules[1:])))


def fused_groups(source: Checkpoint, model: Recognized) -> Iterator[FusedGroup]:
    """All groups of two or more NVFP4 matrices that are fused; reads their weight_scale_2.

    Raises CheckpointError for a scale that is not positive and finite.
    """
    for module in sorted(model.quantized):
        modules = fused_with(module)
        present = tuple(m for m in modules if f"{m}.weight_scale_2" in model.tensors)
        if len(present) > 1 and module == present[0]:
            scales = tuple(_scale(source, model.tensors[f"{m}.weight_scale_2"]) for m in present)
            yield FusedGroup(present, scales)


def half_quantized(model: Recognized) -> tuple[str, ...]:
    """Modules stored unquantized although one that they are fused with is quantized."""
    return tuple(
        module for module in sorted(model.unquantized) if model.quantized & {*fused_with(module)}
    )


def with_one_scale(
    source: Checkpoint, tensors: Mapping[str, TensorInfo], modules: tuple[str, ...]
) -> tuple[list[NVFP4Tensor], list[UnifiedPart]]:
    """A group with one weight_scale_2, the largest, its block scales rounded to match.

    Codes stay. A block whose scale would round to zero vanishes: it was below 2^-18 of the largest
    value that the fused matrix can hold. Raises CheckpointError naming the tensor.
    """
    loaded = []
    for module in modules:
        names = (
            tensors[f"{module}.{p}"].name for p in ("weight", "weight_scale", "weight_scale_2")
        )
        weight, scale, scale_2 = (source.tensor(name) for name in names)
        loaded.append(NVFP4Tensor(weight, scale, scale_2.reshape(())))
    try:
        return unify_weight_scale_2(loaded, underflow="zero")
    except CodecError as error:
        info = tensors[f"{modules[0]}.weight"]
        raise CheckpointError(
            f"{error}. It is fused with {', '.join(map(shown, modules[1:]))}; quantize both again.",
            file=shown(info.file),
            tensor=shown(info.name),
        ) from None


def _scale(source: Checkpoint, info: TensorInfo) -> float:
    value = float(source.read(info.name).view(np.float32)[0])
    if not (math.isfinite(value) and value > 0):
        raise CheckpointError(
            f"weight_scale_2 is {value:g}; a positive finite number is needed. The tensor was not "
            "calibrated, or was all zero: quantize it again.",
            file=shown(info.file),
            tensor=shown(info.name),
        )
    return value
