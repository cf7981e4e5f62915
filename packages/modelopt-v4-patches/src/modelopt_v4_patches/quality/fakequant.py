"""What a serving GPU does to activations before a quantized linear, in float32 on the CPU.

Each function quantizes the last dimension and dequantizes again, with the codec. Which one a
linear gets follows from how its weight is stored, as vLLM 0.33 decides on Blackwell:

========================  ==========================================================
weight                    activations
========================  ==========================================================
NVFP4                     NVFP4: E4M3 scale per 16, global scale from ``input_scale``
FP8 in 128x128 blocks     FP8: one scale per 128, a power of two if the weight's is
MXFP4 (official experts)  MXFP8: E4M3 with an E8M0 scale per 32
BF16, FP32                as they are
========================  ==========================================================

On Hopper vLLM runs the two FP4 kinds with BF16 activations (W4A16); the weight-only figures are
those. vLLM's kernels multiply by reciprocals where modelopt, and this, divide.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from nvfp4_codec import (
    dequantize_fp8_block,
    dequantize_nvfp4,
    quantize_fp8_block,
    quantize_nvfp4,
)
from nvfp4_codec.checkpoint import Family
from nvfp4_codec.ops import ScaleFormat

Quantizer = Callable[[Tensor], Tensor]

_FP8_GROUP, _MX_GROUP = 128, 32


def nvfp4(x: Tensor, input_scale: Tensor) -> Tensor:
    """W4A4's activations: block scales from the data, the global scale from calibration.

    input_scale: float32, amax / (6 * 448). Values above that amax saturate.
    """
    packed = quantize_nvfp4(x, weight_scale_2=input_scale)
    return dequantize_nvfp4(packed.weight, packed.weight_scale, input_scale, dtype=x.dtype)


def fp8(x: Tensor, group: int = _FP8_GROUP, scale_fmt: ScaleFormat = "ue8m0") -> Tensor:
    """E4M3; amax / 448, or the power of two above, is the scale of ``group`` columns of a token."""
    rows, block = x.reshape(-1, x.shape[-1]), (1, group)
    packed = quantize_fp8_block(rows, block=block, scale_fmt=scale_fmt)
    values = dequantize_fp8_block(packed.weight, packed.weight_scale, block=block, dtype=x.dtype)
    return values.view(x.shape)


def quantizer_for(family: Family, input_scale: Tensor | None) -> Quantizer | None:
    """The activation quantizer of a linear whose weight is stored so; None for none.

    An NVFP4 weight without input_scale is served weight-only.
    """
    if family.kind == "nvfp4":
        return None if input_scale is None else partial(nvfp4, input_scale=input_scale.float())
    if family.kind == "mxfp4":
        return partial(fp8, group=_MX_GROUP)
    if family.kind == "fp8-block":
        assert family.scale is not None
        return partial(fp8, scale_fmt="ue8m0" if family.scale.dtype == "F8_E8M0" else "fp32")
    return None


def largest(scales: list[Tensor]) -> Tensor | None:
    """The input_scale of a fused MoE layer: its kernels quantize once, for all experts."""
    return torch.stack([scale.reshape(()) for scale in scales]).max() if scales else None
