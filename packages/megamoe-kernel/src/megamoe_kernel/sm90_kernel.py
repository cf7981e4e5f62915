"""The whole layer on Hopper (sm_90a), W4A16: which tiling suits a call, and its launch.

One cooperative launch, one CTA on each multiprocessor. The tiling depends on how many tokens an
expert gets on average: a block has room for most experts' tokens, so that weights are read once.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .buffer import SymmBuffer
from .jit.compile import KernelSource, compile_kernel
from .jit.driver import TENSOR_MAP_BYTES, LoadedKernel, tensor_map
from .jit.targets import Target
from .launch import (
    CALL_FIELDS,
    SHARED_BYTES,
    WAIT_LIMIT,
    bytes_beside_stages,
    launch_layer,
    listed,
    rank_buffers_type,
    set_call,
    static_shape,
    tiling_of,
)
from .layout_sm90 import TILE_BYTES, TILE_COLUMNS, TILE_ROWS
from .models import MoEShape, local_experts
from .weights import MegaMoEWeights

TARGET: Target = "sm_90a"
_WARPGROUP = 128
_BOX_COLUMNS, _MAX_BOX_ROWS = 64, 16  # kBoxColumns, kMaxBoxRows
_MOST_STAGES = 24


@dataclass(frozen=True)
class Tiling:
    """Sm90Tiling of stages/sm90_pipeline.cuh, and a block's tokens.

    most: of tokens that an expert gets on average, where it is used. The rest as in the header.
    """

    most: float
    block_rows: int
    groups: int
    split: int
    tiles: int
    producer_registers: int
    consumer_registers: int
    narrow: int = 0
    ctas: int = 1

    @property
    def weight_rows(self) -> int:
        return self.groups * self.tiles * TILE_ROWS

    @property
    def threads(self) -> int:
        return (1 + self.groups * self.split) * _WARPGROUP

    def stages(self, num_experts: int, experts: int) -> int:
        """As many as fit beside the epilogues' tile, the partial sums and the words."""
        beside = bytes_beside_stages(self.block_rows, self.weight_rows, num_experts, experts)
        partials = (self.split - 1) * self.weight_rows * self.block_rows * 4
        plan, alignment = 256, 128
        tiles = self.weight_rows // TILE_ROWS
        stage = self.split * (self.block_rows * 2 * TILE_COLUMNS + tiles * TILE_BYTES)
        left = SHARED_BYTES - beside - partials - plan - alignment
        return min(_MOST_STAGES, left // (stage + 16))


#: A launch's registers are shared by its threads when it starts, so what producers give up must be
#: what consumers take: (168 or 96) times the threads in all.
TILINGS = (
    Tiling(0, 16, 2, 1, 1, 56, 224),  # fits every layer, for those that no other fits
    Tiling(0.5, 8, 2, 2, 1, 64, 104),
    Tiling(1.5, 8, 4, 1, 1, 64, 104),
    Tiling(9, 16, 4, 1, 1, 64, 104, ctas=2),
    Tiling(22, 32, 4, 1, 1, 64, 104, ctas=2),
    Tiling(44, 48, 4, 1, 1, 64, 104, 32, ctas=2),
    Tiling(200, 128, 2, 1, 2, 56, 224, 80, ctas=2),
    Tiling(float("inf"), 128, 2, 1, 2, 56, 224, 112, ctas=2),
)


def tilings_of(shape: MoEShape) -> list[Tiling]:
    """Those whose tasks and stages divide the layer, for ever more tokens."""

    def fits(tiling: Tiling) -> bool:
        columns = tiling.split * TILE_COLUMNS
        sizes = (shape.hidden, shape.intermediate)
        return all(size % columns == 0 for size in sizes) and all(
            rows % (tiling.ctas * tiling.weight_rows) == 0
            for rows in (shape.hidden, 2 * shape.intermediate)
        )

    return [tiling for tiling in TILINGS if fits(tiling)]


def tiling_for(shape: MoEShape, tokens: int) -> Tiling:
    """The tiling for a call: tokens of all ranks, spread evenly over all experts."""
    return tiling_of(tilings_of(shape), shape, tokens)


def sm90_sources(shape: MoEShape, num_ranks: int, ring_rows: int) -> list[KernelSource]:
    """All kernels that calls of a layer without a shared expert may take."""
    return [sm90_source(shape, num_ranks, ring_rows, tiling) for tiling in tilings_of(shape)]


def sm90_source(
    shape: MoEShape, num_ranks: int, ring_rows: int, tiling: Tiling, num_shared: int = 0
) -> KernelSource:
    """The kernel for one layer's sizes and a tiling."""
    experts = local_experts(shape.num_experts, num_ranks)
    tile = (
        tiling.groups,
        tiling.split,
        tiling.tiles,
        tiling.narrow or tiling.block_rows,
        tiling.stages(shape.num_experts, experts),
        tiling.producer_registers,
        tiling.consumer_registers,
        tiling.ctas,
    )
    constants = static_shape(
        shape,
        num_ranks,
        num_shared=num_shared,
        ring_rows=ring_rows,
        ring_blocks=ring_rows // tiling.block_rows,
        block_rows=tiling.block_rows,
        weight_rows=tiling.weight_rows,
    )
    return KernelSource(
        name="sm90_layer",
        header="megamoe/impl/sm90.cuh",
        function=f"megamoe::sm90_layer<megamoe::Sm90Tiling<{listed(tile)}>, {constants}>",
        arguments="megamoe::Sm90Arguments",
        threads=tiling.threads,
        targets=(TARGET,),
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
