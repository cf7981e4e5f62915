"""What the launches of whole layers share: arguments, buffers, types of constants."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from .buffer import SymmBuffer
from .buffer_sizes import MAX_RANKS
from .jit.driver import LoadedKernel

#: Nanoseconds after which a wait is given up.
WAIT_LIMIT = 20_000_000_000

#: kMostShared: of the 227 KiB that a CTA can have.
SHARED_BYTES = 226 * 1024

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


def typed(template: str, constants: Sequence[int]) -> str:
    """A type of the headers: its template with these arguments."""
    return f"megamoe::{template}<{', '.join(map(str, constants))}>"


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
