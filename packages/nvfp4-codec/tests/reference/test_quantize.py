"""MXFP4 and FP8-block quantization by their definitions, in numpy; and against torchao, NVIDIA."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

MX_MODES = ["floor", "ceil", "rceil", "even"]


def _matrix(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    normal = torch.randn(48, 256, generator=generator)
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    patterns = patterns[patterns.isfinite()]
    made = {
        "normal": normal,
        "heavy-tailed": normal**5,
        "row-scaled": normal * torch.exp2(torch.linspace(-120, 120, 48)).unsqueeze(1),
        "subnormal": normal * 2.0**-130,
        "huge": normal * (3.4e38 / normal.abs().max()),
        "zeros": normal * (torch.arange(48) % 2).unsqueeze(1),
        "bf16": normal.bfloat16(),
        "fp16": normal.half(),
        "all-bf16": patterns.view(-1, 64),
    }
    return made[name]


INPUTS = ["normal", "heavy-tailed", "row-scaled", "subnormal", "huge", "zeros"]
INPUTS += ["bf16", "fp16", "all-bf16"]


@pytest.fixture(params=INPUTS)
def x(request: pytest.FixtureRequest) -> Tensor:
    return _matrix(request.param)


def _unpack(weight: Tensor) -> Tensor:
    return torch.stack((weight & 15, weight >> 4), -1).flatten(-2)


def _mx_byte(amax: np.ndarray, mode: str) -> np.ndarray:
    """E8M0 bytes from the definitions, in float64, where frexp and 6 * 2^k are exact."""
    significand, exponent = np.frexp(amax.astype(np.float64))
    floor = exponent - 1  # amax = m * 2^floor, 1 <= m < 2
    m = 2 * significand
    step = {
        "floor": 0,
        "ceil": m > 1,
        "rceil": amax.astype(np.float64) > 6 * np.exp2(floor - 2.0),
        "even": np.round(2 * m) / 2 >= 2,  # to one mantissa bit, ties to even
    }[mode]
    byte = np.clip(floor - 2 + step, -127, 127) + 127
    return np.where(amax == 0, 0, byte).astype(np.uint8)


@pytest.mark.parametrize("mode", MX_MODES)
def test_mxfp4_follows_its_definition(codec: Any, x: Tensor, mode: str) -> None:
    found = codec.quantize_mxfp4(x, scale_mode=mode)
    blocks = x.float().numpy().astype(np.float64).reshape(*x.shape[:-1], -1, 32)
    byte = _mx_byte(np.abs(blocks).max(-1), mode)
    assert torch.equal(found.weight_scale.view(torch.uint8), torch.from_numpy(byte))
    values = np.ldexp(blocks, 127 - byte[..., None].astype(np.int32))
    codes = values.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert torch.equal(_unpack(found.weight), torch.from_numpy(codes.reshape(x.shape)))


def _amax_boundaries() -> Tensor:
    """2^k, 1.5 * 2^k and 1.75 * 2^k, with their neighbours, over float32's whole range."""
    powers = np.exp2(np.arange(-149.0, 128.0))
    x = np.concatenate((powers, 1.5 * powers, 1.75 * powers)).astype(np.float32)
    x = np.concatenate((np.nextafter(x, np.float32(0)), x, np.nextafter(x, np.float32(3e38))))
    return torch.from_numpy(x[np.isfinite(x) & (x > 0)])


@pytest.mark.parametrize("mode", MX_MODES)
def test_mxfp4_scale_at_every_boundary(codec: Any, mode: str) -> None:
    amax = _amax_boundaries()
    x = torch.zeros(amax.numel(), 32)
    x[:, 5] = -amax
    found = codec.quantize_mxfp4(x, scale_mode=mode).weight_scale.view(torch.uint8).flatten()
    assert torch.equal(found, torch.from_numpy(_mx_byte(amax.numpy(), mode)))


def test_mxfp4_rceil_is_nvidias_conversion_of_amax_over_six(
    codec: Any, cuda: Callable[[str, Tensor], Tensor]
) -> None:
    """Where the quotient is normal: a subnormal one may round down to a power of two."""
    amax = _amax_boundaries()
    amax = amax[amax >= 6 * 2.0**-126]
    x = amax.unsqueeze(1).expand(-1, 32)
    found = codec.quantize_mxfp4(x, scale_mode="rceil").weight_scale.view(torch.uint8).flatten()
    assert torch.equal(found, cuda("encode_e8m0_ceil", amax / torch.tensor(6.0)))


@pytest.fixture(scope="module")
def torchao_mx() -> Callable[[Tensor, str], tuple[Tensor, Tensor]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx

    def quantize(x: Tensor, mode: str) -> tuple[Tensor, Tensor]:
        scale, weight = to_mx(
            x, torch.float4_e2m1fn_x2, 32, scaling_mode=ScaleCalculationMode(mode)
        )
        return weight, scale.view(torch.uint8)

    return quantize


@pytest.mark.parametrize("mode", MX_MODES)
@pytest.mark.parametrize(
    "name", [name for name in INPUTS if name not in ("fp16", "subnormal", "zeros")]
)
def test_mxfp4_agrees_with_torchao(
    codec: Any, name: str, mode: str, torchao_mx: Callable[[Tensor, str], tuple[Tensor, Tensor]]
) -> None:
    """Blocks of scale byte 0 are left out: torchao divides them by 2^-126, or by 1 in "rceil"."""
    x = _matrix(name).contiguous()
    weight, scale = torchao_mx(x, mode)
    found = codec.quantize_mxfp4(x, scale_mode=mode)
    assert torch.equal(found.weight_scale.view(torch.uint8), scale)
    normal = (scale > 0).repeat_interleave(16, -1)
    assert normal.sum() > normal.numel() / 2
    assert torch.equal(found.weight[normal], weight[normal])


def test_mxfp4_landmarks(codec: Any) -> None:
    """An amax of 7: "floor" saturates it to 6, "rceil" scales by two and gives 8."""
    x = torch.full((1, 32), 7.0)
    floor, rceil = (codec.quantize_mxfp4(x, scale_mode=mode) for mode in ("floor", "rceil"))
    assert floor.weight_scale.view(torch.uint8).item() == 127
    assert rceil.weight_scale.view(torch.uint8).item() == 128
    assert codec.dequantize_mxfp4(*floor)[0, 0].item() == 6.0
    assert codec.dequantize_mxfp4(*rceil)[0, 0].item() == 8.0


def test_mxfp4_keeps_the_sign_of_zero(codec: Any) -> None:
    x = torch.tensor([[0.0, -0.0, -1e-6, 1.0] + [0.0] * 28, [-0.0] * 32])
    found = codec.quantize_mxfp4(x)
    assert _unpack(found.weight)[0, :4].tolist() == [0, 8, 8, 6]
    assert found.weight_scale.view(torch.uint8).flatten().tolist() == [125, 0]
    assert codec.dequantize_mxfp4(*found)[1].signbit().all()


def _fp8_definition(
    x: Tensor, block: tuple[int, int], power_of_two: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and float32 scales, one block at a time; divisions are in float32."""
    values = x.float().numpy()
    grid = (-(-x.shape[0] // block[0]), -(-x.shape[1] // block[1]))
    scales = np.ones(grid, dtype=np.float32)
    codes = np.zeros(values.shape, dtype=np.uint8)
    for row, column in np.ndindex(grid):
        part = np.s_[
            row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]
        ]
        scale = np.abs(values[part]).max() / np.float32(448)
        scale = np.float32(1) if scale == 0 else scale
        if power_of_two:
            significand, exponent = np.frexp(scale)
            scale = np.exp2(np.float32(max(exponent - (significand == 0.5), -127)))
        scales[row, column] = scale
        scaled = np.clip(values[part] / scale, np.float32(-448), np.float32(448))
        codes[part] = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes, scales


@pytest.mark.parametrize("scale_fmt", ["fp32", "ue8m0"])
@pytest.mark.parametrize("block", [(128, 128), (1, 128), (30, 7), (1000, 1000)])
def test_fp8_block_follows_its_definition(
    codec: Any, x: Tensor, block: tuple[int, int], scale_fmt: str
) -> None:
    x = x[:48]
    found = codec.quantize_fp8_block(x, block=block, scale_fmt=scale_fmt)
    codes, scales = _fp8_definition(x, block, scale_fmt == "ue8m0")
    assert found.block == block
    dtype = torch.float32 if scale_fmt == "fp32" else torch.float8_e8m0fnu
    assert found.weight_scale.dtype == dtype
    assert torch.equal(found.weight_scale.float(), torch.from_numpy(scales))
    assert torch.equal(found.weight.view(torch.uint8), torch.from_numpy(codes))


def test_fp8_ue8m0_is_the_next_power_of_two_never_a_truncation(codec: Any) -> None:
    amax = _amax_boundaries()
    amax = amax[amax >= 448 * 2.0**-126]  # below, amax / 448 may round down
    found = codec.quantize_fp8_block(amax.unsqueeze(1), block=(1, 1), scale_fmt="ue8m0")
    scale = found.weight_scale.float().flatten().double()
    assert (448 * scale >= amax).all()
    assert (448 * scale / 2 < amax).all()


def test_fp8_tiny_block_has_scale_one(codec: Any) -> None:
    """448 * 2^-150 and below: amax / 448 rounds to zero, and so do the codes."""
    x = torch.tensor([[224 * 2.0**-149, -(2.0**-149)], [225 * 2.0**-149, 0.0]])
    found = codec.quantize_fp8_block(x, block=(1, 2))
    assert found.weight_scale.flatten().tolist() == [1.0, 2.0**-149]
    assert found.weight.view(torch.uint8).tolist() == [[0x00, 0x80], [0x76, 0x00]]


@pytest.mark.parametrize("chunk", [1, 300, 5000])
def test_chunks_do_not_show(codec: Any, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = _matrix("heavy-tailed")[:, :192].contiguous()

    def everything() -> list[Tensor]:
        nvfp4 = codec.quantize_nvfp4(x)
        mxfp4 = codec.quantize_mxfp4(x)
        fp8 = codec.quantize_fp8_block(x, block=(5, 100))
        decoded = [
            codec.dequantize_nvfp4(*nvfp4),
            codec.dequantize_mxfp4(*mxfp4),
            codec.dequantize_fp8_block(*fp8, block=(5, 100)),
        ]
        return [
            t.contiguous().view(torch.uint8) for t in (*nvfp4, *mxfp4, *fp8, *decoded) if t.ndim
        ]

    whole = everything()
    monkeypatch.setattr("nvfp4_codec.reference.CHUNK", chunk)
    assert all(torch.equal(a, b) for a, b in zip(everything(), whole, strict=True))
