"""One linear's tensors, from the format it is stored in to the one it runs in.

NVFP4 is value = e2m1 * weight_scale * weight_scale_2; ``input_scale`` belongs to activations and
is no factor of a weight. FP8 has one scale for each 128x128 block, taken from the block's own
largest value, as E8M0 or as FP32, whichever the model's kernels read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import torch
from torch import Tensor

from nvfp4_codec import (
    dequantize_fp8_block,
    dequantize_nvfp4,
    e8m0_to_fp32,
    fp32_to_e8m0,
    nvfp4_to_fp8_block,
)
from nvfp4_codec.convert import RequantizationReport, quantize_fp8_block_with_report
from nvfp4_codec.errors import DtypeError, LosslessError, ShapeError

from ..stored import Format

Parts = Mapping[str, Tensor]

FP8_BLOCK: Final = 128

#: The parts that a conversion needs of a linear in each stored format.
NEEDED: Mapping[Format, tuple[str, ...]] = {
    "nvfp4": ("weight", "weight_scale", "weight_scale_2"),
    "fp8_block": ("weight", "scale"),
    "bf16": ("weight",),
}


def to_bf16(parts: Parts, stored: Format) -> dict[str, Tensor]:
    """BF16 values, rounded once. Raises the codec's errors."""
    if stored == "nvfp4":
        weight, scale, scale_2 = (parts[part] for part in NEEDED["nvfp4"])
        return {"weight": dequantize_nvfp4(weight, scale, scale_2.reshape(()))}
    _check_blocks(parts["weight"], parts["scale"])
    return {"weight": dequantize_fp8_block(parts["weight"], parts["scale"], dtype=torch.bfloat16)}


def to_fp8(
    parts: Parts, stored: Format, *, e8m0: bool
) -> tuple[dict[str, Tensor], RequantizationReport | None]:
    """E4M3 and its block scales, and how far they are from the stored values.

    FP8 that is stored keeps its bytes; its scales change type where that is exact, and the linear
    is quantized again where it is not. The report is None if nothing was rounded.
    """
    scale_fmt: Literal["ue8m0", "fp32"] = "ue8m0" if e8m0 else "fp32"
    if stored == "fp8_block":
        _check_blocks(parts["weight"], parts["scale"])
        scale = fp8_scale(parts["scale"], e8m0=e8m0)
        if scale is not None:
            return {"weight": parts["weight"], "scale": scale}, None
        values = dequantize_fp8_block(parts["weight"], parts["scale"], dtype=torch.float32)
        result, report = quantize_fp8_block_with_report(values, scale_fmt=scale_fmt)
    elif stored == "nvfp4":
        weight, scale, scale_2 = (parts[part] for part in NEEDED["nvfp4"])
        result, report = nvfp4_to_fp8_block(weight, scale, scale_2.reshape(()), scale_fmt=scale_fmt)
    else:
        result, report = quantize_fp8_block_with_report(parts["weight"], scale_fmt=scale_fmt)
    return {"weight": result.weight, "scale": result.weight_scale}, report


def _check_blocks(weight: Tensor, scale: Tensor) -> None:
    expected = [-(-size // FP8_BLOCK) for size in weight.shape]
    if list(scale.shape) != expected:
        raise ShapeError(
            f"the block scale has shape {list(scale.shape)}, expected {expected}: one for each "
            f"{FP8_BLOCK}x{FP8_BLOCK} block. Per-tensor FP8 is not DeepSeek's; quantize it again"
        )


def fp8_scale(scale: Tensor, *, e8m0: bool) -> Tensor | None:
    """Stored block scales in the dtype that is wanted; None if they are no powers of two of E8M0's.

    Raises DtypeError for scales that are neither E8M0 nor FP32.
    """
    if scale.dtype == torch.float8_e8m0fnu:
        return scale if e8m0 else e8m0_to_fp32(scale)
    if scale.dtype != torch.float32:
        raise DtypeError(
            f"the block scale is {scale.dtype}; expected float8_e8m0fnu or float32. If the bytes "
            "are E8M0 exponents, label them so"
        )
    if not e8m0:
        return scale
    try:
        return fp32_to_e8m0(scale).view(torch.float8_e8m0fnu)
    except LosslessError:
        return None
