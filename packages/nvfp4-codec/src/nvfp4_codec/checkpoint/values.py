"""Read a family's values as floats, whatever format it is stored in."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import CheckpointError, CodecError
from ..ops import dequantize_fp8_block, dequantize_mxfp4, dequantize_nvfp4
from ..tensors import Divisor, GlobalScale, MXFP4Tensor, NVFP4Tensor
from .families import FLOATS, Family
from .reader import Checkpoint
from .structure import check_complete, located


def is_numeric(family: Family) -> bool:
    """True if the family stores real values (not indices, masks or unknown packings)."""
    return family.kind != "plain" or family.weight.dtype in FLOATS


def load_values(
    checkpoint: Checkpoint, family: Family, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The family's values as ``dtype``, in its logical shape.

    Raises CheckpointError naming tensor, file, what was found and expected.
    """
    info = family.weight
    try:
        if family.kind == "plain":
            if info.dtype not in FLOATS:
                raise CheckpointError(
                    f"dtype {info.dtype} stores no plain floats; expected one of "
                    f"{', '.join(FLOATS)}, or a weight with its scales beside it."
                )
            return checkpoint.tensor(info.name).to(dtype)
        check_complete(family)
        if family.kind == "nvfp4":
            weight, scale, scale_2 = load_nvfp4(checkpoint, family)
            return dequantize_nvfp4(weight, scale, scale_2, dtype=dtype).reshape(family.shape)
        if family.kind == "mxfp4":
            weight, scale = load_mxfp4(checkpoint, family)
            return dequantize_mxfp4(weight, scale, dtype=dtype).reshape(family.shape)
        return _load_fp8(checkpoint, family, dtype)
    except CheckpointError as error:
        if error.tensor is not None:
            raise
        raise located(error, family) from None
    except CodecError as error:
        raise located(error, family) from None


def load_subject(
    checkpoint: Checkpoint, family: Family, max_rows: int = 1024
) -> NVFP4Tensor | MXFP4Tensor | Tensor:
    """The family as explain_diff wants it: with its scales where they are per block.

    Only the first ``max_rows`` rows of a matrix, which are enough to tell conventions apart.
    """
    if family.kind == "nvfp4" and len(family.shape) == 2:
        check_complete(family)
        weight, scale, global_scale = load_nvfp4(checkpoint, family)
        return NVFP4Tensor(weight[:max_rows], scale[:max_rows], global_scale)
    if family.kind == "mxfp4" and len(family.shape) == 2:
        check_complete(family)
        weight, scale = load_mxfp4(checkpoint, family)
        return MXFP4Tensor(weight[:max_rows], scale[:max_rows])
    values = load_values(checkpoint, family)
    return values[:max_rows] if values.ndim == 2 else values


def load_nvfp4(checkpoint: Checkpoint, family: Family) -> tuple[Tensor, Tensor, GlobalScale]:
    """(weight uint8, weight_scale float8_e4m3fn, global scale) of a complete NVFP4 family."""
    assert family.scale is not None
    assert family.global_scale is not None
    weight = checkpoint.tensor(family.weight.name).view(torch.uint8)
    scale = checkpoint.tensor(family.scale.name).view(torch.float8_e4m3fn)
    value = checkpoint.tensor(family.global_scale.name).reshape(())
    return weight, scale, Divisor(value) if family.divides else value


def load_mxfp4(checkpoint: Checkpoint, family: Family) -> tuple[Tensor, Tensor]:
    """(weight uint8 [.., N, K/2], weight_scale float8_e8m0fnu) of a complete MXFP4 family."""
    assert family.scale is not None
    weight = checkpoint.tensor(family.weight.name).view(torch.uint8)
    scale = checkpoint.tensor(family.scale.name).view(torch.float8_e8m0fnu)
    return weight.reshape(*family.shape[:-1], family.shape[-1] // 2), scale


def _load_fp8(checkpoint: Checkpoint, family: Family, dtype: torch.dtype) -> Tensor:
    assert family.scale is not None
    assert family.block is not None
    assert family.scale_shape is not None
    weight = checkpoint.tensor(family.weight.name)
    scale = checkpoint.tensor(family.scale.name)
    if scale.dtype != torch.float8_e8m0fnu:
        scale = scale.float()
    scale = scale.reshape(family.scale_shape)
    if weight.ndim == 2:
        return dequantize_fp8_block(weight, scale, block=family.block, dtype=dtype)
    out = torch.empty(family.shape, dtype=dtype)
    matrices = out.view(-1, *family.shape[-2:])
    pairs = zip(weight.view(-1, *weight.shape[-2:]), scale.view(-1, *scale.shape[-2:]), strict=True)
    for matrix, (part, part_scale) in zip(matrices, pairs, strict=True):
        dequantize_fp8_block(part, part_scale, block=family.block, dtype=dtype, out=matrix)
    return out
