"""TensorQuantizer.export_amax answers from the CPU.

For quantizers that no calibration in this process touched: restored ones, and amax set by hand.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..patch import Function, Patch
from .devices import state_to_cpu
from .modelopt import PACKAGE, QUANTIZER, VERSIONS, nvfp4_quantizer


def _wrap(original: Function) -> Function:
    def export_amax(self: Any) -> Any:
        state_to_cpu(self)
        return original(self)

    return export_amax


def _probe() -> bool:
    import torch

    from .elsewhere import Elsewhere, elsewhere

    quantizer = nvfp4_quantizer(elsewhere(torch.ones(())))
    amax = import_module(QUANTIZER).TensorQuantizer.export_amax(quantizer)
    return not isinstance(amax, Elsewhere)


PATCH = Patch(
    name="export-amax",
    package=PACKAGE,
    module=QUANTIZER,
    target="TensorQuantizer.export_amax",
    versions=VERSIONS,
    sources={"d1a78ab3da5eeafd": "0.45 and 0.46", "a23571157a1d7d8c": "0.47"},
    parameters=("self",),
    reason="the activation scale of an export is computed from an amax on the GPU",
    upstream="not reported; goes with the patch of calibrate",
    wrap=_wrap,
    probe=_probe,
)
