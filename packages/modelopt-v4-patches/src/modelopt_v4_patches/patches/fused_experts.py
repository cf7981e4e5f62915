"""_export_fused_experts splits and packs the experts of a layer on the CPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..patch import Patch
from .devices import on_cpu
from .modelopt import EXPORT, PACKAGE, VERSIONS, nvfp4_quantizer


def fused_experts(device: Any) -> Any:
    """One fused expert of 16 x 16, as modelopt quantizes it; device: what to do to each tensor."""
    import torch
    from torch import nn

    experts: Any = nn.Module()
    experts.num_experts, experts.intermediate_dim = 1, 16
    for name, rows in (("gate_up_proj", 32), ("down_proj", 16)):
        setattr(experts, name, nn.Parameter(device(torch.ones(1, rows, 16)), requires_grad=False))
        setattr(experts, f"{name}_input_quantizer", nvfp4_quantizer(device(torch.ones(()))))
        quantizers = nn.ModuleList([nvfp4_quantizer(device(torch.ones(())))])
        setattr(experts, f"{name}_weight_quantizers", quantizers)
    return experts


def _probe() -> bool:
    import torch

    from .elsewhere import Elsewhere, elsewhere

    experts = fused_experts(elsewhere)
    import_module(f"{EXPORT}.moe_utils")._export_fused_experts(experts, torch.bfloat16)
    tensors = experts.state_dict().values()
    return bool(tensors) and not any(isinstance(tensor, Elsewhere) for tensor in tensors)


PATCH = Patch(
    name="fused-experts",
    package=PACKAGE,
    module=f"{EXPORT}.moe_utils",
    target="_export_fused_experts",
    versions=VERSIONS,
    sources={"ca2fbe32a19778cf": "0.45", "a4ab8945921031b6": "0.46 and 0.47"},
    parameters=("module", "dtype"),
    reason="the export splits fused experts and reads their amax on the GPU",
    upstream="not reported; goes with the patch of _export_quantized_weight",
    wrap=on_cpu,
    probe=_probe,
)
