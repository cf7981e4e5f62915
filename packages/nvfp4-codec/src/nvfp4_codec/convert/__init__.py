"""Conversions between formats: exact where they can be, reported where they cannot."""

from .compressed_tensors import (
    divisor_to_multiplier,
    from_compressed_tensors,
    multiplier_to_divisor,
    to_compressed_tensors,
)
from .fp8_block import (
    RequantizationReport,
    nvfp4_to_fp8_block,
    quantize_fp8_block_with_report,
)
from .mxfp4 import NVFP4Cast, joint_weight_scale_2, mxfp4_to_nvfp4
from .unify import Unified, UnifiedPart, rescale_weight_scale, unify_weight_scale_2

__all__ = [
    "NVFP4Cast",
    "RequantizationReport",
    "Unified",
    "UnifiedPart",
    "divisor_to_multiplier",
    "from_compressed_tensors",
    "joint_weight_scale_2",
    "multiplier_to_divisor",
    "mxfp4_to_nvfp4",
    "nvfp4_to_fp8_block",
    "quantize_fp8_block_with_report",
    "rescale_weight_scale",
    "to_compressed_tensors",
    "unify_weight_scale_2",
]
