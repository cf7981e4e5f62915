"""What the patches of modelopt have in common: its tested range, and parts for their probes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

PACKAGE = "nvidia-modelopt"
VERSIONS = ">=0.45,<0.48"
QUANTIZER = "modelopt.torch.quantization.nn.modules.tensor_quantizer"
EXPORT = "modelopt.torch.export"


def nvfp4_quantizer(amax: Tensor | None = None) -> Any:
    """A TensorQuantizer as modelopt's NVFP4 configuration makes it, with an amax or without."""
    config: Any = import_module("modelopt.torch.quantization.config")
    quantizer = import_module(QUANTIZER).TensorQuantizer(
        config.QuantizerAttributeConfig(
            num_bits=(2, 1), block_sizes={-1: 16, "type": "dynamic", "scale_bits": (4, 3)}
        )
    )
    if amax is not None:
        quantizer.register_buffer("_amax", amax)
    return quantizer


def nvfp4_linear(weight: Tensor, amax: Tensor) -> nn.Module:
    """A module with a weight and its quantizers, as modelopt's export sees a linear."""
    from torch import nn

    linear = nn.Module()
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.weight_quantizer = nvfp4_quantizer(amax)
    linear.input_quantizer = nvfp4_quantizer(amax)
    return linear
