"""A MoE backend that computes the routed experts in plain torch; the tests install it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import silu

from nvfp4_codec import dequantize_nvfp4
from vllm_dsv4.moe_backend import ExpertWeights, MoEShape, Verdict


class Toy:
    """Takes all experts on one rank."""

    name = "toy"
    made: ClassVar[list[MoEShape]] = []

    def __init__(self, shape: MoEShape, process_group: object) -> None:
        self.shape = shape
        self.made.append(shape)

    def supports(self, capability: tuple[int, int], shape: MoEShape) -> Verdict:
        if shape.ep_size > 1:
            return Verdict(False, f"it has one rank, not {shape.ep_size}")
        return Verdict(capability >= (9, 0), f"compute capability {capability}")

    def prepare_weights(self, w13: ExpertWeights, w2: ExpertWeights) -> Any:
        return [self._values(w13), self._values(w2)]

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, weights: Any) -> Tensor:
        w13, w2 = weights
        limit = self.shape.swiglu_limit
        y = torch.zeros_like(x, dtype=torch.float32)
        for token, (ids, gates) in enumerate(zip(topk_ids, topk_weights, strict=True)):
            for expert, weight in zip(ids.tolist(), gates.tolist(), strict=True):
                gate, up = (w13[expert] @ x[token].float()).chunk(2)
                if limit is not None:
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                y[token] += weight * (w2[expert] @ (silu(gate) * up))
        return y.to(x.dtype)

    @staticmethod
    def _values(weights: ExpertWeights) -> list[Tensor]:
        parts = zip(weights.weight, weights.weight_scale, weights.weight_scale_2, strict=True)
        return [dequantize_nvfp4(*one, dtype=torch.float32) for one in parts]
