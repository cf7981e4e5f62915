"""Which kernels a layer needs on a GPU: what precompile compiles and verify loads."""

from __future__ import annotations

import torch

from .buffer_sizes import MOST_RING_ROWS
from .jit.compile import KernelSource
from .jit.targets import Target
from .models import MoEShape, local_experts
from .prepare_kernel import copy_source, prepare_source
from .sm90_kernel import sm90_sources
from .sm100_kernel import sm100_sources


def kernels_of(shape: MoEShape, num_ranks: int, target: Target) -> list[KernelSource]:
    """The kernels of one layer at this expert parallelism, for one target.

    A layer's kernel is compiled for the rows of its buffer's ring: here the most that a buffer has
    unless it is told otherwise, which it reaches at a few hundred tokens per rank. Raises
    ShapeError if the experts do not divide among the ranks.
    """
    local_experts(shape.num_experts, num_ranks)
    sources = [
        prepare_source(torch.bfloat16, shape.hidden),
        copy_source(torch.int64, shape.hidden, shape.num_topk),
        *sm90_sources(shape, num_ranks, MOST_RING_ROWS),
        *sm100_sources(shape, num_ranks, MOST_RING_ROWS),
    ]
    return [source for source in sources if target in source.targets]
