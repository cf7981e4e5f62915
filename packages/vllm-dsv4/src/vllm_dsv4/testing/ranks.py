"""vLLM's process groups as one rank of several would see them, in a process of its own.

Building and loading a model asks its groups for sizes and ranks, and never communicates. So the
ranks of a deployment can be loaded one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import GroupCoordinator


class _Group(GroupCoordinator):
    """A group that knows its size and its rank; whatever communicates fails."""

    def __init__(self, world_size: int, rank: int) -> None:
        self.ranks = list(range(world_size))
        self.rank = self.rank_in_group = self.local_rank = rank
        self.world_size = world_size
        self.unique_name = f"simulated:{rank}/{world_size}"
        self.device = torch.device("cpu")
        self.device_group = self.cpu_group = None
        self.device_communicator = None
        self.use_device_communicator = False


@contextmanager
def simulated_rank(rank: int, tp: int, pp_rank: int = 0, pp: int = 1) -> Iterator[None]:
    """Within it vLLM believes to be this rank of a tensor-parallel group in a pipeline's stage.

    The expert-parallel group is the tensor-parallel one, as in vLLM without data parallelism.
    """
    alone, group = _Group(1, 0), _Group(tp, rank)
    groups = dict.fromkeys(("_DP", "_PCP", "_DCP", "_INNER_DP_WORLD"), alone)
    groups["_PP"] = _Group(pp, pp_rank)
    groups |= dict.fromkeys(("_TP", "_WORLD", "_EP", "_ETP", "_EPLB"), group)
    before = {name: getattr(parallel_state, name) for name in (*groups, "_NODE_COUNT")}
    try:
        for name, stand_in in groups.items():
            setattr(parallel_state, name, stand_in)
        parallel_state._NODE_COUNT = 1
        yield
    finally:
        for name, value in before.items():
            setattr(parallel_state, name, value)
