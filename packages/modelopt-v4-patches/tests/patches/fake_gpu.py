"""A GPU made of CPU memory: tensors on it refuse to meet CPU tensors, and can become unreadable.

Within `FakeGpu`, device "maia" works (torch reserves the name; nothing implements it):
``model.to(DEVICE)``, arithmetic, ``torch.zeros(..., device=DEVICE)``. Results are those of the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("maia", 0)
_MAY_MIX = {torch.ops.aten.copy_.default, torch.ops.aten.index.Tensor}


class GpuTensor(torch.Tensor):
    """stale: reading it is an illegal access, as after a fault on a real GPU."""

    inner: torch.Tensor
    stale: bool

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> GpuTensor:
        result = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        result.inner, result.stale = inner, False
        return result

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Four functions that torch runs with a device guard, which nothing implements here."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") == DEVICE:
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        if func is torch.Tensor.copy_ and isinstance(args[0], GpuTensor):
            _run(torch.ops.aten.copy_.default, args, kwargs)
            return args[0]
        if func is torch.Tensor.__setitem__ and isinstance(args[0], GpuTensor):
            tensor, index, value = tree_map(_inner, args)
            tensor[index] = value
            return None
        if func is torch.Tensor.__getitem__ and isinstance(args[0], GpuTensor):
            return GpuTensor(args[0].inner[tree_map(_inner, args[1])])
        return func(*args, **kwargs)


class FakeGpu(TorchDispatchMode):
    def __enter__(self) -> Any:
        self._functions = _Functions()
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, GpuTensor)]
    if any(tensor.stale for tensor in ours):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    # torch lets scalars on the CPU join in.
    others = [t for t in tensors if not isinstance(t, GpuTensor) and t.dim() > 0]
    if ours and others and func not in _MAY_MIX:
        raise RuntimeError(f"Expected all tensors to be on the same device ({func})")
    device = kwargs.get("device")
    on_gpu = bool(ours) if device is None else torch.device(device).type == DEVICE.type
    args, kwargs = tree_map(_inner, (args, dict(kwargs)))
    if on_gpu and device is not None:
        kwargs["device"] = "cpu"
    result = func(*args, **kwargs)
    if not on_gpu:
        return result
    known = {id(tensor.inner): tensor for tensor in ours}  # what was changed in place

    def outer(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return known[id(leaf)] if id(leaf) in known else GpuTensor(leaf)

    return tree_map(outer, result)


def _inner(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, GpuTensor) else leaf
