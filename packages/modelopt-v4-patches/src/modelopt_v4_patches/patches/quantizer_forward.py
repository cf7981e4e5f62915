"""A quantizer's forward works wherever its state is: it borrows it for the call.

Without this, state on the CPU breaks what runs after calibration: modelopt's export runs a dummy
forward, scripts generate a sample, auto_quantize scores layers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..patch import Function, Patch
from .devices import lent_to
from .modelopt import PACKAGE, QUANTIZER, VERSIONS, nvfp4_quantizer


def _wrap(original: Function) -> Function:
    def forward(self: Any, inputs: Any) -> Any:
        device = getattr(inputs, "device", None)  # packed tensors of modelopt have none
        if device is None or device.type == "cpu":
            return original(self, inputs)
        with lent_to(self, device):
            return original(self, inputs)

    return forward


def _probe() -> bool:
    import torch

    # A disabled quantizer only scales its input: no kernel is needed, so any device will do.
    quantizer = nvfp4_quantizer()
    quantizer.disable()
    quantizer.register_buffer("_pre_quant_scale", torch.ones(16))
    result = import_module(QUANTIZER).TensorQuantizer.forward(
        quantizer, torch.ones(1, 16, device="meta")
    )
    return bool(result.is_meta and quantizer._pre_quant_scale.device.type == "cpu")


PATCH = Patch(
    name="quantizer-forward",
    package=PACKAGE,
    module=QUANTIZER,
    target="TensorQuantizer.forward",
    versions=VERSIONS,
    sources={"f3bb07286a5090a6": "0.45", "16c19b7ed480bba0": "0.46 and 0.47"},
    parameters=("self", "inputs"),
    reason="a forward on the GPU refuses quantizer state that is on the CPU",
    upstream="aligns amax, not pre-quant scales, from modelopt 0.46; goes when it aligns both",
    wrap=_wrap,
    probe=_probe,
)
