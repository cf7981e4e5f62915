"""get_weight_scaling_factor_2 computes on the CPU, also when it is called by itself."""

from __future__ import annotations

from importlib import import_module

from ..patch import Patch
from .devices import on_cpu
from .modelopt import EXPORT, PACKAGE, VERSIONS, nvfp4_linear


def _probe() -> bool:
    import torch

    from .elsewhere import Elsewhere, elsewhere

    linear = nvfp4_linear(elsewhere(torch.ones(2, 16)), elsewhere(torch.ones(())))
    scale = import_module(f"{EXPORT}.quant_utils").get_weight_scaling_factor_2(linear)
    return not isinstance(scale, Elsewhere)


PATCH = Patch(
    name="weight-scale-2",
    package=PACKAGE,
    module=f"{EXPORT}.quant_utils",
    target="get_weight_scaling_factor_2",
    versions=VERSIONS,
    sources={"e4960f13127aaf93": "0.45 to 0.47"},
    parameters=("module", "weight_name"),
    reason="the scale of a weight is computed from an amax on the GPU",
    upstream="not reported; goes with the patch of _export_quantized_weight",
    wrap=on_cpu,
    probe=_probe,
)
