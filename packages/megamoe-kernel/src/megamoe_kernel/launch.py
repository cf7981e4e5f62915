"""What the launches of whole layers share: sizes as constants, tilings, arguments, buffers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from .buffer import SymmBuffer
from .buffer_sizes import MAX_RANKS
from .jit.driver import LoadedKernel
from .models import MoEShape, local_experts

#: Nanoseconds after which a wait is given up.
WAIT_LIMIT = 20_000_000_000
_MOST_WAVE_BLOCKS = 16
_HOPPER_CTAS = 132  # of an H100 or H200; others only share out less well


def static_shape(
    shape: MoEShape,
    num_ranks: int,
    *,
    num_shared: int,
    ring_rows: int,
    ring_blocks: int,
    block_rows: int,
    weight_rows: int,
    num_ctas: int = _HOPPER_CTAS,
) -> str:
    """A layer's sizes and tiling as the type StaticShape of layout/problem.hpp.

    num_ctas: of a launch on the GPU that the kernel is meant for; on others it is right too.
    """
    constants = (
        num_ranks,
        local_experts(shape.num_experts, num_ranks),
        num_shared,
        shape.num_topk,
        shape.hidden,
        shape.intermediate,
        ring_rows,
        block_rows,
        _wave_blocks(ring_blocks // 2, 2 * shape.intermediate // weight_rows, num_ctas),
        weight_rows,
    )
    return f"megamoe::StaticShape<{listed(constants)}>"


def _wave_blocks(most: int, l1_tasks: int, num_ctas: int) -> int:
    """Blocks of a wave: at most ``most``, a block having l1_tasks of L1.

    Of those up to _MOST_WAVE_BLOCKS the one whose tasks share out best among the CTAs; else some
    have one more of the long tasks in every wave.
    """

    def idle(blocks: int) -> float:
        return -blocks * l1_tasks % num_ctas / (blocks * l1_tasks)

    return min(range(min(_MOST_WAVE_BLOCKS, most), 0, -1), key=idle)


#: kMostShared: of the 227 KiB that a CTA can have.
SHARED_BYTES = 226 * 1024


def bytes_beside_stages(
    block_rows: int, weight_rows: int, num_experts: int, local_experts: int
) -> int:
    """Shared memory of shared_memory.hpp: the epilogues' tile, the words of pool and routing."""
    tile = block_rows * (2 * weight_rows + 16)  # kTileRowPadding
    return tile + 4 * (5 * num_experts + 2 * local_experts + 8)


class _ForTokens(Protocol):
    @property
    def most(self) -> float:
        """Of tokens that an expert gets on average, where the tiling is used."""


_Tiling = TypeVar("_Tiling", bound=_ForTokens)


def tiling_of(fitting: Sequence[_Tiling], shape: MoEShape, tokens: int) -> _Tiling:
    """The tiling for tokens of all ranks, spread evenly over all experts; fitting: by `most`."""
    per_expert = tokens * shape.num_topk / shape.num_experts
    return next((tiling for tiling in fitting if per_expert <= tiling.most), fitting[-1])


#: With these fields end the arguments of the layers with tensor cores.
CALL_FIELDS = (
    ("limit", ctypes.c_float),
    ("num_tokens", ctypes.c_int),
    ("output", ctypes.c_void_p),
    ("rank_idx", ctypes.c_int),
    ("wait_limit", ctypes.c_uint64),
    ("padding", ctypes.c_ubyte * 64),  # the structs in C++ end at a multiple of 64
)


def set_call(
    arguments: ctypes.Structure,
    y: Tensor,
    sym_buffer: SymmBuffer,
    swiglu_limit: float | None,
    wait_limit: int,
) -> None:
    """Fill CALL_FIELDS and ``buffers``."""
    arguments.buffers = rank_buffers(sym_buffer)
    arguments.limit = clamp(swiglu_limit)
    arguments.num_tokens = y.shape[0]
    arguments.output = y.data_ptr()
    arguments.rank_idx = sym_buffer.rank_idx
    arguments.wait_limit = wait_limit


def launch_layer(
    kernel: LoadedKernel, arguments: ctypes.Structure, sym_buffer: SymmBuffer, ctas: int
) -> None:
    """One CTA on each multiprocessor, in whole clusters of ``ctas``."""
    count = torch.cuda.get_device_properties(sym_buffer.device).multi_processor_count
    grid = (count // ctas * ctas, 1, 1)
    kernel.launch(arguments, grid, shared_bytes=SHARED_BYTES, cluster=ctas, cooperative=True)


def listed(constants: tuple[int, ...]) -> str:
    """Template arguments."""
    return ", ".join(map(str, constants))


def clamp(swiglu_limit: float | None) -> float:
    """The limit as kernels take it: infinity for none."""
    return float("inf") if swiglu_limit is None else swiglu_limit


@cache
def rank_buffers_type(num_fields: int) -> type[ctypes.Structure]:
    """RankBuffers of layout/rank_buffers.hpp, with its BufferLayout in line."""
    fields = (
        ("offset", ctypes.c_uint64 * num_fields),
        ("shared_bytes", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("base", ctypes.c_uint64 * MAX_RANKS),
    )
    return type("RankBuffers", (ctypes.Structure,), {"_fields_": fields})


def rank_buffers(sym_buffer: SymmBuffer) -> ctypes.Structure:
    """The buffers of all ranks, as this one sees them."""
    layout, peers = sym_buffer.layout, sym_buffer.peers
    buffers = rank_buffers_type(len(layout.fields))()
    buffers.offset[:] = [row.offset for row in layout.fields.values()]
    buffers.shared_bytes, buffers.nbytes = layout.shared_bytes, layout.nbytes
    buffers.base[: len(peers)] = peers
    return buffers
