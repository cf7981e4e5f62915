"""Fused expert-parallel mixture-of-experts for NVFP4 weights.

On Hopper and Blackwell one kernel runs the whole layer; the one for Blackwell no GPU has run yet.
Elsewhere the reference does, when asked for by name. The names import on first use.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from nvfp4_codec.lazy import attach

if TYPE_CHECKING:
    from .activations import QuantizedTokens, quantize_tokens
    from .api import fp8_nvfp4_mega_moe, nvfp4_mega_moe, prepare_inputs
    from .buffer import SymmBuffer, get_symm_buffer_for_nvfp4_mega_moe
    from .checkpoint import load_experts
    from .custom_op import mega_moe_op
    from .errors import (
        ArchitectureError,
        BackendError,
        CacheError,
        CompileError,
        DtypeError,
        LaunchError,
        LayoutError,
        MegaMoEError,
        RecipeError,
        RoutingError,
        ScaleError,
        ShapeError,
    )
    from .experts import ExpertWeights
    from .layout_sm100 import pack_ue4m3_to_int32, transform_sf_into_required_layout
    from .weights import (
        MegaMoEWeights,
        fold_global_scale,
        transform_nvfp4_weights_for_mega_moe,
        untransform_nvfp4_weights,
    )

_HOMES = {
    "ArchitectureError": "errors",
    "BackendError": "errors",
    "CacheError": "errors",
    "CompileError": "errors",
    "DtypeError": "errors",
    "ExpertWeights": "experts",
    "LaunchError": "errors",
    "LayoutError": "errors",
    "MegaMoEError": "errors",
    "MegaMoEWeights": "weights",
    "QuantizedTokens": "activations",
    "RecipeError": "errors",
    "RoutingError": "errors",
    "ScaleError": "errors",
    "ShapeError": "errors",
    "SymmBuffer": "buffer",
    "fold_global_scale": "weights",
    "fp8_nvfp4_mega_moe": "api",
    "get_symm_buffer_for_nvfp4_mega_moe": "buffer",
    "load_experts": "checkpoint",
    "mega_moe_op": "custom_op",
    "nvfp4_mega_moe": "api",
    "pack_ue4m3_to_int32": "layout_sm100",
    "prepare_inputs": "api",
    "quantize_tokens": "activations",
    "transform_nvfp4_weights_for_mega_moe": "weights",
    "transform_sf_into_required_layout": "layout_sm100",
    "untransform_nvfp4_weights": "weights",
}

try:
    __version__ = version("megamoe-kernel")
except PackageNotFoundError:  # a source tree on sys.path that was never installed
    __version__ = "0+unknown"

__all__ = [
    "ArchitectureError",
    "BackendError",
    "CacheError",
    "CompileError",
    "DtypeError",
    "ExpertWeights",
    "LaunchError",
    "LayoutError",
    "MegaMoEError",
    "MegaMoEWeights",
    "QuantizedTokens",
    "RecipeError",
    "RoutingError",
    "ScaleError",
    "ShapeError",
    "SymmBuffer",
    "fold_global_scale",
    "fp8_nvfp4_mega_moe",
    "get_symm_buffer_for_nvfp4_mega_moe",
    "load_experts",
    "mega_moe_op",
    "nvfp4_mega_moe",
    "pack_ue4m3_to_int32",
    "prepare_inputs",
    "quantize_tokens",
    "transform_nvfp4_weights_for_mega_moe",
    "transform_sf_into_required_layout",
    "untransform_nvfp4_weights",
]

__getattr__, __dir__ = attach(__name__, _HOMES)
