"""A stand-in for a tensor on a GPU, so that patches can be asked what they do without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_MOVES = {torch.Tensor.to, torch.Tensor.cpu}
# What says something about a tensor without reading its values.
_METADATA = {
    "__get__",  # dtype, shape, is_meta, data, ...
    "clone",
    "detach",
    "dim",
    "element_size",
    "is_floating_point",
    "ndimension",
    "numel",
    "requires_grad_",
    "size",
}


class Elsewhere(torch.Tensor):
    """A CPU tensor that claims another device: it can be moved to the CPU, but not read."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("hpu", 0)  # one that no machine has: asking must not wake a GPU

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MOVES and (func is torch.Tensor.cpu or _to_cpu(args[1:], kwargs)):
            return args[0].as_subclass(torch.Tensor)
        if func is torch.Tensor.as_subclass or func.__name__ in _METADATA:
            result: Any = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            return result
        raise RuntimeError(f"{func.__name__} reads a tensor on another device")


def elsewhere(tensor: torch.Tensor) -> Elsewhere:
    """The same values, claimed to be on a GPU."""
    return tensor.detach().as_subclass(Elsewhere)


def _to_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device", args[0] if args else None)
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cpu"
