"""to_quantized_weight packs on the CPU, also when it is called by itself."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..patch import Function, Patch
from .modelopt import EXPORT, PACKAGE, VERSIONS


def _wrap(original: Function) -> Function:
    def to_quantized_weight(weight: Any, *args: Any, **kwargs: Any) -> Any:
        # Upstream moves the scales to the weight's device.
        return original(weight if weight.is_meta else weight.cpu(), *args, **kwargs)

    return to_quantized_weight


def _probe() -> bool:
    import torch

    from .elsewhere import Elsewhere, elsewhere

    packed = import_module(f"{EXPORT}.quant_utils").to_quantized_weight(
        elsewhere(torch.ones(2, 16)), elsewhere(torch.ones(2, 1)), "nvfp4", torch.ones(()), 16
    )
    return packed.dtype == torch.uint8 and not isinstance(packed, Elsewhere)


PATCH = Patch(
    name="quantized-weight",
    package=PACKAGE,
    module=f"{EXPORT}.quant_utils",
    target="to_quantized_weight",
    versions=VERSIONS,
    sources={"510c25d4c7f6c4c4": "0.45 and 0.46", "bc8dc784a2530216": "0.47"},
    parameters=("weight", "weights_scaling_factor", "quantization"),
    reason="weights are packed on the GPU",
    upstream="aligns the scales' device with the weight's, but packs on the GPU; goes with the "
    "patch of _export_quantized_weight",
    wrap=_wrap,
    probe=_probe,
)
