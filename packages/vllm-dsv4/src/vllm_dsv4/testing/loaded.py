"""What the harness reports of a loaded model; read without vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class LoadedModel:
    """What loading left in one rank's model, before vLLM packs it for its kernels.

    parameters: by vLLM's names, on the CPU. loaded_counts: how often each was written, by name, or
    by ``name[shard]`` for each part of a fused one (``0``, ``1``; ``w1``, ``w2``, ``w3`` of an
    expert as ``[17.w1]``). quant_methods: vLLM's class for each layer that has one, and its kernel.
    class_name: of the model. other: what was asked for besides.
    """

    parameters: Mapping[str, Tensor]
    loaded_counts: Mapping[str, int]
    quant_methods: Mapping[str, str]
    class_name: str
    other: Mapping[str, Any] = field(default_factory=dict)
