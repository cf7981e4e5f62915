"""NVFP4QTensor.get_activation_scaling_factor gives a positive scale for an uncalibrated quantizer.

A zero or NaN amax (an expert that met no token) becomes the quantizer's largest value, as modelopt
0.47 does it, so the scale is 1 / 448. Negative amax still fail modelopt's assertion.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from ..patch import Function, Patch
from .modelopt import PACKAGE, VERSIONS, nvfp4_quantizer

MODULE = "modelopt.torch.quantization.qtensor.nvfp4_tensor"
E4M3_MAX = 448.0
logger = logging.getLogger(__name__)


def _wrap(original: Function) -> Function:
    def get_activation_scaling_factor(cls: Any, quantizer: Any) -> Any:
        amax = quantizer.export_amax() if quantizer.is_enabled else None
        if amax is None:
            return None
        bad = (amax == 0) | amax.isnan()
        if not bad.any() or (amax < 0).any():
            return original(cls, quantizer)
        logger.warning(
            "%d of %d input amax of a quantizer are zero or NaN: it met no token. They are "
            "exported as %s; calibrate on more samples if it should be in use.",
            *(int(bad.sum()), amax.numel(), quantizer.maxbound),
        )
        amax = amax.float().masked_fill(bad, quantizer.maxbound)
        return amax / (quantizer.maxbound * E4M3_MAX)

    return get_activation_scaling_factor


def _probe() -> bool:
    import torch

    nvfp4: Any = import_module(MODULE).NVFP4QTensor
    disabled, logger.disabled = logger.disabled, True
    try:
        scale = nvfp4.get_activation_scaling_factor(nvfp4_quantizer(torch.zeros(())))
    finally:
        logger.disabled = disabled
    return bool((scale > 0).all())


PATCH = Patch(
    name="activation-scale",
    package=PACKAGE,
    module=MODULE,
    target="NVFP4QTensor.get_activation_scaling_factor",
    versions=VERSIONS,
    sources={"134075e9a9e9dcd9": "0.45", "2cfcbfc94f20bd88": "0.46 and 0.47"},
    parameters=("cls", "quantizer"),
    reason="an expert that met no token ends the export with 'activation scaling factor not "
    "positive'",
    upstream="fixed in modelopt 0.47; goes when 0.47 is the oldest supported",
    wrap=_wrap,
    probe=_probe,
)
