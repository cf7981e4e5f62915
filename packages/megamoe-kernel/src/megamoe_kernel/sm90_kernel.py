"""The whole layer on Hopper (sm_90a), W4A16: its kernels and their launch.

One cooperative launch, one CTA on each multiprocessor. Which tiling suits a call, and the constants
of its kernel, are computed in C++ (csrc/tilings.hpp).
"""

from __future__ import annotations

import ctypes
from dataclasses import astuple, dataclass
from functools import cache

import torch
from torch import Tensor

from . import native
from .buffer import SymmBuffer
from .jit.compile import KernelSource, compile_kernel
from .jit.driver import TENSOR_MAP_BYTES, LoadedKernel, tensor_map
from .jit.targets import Target
from .launch import (
    CALL_FIELDS,
    WAIT_LIMIT,
    launch_layer,
    rank_buffers_type,
    set_call,
    typed,
)
from .models import MoEShape, local_experts
from .native import choosing
from .weights import MegaMoEWeights

TARGET: Target = "sm_90a"
_BOX_COLUMNS, _MAX_BOX_ROWS = 64, 16  # kBoxColumns, kMaxBoxRows


@dataclass(frozen=True)
class Tiling:
    """Sm90Choice of csrc/tilings.hpp: Sm90Tiling of the headers, and a block's tokens."""

    block_rows: int
    groups: int
    split: int
    depth: int
    tiles: int
    producer_registers: int
    consumer_registers: int
    least: int
    ctas: int = 1


@cache
def all_tilings() -> tuple[Tiling, ...]:
    """Every tiling, for ever more tokens."""
    with choosing():
        return tuple(Tiling(*row) for row in native.extension.sm90_tilings())


def tilings_of(shape: MoEShape) -> list[Tiling]:
    """Those whose tasks and stages divide the layer, for ever more tokens."""
    with choosing():
        return [Tiling(*row) for row in native.extension.sm90_fitting(astuple(shape))]


@cache
def tiling_for(shape: MoEShape, tokens: int) -> Tiling:
    """The tiling for a call: tokens of all ranks, spread evenly over all experts."""
    with choosing():
        return Tiling(*native.extension.sm90_tiling_for(astuple(shape), tokens))


def sm90_sources(shape: MoEShape, num_ranks: int, ring_rows: int) -> list[KernelSource]:
    """All kernels that calls of a layer without a shared expert may take."""
    return [sm90_source(shape, num_ranks, ring_rows, tiling) for tiling in tilings_of(shape)]


def sm90_source(
    shape: MoEShape, num_ranks: int, ring_rows: int, tiling: Tiling, num_shared: int = 0
) -> KernelSource:
    """The kernel for one layer's sizes and a tiling."""
    local_experts(shape.num_experts, num_ranks)
    with choosing():
        tile, sizes, threads = native.extension.sm90_constants(
            astuple(tiling), astuple(shape), num_ranks, num_shared, ring_rows
        )
    types = f"{typed('Sm90Tiling', tile)}, {typed('StaticShape', sizes)}"
    return KernelSource(
        name="sm90_layer",
        header="megamoe/impl/sm90.cuh",
        function=f"megamoe::sm90_layer<{types}>",
        arguments="megamoe::Sm90Arguments",
        threads=threads,
        targets=(TARGET,),
        block_rows=tiling.block_rows,
    )


def run_sm90_layer(
    y: Tensor,
    l1: MegaMoEWeights,
    l2: MegaMoEWeights,
    sym_buffer: SymmBuffer,
    *,
    swiglu_limit: float | None,
    shared: tuple[MegaMoEWeights, MegaMoEWeights] | None = None,
    tiling: Tiling | None = None,
    wait_limit: int = WAIT_LIMIT,
) -> None:
    """Write the layer's result for the tokens in the buffer to y, bfloat16 ``[T, hidden]``.

    l1, l2: this rank's experts, for sm_90a. tiling: None: by the number of tokens. wait_limit:
    nanoseconds after which a wait is given up; then y is unspecified and ``sym_buffer.failure``
    tells (see failure.py). Allocates nothing on the GPU and waits for nothing; the first call for
    sizes and a tiling compiles or loads the kernel.
    """
    shape, ring_rows = sym_buffer.shape, sym_buffer.layout.fields["ring_x"].rows
    if tiling is None:
        tiling = tiling_for(shape, y.shape[0] * sym_buffer.num_ranks)
    kernel = _load(
        shape, sym_buffer.num_ranks, ring_rows, tiling, int(shared is not None), sym_buffer.device
    )
    box_rows = _MAX_BOX_ROWS if tiling.block_rows % _MAX_BOX_ROWS == 0 else 8
    arguments = _arguments_type(len(sym_buffer.layout.fields))()
    for name, columns in (("ring_x", shape.hidden), ("ring_h", shape.intermediate)):
        encoded = tensor_map(sym_buffer.address(name), ring_rows, columns, box_rows, _BOX_COLUMNS)
        setattr(arguments, f"{name}_map", encoded)
    for index, weights in enumerate((l1, l2, *(shared or ()))):
        arguments.weights[index] = _Weights(weights.weight.data_ptr(), weights.alpha.data_ptr())
    set_call(arguments, y, sym_buffer, swiglu_limit, wait_limit)
    launch_layer(kernel, arguments, sym_buffer, tiling.ctas)


class _Weights(ctypes.Structure):
    """Sm90Weights of stages/sm90_pipeline.cuh."""

    _fields_ = (("tiles", ctypes.c_void_p), ("alpha", ctypes.c_void_p))


@cache
def _arguments_type(num_fields: int) -> type[ctypes.Structure]:
    """Sm90Arguments of impl/sm90.cuh."""
    tensor_map_bytes = ctypes.c_ubyte * TENSOR_MAP_BYTES
    fields = (
        ("ring_x_map", tensor_map_bytes),
        ("ring_h_map", tensor_map_bytes),
        ("buffers", rank_buffers_type(num_fields)),
        ("weights", _Weights * 4),
        *CALL_FIELDS,
    )
    return type("Sm90Arguments", (ctypes.Structure,), {"_fields_": fields})


@cache
def _load(
    shape: MoEShape,
    num_ranks: int,
    ring_rows: int,
    tiling: Tiling,
    num_shared: int,
    device: torch.device,
) -> LoadedKernel:
    source = sm90_source(shape, num_ranks, ring_rows, tiling, num_shared)
    compiled = compile_kernel(source, TARGET)
    return LoadedKernel(compiled.cubin, source.name, TARGET, device, threads=source.threads)
