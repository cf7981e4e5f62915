"""Compiled kernels on a GPU: loaded and launched through libcuda, found by dlopen."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from ..errors import LaunchError
from .cubin import read_cubin
from .targets import Target, check_runs_on

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ATTRIBUTE_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_ATTRIBUTE_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute; the value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@cache
def _libcuda() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LaunchError(f"found no NVIDIA driver: {error}") from error


def driver_version() -> str:
    """The newest CUDA that the driver knows, such as "CUDA 13.0"."""
    version = ctypes.c_int()
    _check(_libcuda().cuDriverGetVersion(ctypes.byref(version)), "to name its version")
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def _check(status: int, doing: str) -> None:
    if status != 0:
        text = ctypes.c_char_p()
        _libcuda().cuGetErrorString(status, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown error"
        raise LaunchError(f"the CUDA driver fails {doing}: {reason} ({status})")


@cache
def _primary_context(device_idx: int) -> int:
    """torch's context of a device, kept for the life of the process as torch does."""
    _check(_libcuda().cuInit(0), "to start")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check(_libcuda().cuDeviceGet(ctypes.byref(device), device_idx), "to find the device")
    status = _libcuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    _check(status, "to make the device's context")
    return context.value or 0


@contextmanager
def _on_device(device_idx: int) -> Iterator[None]:
    """torch's context as the thread's; a thread that never used CUDA has none."""
    wanted, current = _primary_context(device_idx), ctypes.c_void_p()
    _check(_libcuda().cuCtxGetCurrent(ctypes.byref(current)), "to name its context")
    if current.value == wanted:
        yield
        return
    _check(_libcuda().cuCtxPushCurrent_v2(ctypes.c_void_p(wanted)), "to change its context")
    try:
        yield
    finally:
        _libcuda().cuCtxPopCurrent_v2(ctypes.byref(current))


TENSOR_MAP_BYTES = 128  # of a CUtensorMap
_MAP_UINT8, _MAP_BFLOAT16, _MAP_SWIZZLE_128B, _MAP_L2_256B = 0, 9, 3, 3


@cache
def tensor_map(
    address: int,
    rows: int,
    columns: int,
    box_rows: int,
    box_columns: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> ctypes.Array[ctypes.c_ubyte]:
    """The copy engine's description (CUtensorMap) of a matrix on a GPU, rows contiguous.

    dtype: bfloat16 or uint8. Copies are boxes of box_rows by box_columns, in the swizzle of 128
    bytes: that is how wide a box is.
    """
    number = {torch.bfloat16: _MAP_BFLOAT16, torch.uint8: _MAP_UINT8}[dtype]
    sizes = (ctypes.c_uint64 * 2)(columns, rows)
    strides = (ctypes.c_uint64 * 1)(dtype.itemsize * columns)
    box, steps = (ctypes.c_uint32 * 2)(box_columns, box_rows), (ctypes.c_uint32 * 2)(1, 1)
    memory = (ctypes.c_ubyte * (TENSOR_MAP_BYTES + 64))()
    start = -ctypes.addressof(memory) % 64  # where the driver wants it
    status = _libcuda().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(memory) + start), number, 2,
        ctypes.c_void_p(address), sizes, strides, box, steps, 0, _MAP_SWIZZLE_128B, _MAP_L2_256B, 0,
    )  # fmt: skip
    _check(status, "to describe a matrix to the copy engine")
    return (ctypes.c_ubyte * TENSOR_MAP_BYTES).from_buffer_copy(memory, start)


class LoadedKernel:
    """One kernel on one GPU, loaded for the life of the process.

    Raises ArchitectureError if the GPU cannot run the target, LaunchError if the driver refuses.
    """

    def __init__(
        self, cubin: bytes, name: str, target: Target, device: torch.device, *, threads: int
    ) -> None:
        check_runs_on(target, torch.cuda.get_device_capability(device))
        if name not in read_cubin(cubin).kernels:
            raise LaunchError(f"the compiled kernel has no entry point {name!r}")
        self.name, self.threads = name, threads
        self._device_idx = torch.cuda.current_device() if device.index is None else device.index
        self._shared_bytes = 0
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with _on_device(self._device_idx):
            _check(_libcuda().cuModuleLoadData(ctypes.byref(module), cubin), f"to load {name}")
            status = _libcuda().cuModuleGetFunction(ctypes.byref(function), module, name.encode())
            _check(status, f"to find {name}")
        self._function = function

    def launch(
        self,
        arguments: ctypes.Structure,
        grid: tuple[int, int, int],
        *,
        shared_bytes: int = 0,
        cluster: int = 1,
        cooperative: bool = False,
    ) -> None:
        """Launch on torch's current stream of the device; capturable in a CUDA graph.

        arguments: the kernel's one parameter, by value. grid: CTAs; an empty one launches nothing.
        shared_bytes: dynamic shared memory. cluster: CTAs of a cluster along x.
        """
        if 0 in grid:
            return
        attributes = (_Attribute * 2)()
        count = 0
        if cluster > 1:
            attributes[count].id = _ATTRIBUTE_CLUSTER
            attributes[count].value[:3] = [cluster, 1, 1]
            count += 1
        if cooperative:
            attributes[count].id = _ATTRIBUTE_COOPERATIVE
            attributes[count].value[0] = 1
            count += 1
        stream = torch.cuda.current_stream(self._device_idx).cuda_stream
        config = _Config(
            grid, (self.threads, 1, 1), shared_bytes, stream or None, attributes, count
        )
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        with _on_device(self._device_idx):
            self._allow_shared(shared_bytes)
            status = _libcuda().cuLaunchKernelEx(
                ctypes.byref(config), self._function, pointers, None
            )
            _check(status, f"to launch {self.name}")

    def _allow_shared(self, shared_bytes: int) -> None:
        if shared_bytes > self._shared_bytes:
            status = _libcuda().cuFuncSetAttribute(
                self._function, _MAX_DYNAMIC_SHARED, ctypes.c_int(shared_bytes)
            )
            _check(status, f"to give {self.name} {shared_bytes} bytes of shared memory")
            self._shared_bytes = shared_bytes
