"""Profile "ieee" is ours: its definition, in numpy, with ml_dtypes for the two casts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_codec import quantize_nvfp4


def define_ieee(x: Tensor, scale_2: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scale bytes by docs/formats.md; every operation below is in float32."""
    blocks = x.float().numpy().reshape(-1, 16)
    amax = np.abs(blocks).max(-1)
    with np.errstate(over="ignore", divide="ignore"):
        scale = amax / (np.float32(6) * scale_2)
    scale = np.clip(scale, np.float32(2**-9), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    with np.errstate(over="ignore"):
        values = blocks / (scale.astype(np.float32) * scale_2)[:, None]
    return values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8), scale.view(np.uint8)


def _inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    normal = torch.randn(64, 256, generator=generator)
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    patterns = patterns[patterns.isfinite()]
    return {
        "normal": normal,
        "heavy": normal**5,
        "tiny": normal * 2.0**-100,
        "huge": normal * 2.0**125,
        "bf16": (0.02 * normal).bfloat16(),
        "fp16": normal.half(),
        "patterns": patterns.view(-1, 16),
        "zeros": torch.tensor([0.0, -0.0, 1e-4, -1e-4] * 4 + [0.0, -0.0] * 8 + [1.0] * 16),
    }


@pytest.mark.parametrize("name", list(_inputs()))
def test_ieee_follows_its_definition(name: str) -> None:
    x = _inputs()[name]
    found = quantize_nvfp4(x, profile="ieee", backend="reference")
    scale_2 = np.float32(x.abs().max().float().numpy()) / np.float32(2688)
    codes, scale = define_ieee(x, scale_2)
    assert isinstance(found.weight_scale_2, Tensor)
    assert found.weight_scale_2.item() == scale_2
    found_scale = found.weight_scale.view(torch.uint8).flatten()
    assert torch.equal(found_scale, torch.from_numpy(scale))
    packed = torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4)
    assert torch.equal(found.weight.view(-1, 8), packed)


def test_ieee_landmarks() -> None:
    x = torch.zeros(3, 16)
    x[0, :4] = torch.tensor([6 * 448.0, -0.0, -1.0, 1.0])  # the amax block
    x[1, 1] = -0.0  # a block of zeros
    x[2, 0] = 6 * 2.0**-11  # its scale is below 2^-9
    found = quantize_nvfp4(x, profile="ieee", backend="reference")
    assert found.weight_scale.view(torch.uint8).flatten().tolist() == [0x7E, 0x01, 0x01]
    assert found.weight[0, :2].tolist() == [0x87, 0x08]  # 6, -0, -0 (rounded), 0 (rounded)
    assert found.weight[1, 0].item() == 0x80
    assert found.weight[2, 0].item() == 0x03  # 1.5: a quarter of 6


def test_ieee_differs_from_modelopt_only_in_zeros() -> None:
    x = _inputs()["heavy"]
    ieee, modelopt = (
        quantize_nvfp4(x, profile=name, backend="reference") for name in ("ieee", "modelopt")
    )
    assert torch.equal(ieee.weight, modelopt.weight)
    assert torch.equal(ieee.weight_scale.view(torch.uint8), modelopt.weight_scale.view(torch.uint8))
