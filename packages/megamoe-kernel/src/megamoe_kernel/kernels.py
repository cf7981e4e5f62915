"""Which kernels a layer needs on a GPU: what precompile compiles and verify loads."""

from __future__ import annotations

import torch

from .jit.compile import KernelSource
from .jit.targets import Target
from .models import MoEShape, local_experts
from .prepare_kernel import prepare_source


def kernels_of(shape: MoEShape, num_ranks: int, target: Target) -> list[KernelSource]:
    """The kernels of one layer at this expert parallelism, for one target.

    Raises ShapeError if the experts do not divide among the ranks.
    """
    local_experts(shape.num_experts, num_ranks)
    sources = [prepare_source(torch.bfloat16, shape.hidden)]
    return [source for source in sources if target in source.targets]
