"""prepare_inputs for NVFP4 as one kernel: no table is copied, and CUDA graphs capture it."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from .buffer import SymmBuffer
from .experts import BLOCK_SIZE
from .jit.compile import KernelSource, compile_kernel
from .jit.driver import LoadedKernel
from .jit.targets import TARGETS, Target, target_for

_WARP = 32
_MOST_THREADS = 512  # kMostThreads of the header
_ALIGNMENT = 16  # bytes that a thread loads at once
#: The dtypes that the kernel reads, and their names in the header.
VALUES = {torch.bfloat16: "Bf16Values", torch.float16: "Fp16Values", torch.float32: "Fp32Values"}


class _Arguments(ctypes.Structure):
    """PrepareInputs of impl/prepare_inputs.cuh."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("codes", ctypes.c_void_p),
        ("block_scale", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
    )


def prepare_source(dtype: torch.dtype, hidden: int) -> KernelSource:
    """The kernel for hidden states of this dtype and width."""
    blocks = hidden // BLOCK_SIZE
    rounds = -(-blocks // _MOST_THREADS)
    threads = -(-blocks // (rounds * _WARP)) * _WARP
    return KernelSource(
        name="prepare_inputs",
        header="megamoe/impl/prepare_inputs.cuh",
        function=f"megamoe::prepare_inputs<megamoe::{VALUES[dtype]}, {hidden}, {threads}>",
        arguments="megamoe::PrepareInputs",
        threads=threads,
        targets=TARGETS,
    )


def has_kernel(device: torch.device) -> bool:
    """Whether there is a target for this device: compute capability 9.0, 10.0 or 10.3."""
    return _target(device) is not None


def prepare_on_gpu(x: Tensor, sym_buffer: SymmBuffer) -> None:
    """Quantize ``[T, hidden]`` into the buffer's first rows, on the current stream.

    The first call for a width and dtype compiles or loads the kernel. CUDA graphs capture all of
    them. Raises CompileError, CacheError, LaunchError.
    """
    if x.shape[0] == 0:
        return
    item = x.element_size()
    if x.stride(1) != 1 or x.stride(0) * item % _ALIGNMENT or x.data_ptr() % _ALIGNMENT:
        x = x.clone(memory_format=torch.contiguous_format)
    kernel = _load(x.dtype, sym_buffer.hidden, x.device)
    arguments = _Arguments(
        x.data_ptr(),
        x.stride(0) * item,
        sym_buffer.address("x"),
        sym_buffer.address("x_sf"),
        sym_buffer.address("x_scale"),
    )
    kernel.launch(arguments, (x.shape[0], 1, 1))


@cache
def _target(device: torch.device) -> Target | None:
    if device.type != "cuda":
        return None
    return target_for(torch.cuda.get_device_capability(device))


@cache
def _load(dtype: torch.dtype, hidden: int, device: torch.device) -> LoadedKernel:
    source, target = prepare_source(dtype, hidden), _target(device)
    assert target is not None  # has_kernel was asked
    compiled = compile_kernel(source, target)
    return LoadedKernel(compiled.cubin, source.name, target, device, threads=source.threads)
