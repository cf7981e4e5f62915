"""The whole layer on Blackwell (sm_100a), W4A4: its kernels and their launch.

Compiled for sm_100a, sm_100f and sm_103a, its machine code looked into, and run under the emulator;
never run on a GPU. See docs/blackwell.md.

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
from .jit.targets import Target, target_for
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
from .reference import required_input_scale
from .weights import MegaMoEWeights

TARGETS: tuple[Target, ...] = ("sm_100a", "sm_100f", "sm_103a")
_MMA_ROWS, _ROW_BYTES, _TOKEN_BOX_ROWS = 128, 128, 16  # kMmaRows, kSwizzleBytes, kTokenBoxRows


@dataclass(frozen=True)
class Tiling:
    """Sm100Choice of csrc/tilings.hpp.

    block_rows: tokens of a block. tiles: of 128 rows of weights in a task. ctas: 2 where pairs of
    CTAs multiply together.
    """

    block_rows: int
    tiles: int
    ctas: int = 1


@cache
def all_tilings() -> tuple[Tiling, ...]:
    """Every tiling but pairs, for ever more tokens."""
    with choosing():
        return tuple(Tiling(*row) for row in native.extension.sm100_tilings())


@cache
def pair_tilings() -> tuple[Tiling, ...]:
    """Pairs of CTAs. Only by ``tiling=``, until a GPU has said if they are right and faster."""
    with choosing():
        return tuple(Tiling(*row) for row in native.extension.sm100_pairs())


def tilings_of(shape: MoEShape) -> list[Tiling]:
    """Those whose tasks divide the layer's rows, for ever more tokens; the widest of its kind."""
    with choosing():
        return [Tiling(*row) for row in native.extension.sm100_fitting(astuple(shape))]


@cache
def tiling_for(shape: MoEShape, tokens: int) -> Tiling:
    """The tiling for a call: tokens of all ranks, spread evenly over all experts."""
    with choosing():
        return Tiling(*native.extension.sm100_tiling_for(astuple(shape), tokens))


def sm100_sources(shape: MoEShape, num_ranks: int, ring_rows: int) -> list[KernelSource]:
    """All kernels that calls of a layer without a shared expert may take."""
    return [sm100_source(shape, num_ranks, ring_rows, tiling) for tiling in tilings_of(shape)]


def sm100_source(
    shape: MoEShape, num_ranks: int, ring_rows: int, tiling: Tiling, num_shared: int = 0
) -> KernelSource:
    """The kernel for one layer's sizes and a tiling."""
    local_experts(shape.num_experts, num_ranks)
    with choosing():
        tile, sizes, threads = native.extension.sm100_constants(
            astuple(tiling), astuple(shape), num_ranks, num_shared, ring_rows
        )
    types = f"{typed('Sm100Tiling', tile)}, {typed('StaticShape', sizes)}"
    return KernelSource(
        name="sm100_layer",
        header="megamoe/impl/sm100.cuh",
        function=f"megamoe::sm100_layer<{types}>",
        arguments="megamoe::Sm100Arguments",
        threads=threads,
        targets=TARGETS,
        block_rows=tiling.block_rows,
    )


def run_sm100_layer(
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

    l1, l2: this rank's experts, for sm_100a. tiling: None: by the number of tokens. wait_limit:
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
    arguments = _arguments_type(len(sym_buffer.layout.fields))()
    for index, (name, columns) in enumerate(
        (("ring_x", shape.hidden), ("ring_h", shape.intermediate))
    ):
        arguments.token_maps[index] = _map(
            sym_buffer.address(name), ring_rows, columns, _TOKEN_BOX_ROWS
        )
    for index, weights in enumerate((l1, l2, *(shared or ()))):
        assert weights.scale is not None  # they are for sm_100a
        rows = weights.num_experts * weights.rows
        arguments.weight_maps[index] = _map(
            weights.weight.data_ptr(), rows, weights.columns, _MMA_ROWS
        )
        arguments.scales[index] = weights.scale.data_ptr()
        arguments.alphas[index] = weights.alpha.data_ptr()
    for index, down in enumerate((l2, *(shared or ())[1:])):
        arguments.input_scales[index] = required_input_scale(down.input_scale).data_ptr()
    set_call(arguments, y, sym_buffer, swiglu_limit, wait_limit)
    launch_layer(kernel, arguments, sym_buffer, tiling.ctas)


_TensorMap = ctypes.c_ubyte * TENSOR_MAP_BYTES


def _map(address: int, rows: int, columns: int, box_rows: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Packed codes, two a byte, in boxes of 256 columns."""
    return tensor_map(address, rows, columns // 2, box_rows, _ROW_BYTES, dtype=torch.uint8)


@cache
def _arguments_type(num_fields: int) -> type[ctypes.Structure]:
    """Sm100Arguments of impl/sm100.hpp. Of four: w13, w2, and the shared expert's."""
    fields = (
        ("token_maps", _TensorMap * 2),
        ("weight_maps", _TensorMap * 4),
        ("buffers", rank_buffers_type(num_fields)),
        ("scales", ctypes.c_void_p * 4),
        ("alphas", ctypes.c_void_p * 4),
        ("input_scales", ctypes.c_void_p * 2),
        *CALL_FIELDS,
    )
    return type("Sm100Arguments", (ctypes.Structure,), {"_fields_": fields})


@cache
def _load(
    shape: MoEShape,
    num_ranks: int,
    ring_rows: int,
    tiling: Tiling,
    num_shared: int,
    device: torch.device,
) -> LoadedKernel:
    source = sm100_source(shape, num_ranks, ring_rows, tiling, num_shared)
    target = target_for(torch.cuda.get_device_capability(device))
    assert target is not None  # buffers for kernels are on GPUs that have a target
    compiled = compile_kernel(source, target)
    return LoadedKernel(compiled.cubin, source.name, target, device, threads=source.threads)
