"""Exact and fast NVFP4, MXFP4 and block-FP8: quantize, dequantize, convert, explain.

The names import on first use: ``nvfp4 convert`` copies bytes and must not wait for torch.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from .lazy import attach

if TYPE_CHECKING:
    from .convert import (
        NVFP4Cast,
        RequantizationReport,
        UnifiedPart,
        divisor_to_multiplier,
        from_compressed_tensors,
        joint_weight_scale_2,
        multiplier_to_divisor,
        mxfp4_to_nvfp4,
        nvfp4_to_fp8_block,
        to_compressed_tensors,
        unify_weight_scale_2,
    )
    from .errors import (
        BackendError,
        CheckpointError,
        CodecError,
        DtypeError,
        LayoutError,
        LosslessError,
        NonFiniteError,
        ScaleError,
        ShapeError,
        ZeroAmaxError,
    )
    from .explain import (
        DiffReport,
        Explanation,
        explain_diff,
    )
    from .formats import (
        e8m0_to_fp32,
        fp32_to_e8m0,
    )
    from .ggml import (
        from_ggml_mxfp4,
        from_ggml_nvfp4,
        to_ggml_mxfp4,
        to_ggml_nvfp4,
    )
    from .ops import (
        dequantize_fp8_block,
        dequantize_mxfp4,
        dequantize_nvfp4,
        quantize_fp8_block,
        quantize_mxfp4,
        quantize_nvfp4,
    )
    from .packing import (
        pack_e2m1,
        unpack_e2m1,
    )
    from .swizzle import (
        SwizzledScale,
        from_blocked,
        from_utccp_order,
        get_mn_major_tma_aligned_packed_ue4m3_tensor,
        get_mn_major_tma_aligned_packed_ue8m0_tensor,
        swizzle_blockscale,
        to_blocked,
        to_utccp_order,
        unswizzle_blockscale,
    )
    from .tensors import (
        Divisor,
        FP8BlockTensor,
        MXFP4Tensor,
        NVFP4Tensor,
    )

_HOMES = {
    "BackendError": "errors",
    "CheckpointError": "errors",
    "CodecError": "errors",
    "DiffReport": "explain",
    "Divisor": "tensors",
    "DtypeError": "errors",
    "Explanation": "explain",
    "FP8BlockTensor": "tensors",
    "LayoutError": "errors",
    "LosslessError": "errors",
    "MXFP4Tensor": "tensors",
    "NVFP4Cast": "convert",
    "NVFP4Tensor": "tensors",
    "NonFiniteError": "errors",
    "RequantizationReport": "convert",
    "ScaleError": "errors",
    "ShapeError": "errors",
    "SwizzledScale": "swizzle",
    "UnifiedPart": "convert",
    "ZeroAmaxError": "errors",
    "dequantize_fp8_block": "ops",
    "dequantize_mxfp4": "ops",
    "dequantize_nvfp4": "ops",
    "divisor_to_multiplier": "convert",
    "e8m0_to_fp32": "formats",
    "explain_diff": "explain",
    "fp32_to_e8m0": "formats",
    "from_blocked": "swizzle",
    "from_compressed_tensors": "convert",
    "from_ggml_mxfp4": "ggml",
    "from_ggml_nvfp4": "ggml",
    "from_utccp_order": "swizzle",
    "get_mn_major_tma_aligned_packed_ue4m3_tensor": "swizzle",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor": "swizzle",
    "joint_weight_scale_2": "convert",
    "multiplier_to_divisor": "convert",
    "mxfp4_to_nvfp4": "convert",
    "nvfp4_to_fp8_block": "convert",
    "pack_e2m1": "packing",
    "quantize_fp8_block": "ops",
    "quantize_mxfp4": "ops",
    "quantize_nvfp4": "ops",
    "swizzle_blockscale": "swizzle",
    "to_blocked": "swizzle",
    "to_compressed_tensors": "convert",
    "to_ggml_mxfp4": "ggml",
    "to_ggml_nvfp4": "ggml",
    "to_utccp_order": "swizzle",
    "unify_weight_scale_2": "convert",
    "unpack_e2m1": "packing",
    "unswizzle_blockscale": "swizzle",
}

try:
    __version__ = version("nvfp4-codec")
except PackageNotFoundError:  # a source tree on sys.path that was never installed
    __version__ = "0+unknown"

__all__ = [
    "BackendError",
    "CheckpointError",
    "CodecError",
    "DiffReport",
    "Divisor",
    "DtypeError",
    "Explanation",
    "FP8BlockTensor",
    "LayoutError",
    "LosslessError",
    "MXFP4Tensor",
    "NVFP4Cast",
    "NVFP4Tensor",
    "NonFiniteError",
    "RequantizationReport",
    "ScaleError",
    "ShapeError",
    "SwizzledScale",
    "UnifiedPart",
    "ZeroAmaxError",
    "dequantize_fp8_block",
    "dequantize_mxfp4",
    "dequantize_nvfp4",
    "divisor_to_multiplier",
    "e8m0_to_fp32",
    "explain_diff",
    "fp32_to_e8m0",
    "from_blocked",
    "from_compressed_tensors",
    "from_ggml_mxfp4",
    "from_ggml_nvfp4",
    "from_utccp_order",
    "get_mn_major_tma_aligned_packed_ue4m3_tensor",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "joint_weight_scale_2",
    "multiplier_to_divisor",
    "mxfp4_to_nvfp4",
    "nvfp4_to_fp8_block",
    "pack_e2m1",
    "quantize_fp8_block",
    "quantize_mxfp4",
    "quantize_nvfp4",
    "swizzle_blockscale",
    "to_blocked",
    "to_compressed_tensors",
    "to_ggml_mxfp4",
    "to_ggml_nvfp4",
    "to_utccp_order",
    "unify_weight_scale_2",
    "unpack_e2m1",
    "unswizzle_blockscale",
]

__getattr__, __dir__ = attach(__name__, _HOMES)
