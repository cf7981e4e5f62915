"""Exact and fast NVFP4, MXFP4 and block-FP8: quantize, dequantize, convert, explain."""

from importlib.metadata import PackageNotFoundError, version

from .errors import (
    BackendError,
    CheckpointError,
    CodecError,
    DtypeError,
    LayoutError,
    LosslessError,
    NonFiniteError,
    ShapeError,
    ZeroAmaxError,
)
from .formats import e8m0_to_fp32, fp32_to_e8m0
from .ops import (
    dequantize_fp8_block,
    dequantize_mxfp4,
    dequantize_nvfp4,
    quantize_fp8_block,
    quantize_mxfp4,
    quantize_nvfp4,
)
from .packing import pack_e2m1, unpack_e2m1
from .tensors import Divisor, FP8BlockTensor, MXFP4Tensor, NVFP4Tensor

try:
    __version__ = version("nvfp4-codec")
except PackageNotFoundError:  # a source tree on sys.path that was never installed
    __version__ = "0+unknown"

__all__ = [
    "BackendError",
    "CheckpointError",
    "CodecError",
    "Divisor",
    "DtypeError",
    "FP8BlockTensor",
    "LayoutError",
    "LosslessError",
    "MXFP4Tensor",
    "NVFP4Tensor",
    "NonFiniteError",
    "ShapeError",
    "ZeroAmaxError",
    "dequantize_fp8_block",
    "dequantize_mxfp4",
    "dequantize_nvfp4",
    "e8m0_to_fp32",
    "fp32_to_e8m0",
    "pack_e2m1",
    "quantize_fp8_block",
    "quantize_mxfp4",
    "quantize_nvfp4",
    "unpack_e2m1",
]
