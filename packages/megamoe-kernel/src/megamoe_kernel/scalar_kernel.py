"""The whole layer as a kernel without tensor cores: the neutral stages on a GPU, for checking.

Routing, ring, gates, barriers, epilogues and combine are the code that every architecture's kernel
runs; only the sums are formed one by one. Far too slow to serve with.
"""

from __future__ import annotations

import ctypes
from dataclasses import astuple
from functools import cache

import torch
from torch import Tensor

from . import native
from .buffer import SymmBuffer
from .experts import ExpertWeights
from .jit.compile import KernelSource, compile_kernel
from .jit.driver import LoadedKernel
from .jit.targets import TARGETS, Target, target_for
from .launch import WAIT_LIMIT, clamp, rank_buffers, rank_buffers_type, typed
from .models import MoEShape, local_experts
from .native import choosing
from .reference import Activation, required_input_scale

BLOCK_ROWS = 16
WEIGHT_ROWS = 128
_THREADS = 96  # kThreads of impl/scalar.hpp


class _Weights(ctypes.Structure):
    """ScalarWeights of stages/scalar_mainloop.hpp."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("alpha", ctypes.c_void_p),
    )


class _Layer(ctypes.Structure):
    """ScalarLayer of impl/scalar.hpp."""

    _fields_ = (
        ("w13", _Weights),
        ("w2", _Weights),
        ("input_scale", ctypes.c_float),
        ("shared_input_scale", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("num_tokens", ctypes.c_int),
        ("output", ctypes.c_void_p),
    )


def scalar_source(
    shape: MoEShape, activation: Activation, num_ranks: int, ring_rows: int
) -> KernelSource:
    """The kernel for one layer's sizes; without a shared expert."""
    local_experts(shape.num_experts, num_ranks)
    with choosing():
        sizes = native.extension.scalar_constants(
            astuple(shape), num_ranks, ring_rows, activation == "nvfp4", BLOCK_ROWS, WEIGHT_ROWS
        )
    form = "Nvfp4" if activation == "nvfp4" else "Bf16"
    return KernelSource(
        name="scalar_layer",
        header="megamoe/impl/scalar.cuh",
        function=f"megamoe::scalar_layer<megamoe::{form}, {typed('StaticShape', sizes)}>",
        arguments="megamoe::ScalarArguments",
        threads=_THREADS,
        targets=TARGETS,
    )


def run_scalar_layer(
    y: Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    sym_buffer: SymmBuffer,
    *,
    swiglu_limit: float | None,
    num_ctas: int | None = None,
    wait_limit: int = WAIT_LIMIT,
) -> None:
    """Write the layer's result for the tokens in the buffer to y, bfloat16 ``[T, hidden]``.

    w13, w2: this rank's experts in reading order, before any transform. num_ctas: all of them must
    run at once; None: one on each multiprocessor. wait_limit: nanoseconds after which a wait is
    given up; then y is unspecified and ``sym_buffer.failure`` tells (see failure.py).
    """
    device, activation = sym_buffer.device, sym_buffer.activation
    ring_rows = sym_buffer.layout.fields["ring_x"].rows
    kernel = _load(sym_buffer.shape, activation, sym_buffer.num_ranks, ring_rows, device)
    layer = _Layer(
        _pointers(w13),
        _pointers(w2),
        float(required_input_scale(w2.input_scale)) if activation == "nvfp4" else 0.0,
        0.0,
        clamp(swiglu_limit),
        y.shape[0],
        y.data_ptr(),
    )
    arguments = _arguments_type(len(sym_buffer.layout.fields))()
    arguments.buffers = rank_buffers(sym_buffer)
    arguments.layer = layer
    arguments.rank_idx = sym_buffer.rank_idx
    arguments.wait_limit = wait_limit
    if num_ctas is None:
        num_ctas = torch.cuda.get_device_properties(device).multi_processor_count
    kernel.launch(arguments, (num_ctas, 1, 1), cooperative=True)


def _pointers(weights: ExpertWeights) -> _Weights:
    tensors = (weights.weight, weights.weight_scale, weights.weight_scale_2)
    return _Weights(*(tensor.data_ptr() for tensor in tensors))


@cache
def _arguments_type(num_fields: int) -> type[ctypes.Structure]:
    """ScalarArguments of impl/scalar.cuh."""
    fields = (
        ("buffers", rank_buffers_type(num_fields)),
        ("layer", _Layer),
        ("rank_idx", ctypes.c_int),
        ("wait_limit", ctypes.c_uint64),
    )
    return type("ScalarArguments", (ctypes.Structure,), {"_fields_": fields})


@cache
def _load(
    shape: MoEShape,
    activation: Activation,
    num_ranks: int,
    ring_rows: int,
    device: torch.device,
) -> LoadedKernel:
    source = scalar_source(shape, activation, num_ranks, ring_rows)
    target: Target | None = target_for(torch.cuda.get_device_capability(device))
    assert target is not None  # buffers for kernels are on GPUs that have a target
    compiled = compile_kernel(source, target)
    return LoadedKernel(compiled.cubin, source.name, target, device, threads=source.threads)
