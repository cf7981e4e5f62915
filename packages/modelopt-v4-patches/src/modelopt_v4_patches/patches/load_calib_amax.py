"""TensorQuantizer.load_calib_amax, called outside mtq.calibrate, leaves amax on the CPU.

Scripts that collect statistics themselves end with this call. Within mtq.calibrate the move waits
for its end (see calibrate.py); so it does where processes agree on amax after it.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

from ..patch import Function, Patch
from .calibrate import running
from .devices import state_to_cpu
from .modelopt import PACKAGE, QUANTIZER, VERSIONS, nvfp4_quantizer


def _distributed() -> bool:
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized()


def _wrap(original: Function) -> Function:
    def load_calib_amax(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not running() and not _distributed():
            state_to_cpu(self)
        return result

    return load_calib_amax


def _probe() -> bool:
    import torch

    from .elsewhere import Elsewhere, elsewhere

    if _distributed():
        return PATCH.applied()  # it waits: there is nothing to see
    quantizer = nvfp4_quantizer()
    quantizer._calibrator = SimpleNamespace(compute_amax=lambda: elsewhere(torch.ones(())))
    import_module(QUANTIZER).TensorQuantizer.load_calib_amax(quantizer)
    return not isinstance(quantizer._amax, Elsewhere)


PATCH: Patch = Patch(
    name="load-calib-amax",
    package=PACKAGE,
    module=QUANTIZER,
    target="TensorQuantizer.load_calib_amax",
    versions=VERSIONS,
    sources={"32dafb839056cb73": "0.45 to 0.47"},
    parameters=("self",),
    reason="amax that a script loads itself stays on the GPU until the export",
    upstream="not reported; goes with the patch of calibrate",
    wrap=_wrap,
    probe=_probe,
)
