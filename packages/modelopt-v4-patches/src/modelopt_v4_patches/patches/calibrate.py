"""mtq.calibrate leaves what it measured on the CPU.

Not earlier: within a calibration, processes still agree on amax over NCCL, and algorithms such as
mse or awq compute with it beside the weights.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from ..patch import Function, Patch
from .devices import state_to_cpu, state_to_devices
from .modelopt import PACKAGE, VERSIONS

MODULE = "modelopt.torch.quantization.model_quant"
_running = threading.local()


def running() -> bool:
    """Whether this thread is within mtq.calibrate."""
    return getattr(_running, "depth", 0) > 0


@contextmanager
def _calibration() -> Iterator[None]:
    _running.depth = getattr(_running, "depth", 0) + 1
    try:
        yield
    finally:
        _running.depth -= 1


def _wrap(original: Function) -> Function:
    def calibrate(model: Any, *args: Any, **kwargs: Any) -> Any:
        if running():
            return original(model, *args, **kwargs)
        state_to_devices(model)
        with _calibration():
            model = original(model, *args, **kwargs)
        state_to_cpu(model)
        return model

    return calibrate


def _probe() -> bool:
    import torch

    from .elsewhere import Elsewhere, elsewhere

    model = torch.nn.Sequential(torch.nn.Module())
    model[0].register_buffer("_amax", elsewhere(torch.ones(())))
    import_module(MODULE).calibrate(model, "max")
    return not isinstance(model[0]._amax, Elsewhere)


PATCH = Patch(
    name="calibrate",
    package=PACKAGE,
    module=MODULE,
    target="calibrate",
    versions=VERSIONS,
    sources={"b1c5ed5f5cd48e39": "0.45 to 0.47"},
    parameters=("model",),
    reason="amax, pre-quant scales and global amax stay on the GPU until an export hours later "
    "cannot read them",
    upstream="not reported; goes when modelopt keeps calibration results off the GPU",
    wrap=_wrap,
    probe=_probe,
)
