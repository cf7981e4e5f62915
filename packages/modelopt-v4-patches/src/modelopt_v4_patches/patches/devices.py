"""Where a quantized model's tensors are: moves to the CPU, and back for a forward.

A tensor left on a GPU for hours can be unreadable by the time an export asks for it (an earlier
kernel's fault poisons the whole context); on the CPU it cannot. The state of a quantizer is small,
so it lives on the CPU from the end of calibration on; a forward borrows it back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..errors import PatchError
from ..patch import Function

if TYPE_CHECKING:
    import torch
    from torch import nn

#: What calibration leaves in a quantizer (``_global_amax`` also in the state that siblings share).
STATE = ("_amax", "_pre_quant_scale", "_global_amax")

# Where state was before it moved: a second calibration wants it beside the weights.
_homes: WeakKeyDictionary[nn.Module, dict[str, torch.device]] = WeakKeyDictionary()


def on_cpu(original: Function) -> Function:
    """A function of a module that first moves it to the CPU."""

    def function(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        to_cpu(module)
        return original(module, *args, **kwargs)

    return function


def to_cpu(module: nn.Module, only: Collection[str] | None = None) -> None:
    """Moves the parameters and buffers of a module, and of all in it, to the CPU.

    only: buffers with these names, nothing else. Tensors on the meta device stay: modelopt refuses
    those itself. What several modules share stays shared. Raises PatchError naming the tensor if
    it cannot be read.
    """
    import torch

    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what is shared moves once
    for prefix, part in module.named_modules():
        for tensors in (part._buffers, part._parameters):
            for name, tensor in tensors.items():
                if tensor is None or tensor.device.type in ("cpu", "meta"):
                    continue
                if only is not None and (tensors is not part._buffers or name not in only):
                    continue
                if id(tensor) not in moved:
                    value = _read(tensor, f"{type(module).__name__}: {prefix}.{name}")
                    if isinstance(tensor, torch.nn.Parameter) and type(value) is torch.Tensor:
                        value = torch.nn.Parameter(value.detach(), tensor.requires_grad)
                    moved[id(tensor)] = tensor, value
                tensors[name] = moved[id(tensor)][1]


def state_to_cpu(model: nn.Module) -> None:
    """Moves amax, pre-quant scales and global amax to the CPU; `state_to_devices` undoes it."""
    for module in model.modules():
        for name in STATE:
            tensor = module._buffers.get(name)
            if tensor is not None and tensor.device.type not in ("cpu", "meta"):
                _homes.setdefault(module, {})[name] = tensor.device
    to_cpu(model, STATE)


def state_to_devices(model: nn.Module) -> None:
    """Puts back what `state_to_cpu` moved; shared tensors stay shared."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        for name, device in _homes.pop(module, {}).items():
            tensor = module._buffers.get(name)
            if tensor is not None:
                if id(tensor) not in moved:
                    moved[id(tensor)] = tensor, tensor.to(device)
                module._buffers[name] = moved[id(tensor)][1]


@contextmanager
def lent_to(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Within it, the quantizer state that is on the CPU is on a device; then it is as before.

    For a forward, which reads the state and does not write it.
    """
    buffers = module._buffers
    home = {
        name: tensor
        for name in STATE
        if (tensor := buffers.get(name)) is not None and tensor.device.type == "cpu"
    }
    buffers.update({name: tensor.to(device) for name, tensor in home.items()})
    try:
        yield
    finally:
        buffers.update(home)


def _read(tensor: torch.Tensor, label: str) -> torch.Tensor:
    import torch

    try:
        with torch.no_grad():
            return tensor.to("cpu")
    except RuntimeError as error:
        raise PatchError(
            f"{label}, {tensor.dtype} {list(tensor.shape)} on {tensor.device}, cannot be read any "
            f"more ({str(error).splitlines()[0]}). The calibration is not lost if it left an amax "
            "snapshot: `dsv4-quantize export` needs that, the official checkpoint and no GPU."
        ) from error
