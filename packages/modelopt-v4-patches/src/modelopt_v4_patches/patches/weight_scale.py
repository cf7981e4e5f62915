"""get_weight_scaling_factor computes on the CPU, also when it is called by itself."""

from __future__ import annotations

from importlib import import_module

from ..patch import Patch
from .devices import on_cpu
from .modelopt import EXPORT, PACKAGE, VERSIONS, nvfp4_linear


def _probe() -> bool:
    import torch

    from .elsewhere import Elsewhere, elsewhere

    linear = nvfp4_linear(elsewhere(torch.ones(2, 16)), elsewhere(torch.ones(())))
    scale = import_module(f"{EXPORT}.quant_utils").get_weight_scaling_factor(linear)
    return not isinstance(scale, Elsewhere)


PATCH = Patch(
    name="weight-scale",
    package=PACKAGE,
    module=f"{EXPORT}.quant_utils",
    target="get_weight_scaling_factor",
    versions=VERSIONS,
    sources={"22c75c015e5a618b": "0.45 to 0.47"},
    parameters=("module", "weight_name"),
    reason="block scales are computed from a weight on the GPU",
    upstream="aligns devices, but computes on the GPU; goes with the patch of "
    "_export_quantized_weight",
    wrap=on_cpu,
    probe=_probe,
)
