"""prepare_inputs as one kernel: nothing else is launched, and CUDA graphs capture it."""

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


class _CopyArguments(ctypes.Structure):
    """CopyInputs of impl/prepare_inputs.cuh."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("topk_idx", ctypes.c_void_p),
        ("topk_weights", ctypes.c_void_p),
        ("to_x", ctypes.c_void_p),
        ("to_topk_idx", ctypes.c_void_p),
        ("to_topk_weights", ctypes.c_void_p),
    )


def copy_source(ids: torch.dtype, hidden: int, topk: int) -> KernelSource:
    """The kernel that copies BF16 hidden states of this width with their routing."""
    threads = min(_MOST_THREADS, -(-hidden * 2 // (_ALIGNMENT * _WARP)) * _WARP)
    id_type = {torch.int32: "int32_t", torch.int64: "int64_t"}[ids]
    return KernelSource(
        name="copy_inputs",
        header="megamoe/impl/prepare_inputs.cuh",
        function=f"megamoe::copy_inputs<{id_type}, {hidden}, {topk}, {threads}>",
        arguments="megamoe::CopyInputs",
        threads=threads,
        targets=TARGETS,
    )


def can_copy(x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> bool:
    """Whether copy_on_gpu takes these as they lie in memory."""
    rows = x.stride(1) == 1 and x.stride(0) * x.element_size() % _ALIGNMENT == 0
    whole = topk_idx.is_contiguous() and topk_weights.is_contiguous()
    aligned = x.data_ptr() % _ALIGNMENT == 0
    return x.dtype == torch.bfloat16 and rows and whole and aligned and has_kernel(x.device)


def copy_on_gpu(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, sym_buffer: SymmBuffer) -> None:
    """BF16 ``[T, hidden]`` and its routing into the buffer's first rows, on the current stream."""
    if x.shape[0] == 0:
        return
    kernel = _load_copy(topk_idx.dtype, sym_buffer.hidden, sym_buffer.num_topk, x.device)
    arguments = _CopyArguments(
        x.data_ptr(),
        x.stride(0) * x.element_size(),
        topk_idx.data_ptr(),
        topk_weights.data_ptr(),
        sym_buffer.address("x"),
        sym_buffer.address("topk_idx"),
        sym_buffer.address("topk_weights"),
    )
    kernel.launch(arguments, (x.shape[0], 1, 1))


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
    return _loaded(prepare_source(dtype, hidden), device)


@cache
def _load_copy(ids: torch.dtype, hidden: int, topk: int, device: torch.device) -> LoadedKernel:
    return _loaded(copy_source(ids, hidden, topk), device)


def _loaded(source: KernelSource, device: torch.device) -> LoadedKernel:
    target = _target(device)
    assert target is not None  # has_kernel was asked
    compiled = compile_kernel(source, target)
    return LoadedKernel(compiled.cubin, source.name, target, device, threads=source.threads)
