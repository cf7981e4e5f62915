"""Wrong readings of a sound checkpoint, to show in numbers what garbled output looks like.

Both are mistakes that serving code has made; neither raises an error anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_codec import dequantize_mxfp4, dequantize_nvfp4
from nvfp4_codec.checkpoint import Checkpoint, Family
from nvfp4_codec.checkpoint.values import load_nvfp4, load_values


def e8m0_as_e4m3(checkpoint: Checkpoint, family: Family) -> Tensor:
    """`load_values`, with the bytes of E8M0 scales taken for E4M3: 2^-7 becomes 256."""
    if family.scale is None or family.scale.dtype != "F8_E8M0":
        return load_values(checkpoint, family)
    assert family.block is not None
    weight = checkpoint.tensor(family.weight.name)
    scale = checkpoint.tensor(family.scale.name).view(torch.float8_e4m3fn).float()
    if family.kind == "mxfp4":
        one = torch.full(scale.shape, 127, dtype=torch.uint8)
        weight = dequantize_mxfp4(weight, one, dtype=torch.float32)
    rows, columns = family.block
    expanded = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return weight.float() * expanded[: weight.shape[0], : weight.shape[1]]


def scales_of_one(checkpoint: Checkpoint, family: Family) -> Tensor:
    """`load_values`, with every NVFP4 block scale one; weight_scale_2 is applied."""
    if family.kind != "nvfp4":
        return load_values(checkpoint, family)
    weight, scale, scale_2 = load_nvfp4(checkpoint, family)
    ones = torch.ones(scale.shape).to(scale.dtype)
    return dequantize_nvfp4(weight, ones, scale_2, dtype=torch.float32)
