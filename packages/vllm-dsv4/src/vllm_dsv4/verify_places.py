"""Where a checkpoint's linears lie in vLLM's model while it loads, for `verify` to read them there.

Every linear, and of each layer's routed experts the first one on this rank, in each of the three
classes that hold experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.deep_gemm_mega_moe import DeepGemmMegaMoEExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    RowParallelLinear,
)

from .kernel_experts import KernelExperts
from .transform.padding import padded_inner
from .weight_map import official_modules


@dataclass(frozen=True)
class Place:
    """Where a checkpoint's linear lies in the model.

    layer, module: vLLM's; rows: of its weight. dim: along which ranks split the linear, tp_size of
    them, this one being tp_rank. padded: to whole blocks. expert: its index among the local ones.
    prefix: of the parameters' names.
    """

    layer: str
    module: Any
    rows: slice
    dim: int
    tp_size: int
    tp_rank: int
    padded: bool = False
    expert: int | None = None
    prefix: str = ""

    def parameter(self, part: str) -> Tensor:
        """One part, of the whole layer or of the one expert."""
        data: Tensor = getattr(self.module, self.prefix + part).data
        return data if self.expert is None else data[self.expert]

    def share(self, full: Tensor) -> Tensor:
        """This rank's part of a matrix; beyond its end, where vLLM pads it, zeros."""
        if self.tp_size == 1:
            return full
        if self.padded:
            shape = list(full.shape)
            shape[self.dim] = padded_inner(shape[self.dim], self.tp_size) - shape[self.dim]
            full = torch.cat([full, full.new_zeros(shape)], self.dim)
        return full.chunk(self.tp_size, self.dim)[self.tp_rank]


@dataclass(frozen=True)
class _MegaMoEPlace(Place):
    """An expert in the layout of vLLM's MegaMoE kernel (vLLM 0.33.0: deep_gemm_mega_moe.py,
    ``DeepGemmMegaMoEExperts._kernel_layout_shard``), which is undone here.
    """

    def parameter(self, part: str) -> Tensor:
        """As the checkpoint has it: gate before up, scales one row for each row of the weight."""
        data = super().parameter(part)
        if part not in ("weight", "weight_scale"):
            return data
        rows = data.view(torch.uint8) if part == "weight" else _unpacked(data)
        if self.prefix == "w13_":  # gate and up in turns of eight rows
            rows = rows.unflatten(0, (-1, 2, 8)).transpose(0, 1).flatten(0, 2)
        return rows if part == "weight" else rows.view(torch.float8_e4m3fn)


def _unpacked(scale: Tensor) -> Tensor:
    """Scale bytes [N, K] of int32 [N, K/4], whose row 4 i + j of 128 is row 32 j + i."""
    packed = scale.contiguous().flatten().view(torch.uint8).reshape(len(scale), -1)
    rows: Tensor = packed.unflatten(0, (-1, 32, 4))
    return rows.transpose(1, 2).flatten(0, 2)


def linear_places(model: nn.Module, num_layers: int) -> Iterator[tuple[str, Place]]:
    for name, module in model.named_modules():
        if not isinstance(module, LinearBase):
            continue
        splits = isinstance(module, ColumnParallelLinear | RowParallelLinear)
        sizes = list(getattr(module, "output_partition_sizes", ())) or [module.output_size]
        start = 0
        for official, size in zip(official_modules(name, num_layers), sizes, strict=True):
            yield (
                official,
                Place(
                    layer=name,
                    module=module,
                    rows=slice(start, start + size),
                    dim=int(isinstance(module, RowParallelLinear)),
                    tp_size=module.tp_size if splits else 1,
                    tp_rank=module.tp_rank if splits else 0,
                    padded=".shared_experts." in name,
                ),
            )
            start += size


def expert_places(model: nn.Module, num_layers: int, inner: int) -> Iterator[tuple[str, Place]]:
    """The first expert on this rank of each layer, where it is NVFP4."""
    for name, module in model.named_modules():
        holds_experts = isinstance(module, RoutedExperts | DeepGemmMegaMoEExperts | KernelExperts)
        if not holds_experts or not hasattr(module, "w13_weight_scale_2"):
            continue
        (block,) = official_modules(name, num_layers)
        kind, tp_size, tp_rank = Place, 1, 0
        if isinstance(module, RoutedExperts):
            expert = 0 if module.expert_map is None else int((module.expert_map == 0).nonzero())
            ranks = module.moe_config.moe_parallel_config
            tp_size, tp_rank = ranks.tp_size, ranks.tp_rank
        else:  # never split, but by experts
            expert = module.experts_start_idx
            kind = Place if isinstance(module, KernelExperts) else _MegaMoEPlace
        own, half = inner // tp_size, module.w13_weight.shape[1] // 2
        for leaf, prefix, first, size in (
            ("w1", "w13_", 0, own),
            ("w3", "w13_", half, own),
            ("w2", "w2_", 0, module.w2_weight.shape[1]),
        ):
            yield (
                f"{block}.{expert}.{leaf}",
                kind(
                    layer=name,
                    module=module,
                    rows=slice(first, first + size),
                    dim=int(leaf == "w2"),
                    tp_size=tp_size,
                    tp_rank=tp_rank,
                    expert=0,
                    prefix=prefix,
                ),
            )
