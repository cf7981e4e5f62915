"""_export_quantized_weight packs on the CPU: the one entry to the whole chain of a linear.

Slower than on a GPU, and the packed weights then fill host memory; `dsv4-quantize export` does
neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..patch import Patch
from .devices import on_cpu
from .modelopt import EXPORT, PACKAGE, VERSIONS, nvfp4_linear


def _probe() -> bool:
    import torch

    from .elsewhere import Elsewhere, elsewhere

    linear = nvfp4_linear(elsewhere(torch.ones(2, 16)), elsewhere(torch.ones(())))
    module: Any = import_module(f"{EXPORT}.unified_export_hf")
    module._export_quantized_weight(linear, torch.bfloat16)
    results = (linear.weight, linear.weight_scale, linear.weight_scale_2, linear.input_scale)
    return not any(isinstance(result, Elsewhere) for result in results)


PATCH = Patch(
    name="export-weight",
    package=PACKAGE,
    module=f"{EXPORT}.unified_export_hf",
    target="_export_quantized_weight",
    versions=VERSIONS,
    sources={"0e21931ab2f81d27": "0.45", "e52369a607ce422a": "0.46 and 0.47"},
    parameters=("sub_module", "dtype", "weight_name"),
    reason="the export packs weights where they lie, and dies on the first that a GPU cannot read",
    upstream="not reported; goes when modelopt exports on the CPU",
    wrap=on_cpu,
    probe=_probe,
)
