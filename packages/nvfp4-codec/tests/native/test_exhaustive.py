"""Every input there is, where inputs can be counted: native equals the reference byte for byte."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from nvfp4_codec import native, reference
from nvfp4_codec.scales import get_profile

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# From the float32 subnormals to where every product overflows; the powers of two in between
# are exact, the others round.
GLOBAL_SCALES = (1e-45, 1e-40, 2.0**-126, 3.1e-5, 1 / 2688, 1.0, 1234.5, 2.0**20, 1e36, 3e38)


def assert_same(found: Tensor, expected: Tensor, what: str = "") -> None:
    found, expected = found.view(torch.uint8), expected.view(torch.uint8)
    wrong = (found != expected).nonzero()
    assert not len(wrong), f"{what}: {len(wrong)} bytes differ, first at {wrong[0].tolist()}"


@cache
def all_patterns(dtype: torch.dtype) -> Tensor:
    """All 65,536 patterns, in order and shuffled (so that blocks mix magnitudes)."""
    patterns = torch.arange(65536).to(torch.int16)
    shuffled = patterns[torch.randperm(65536, generator=torch.Generator().manual_seed(1))]
    return torch.cat((patterns, shuffled)).view(dtype).view(512, 256)


@cache
def quantized(dtype: torch.dtype, profile: str, global_scale: float) -> tuple[Tensor, Tensor]:
    x = all_patterns(dtype)
    weight = torch.empty(512, 128, dtype=torch.uint8)
    scale = torch.empty(512, 16, dtype=torch.uint8)
    reference.quantize_nvfp4(x, global_scale, get_profile(profile), True, weight, scale)
    return weight, scale


@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
@pytest.mark.parametrize("profile", sorted(native.NVFP4_PROFILES))
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_quantize_nvfp4_all_patterns(
    isa: str, dtype: torch.dtype, profile: str, global_scale: float
) -> None:
    global_scale = float(torch.tensor(global_scale))
    weight, scale = (torch.empty_like(t) for t in quantized(dtype, profile, global_scale))
    native.quantize_nvfp4(
        all_patterns(dtype), global_scale, get_profile(profile), True, weight, scale, isa=isa
    )
    for found, expected in zip(
        (weight, scale), quantized(dtype, profile, global_scale), strict=True
    ):
        assert_same(found, expected)


@pytest.mark.parametrize("byte", [1, 7, 8, 9, 0x38, 0x7E])
def test_quantize_nvfp4_around_every_threshold(isa: str, byte: int) -> None:
    """float32 has too many values, but only neighbours of a rounding bound can go wrong."""
    global_scale, profile = float(torch.tensor(7.3e-4)), get_profile("modelopt")
    step = reference.decode_e4m3(torch.tensor([byte], dtype=torch.uint8)) * global_scale
    bounds = step * torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = bounds.view(torch.int32)[:, None] + torch.arange(-8, 8, dtype=torch.int32)
    x = torch.stack((near.view(torch.float32), -near.view(torch.float32))).view(-1, 16)
    # The last element of each block sets its scale byte.
    x[:, 15] = 6 * step
    expected = torch.empty(len(x), 8, dtype=torch.uint8), torch.empty(len(x), 1, dtype=torch.uint8)
    found = tuple(torch.empty_like(t) for t in expected)
    reference.quantize_nvfp4(x, global_scale, profile, False, *expected)
    native.quantize_nvfp4(x, global_scale, profile, False, *found, isa=isa)
    assert (expected[1] == byte).all()
    assert_same(found[0], expected[0])
    assert_same(found[1], expected[1])


@pytest.mark.parametrize("mode", ["floor", "ceil", "rceil", "even"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_quantize_mxfp4_all_patterns(isa: str, dtype: torch.dtype, mode: str) -> None:
    x = all_patterns(dtype)
    expected = torch.empty(512, 128, dtype=torch.uint8), torch.empty(512, 8, dtype=torch.uint8)
    found = tuple(torch.empty_like(t) for t in expected)
    reference.quantize_mxfp4(x, mode, True, *expected)  # type: ignore[arg-type]
    native.quantize_mxfp4(x, mode, True, *found, isa=isa)  # type: ignore[arg-type]
    assert_same(found[0], expected[0], "weight")
    assert_same(found[1], expected[1], "weight_scale")


@pytest.mark.parametrize("ue8m0", [False, True], ids=["fp32", "ue8m0"])
@pytest.mark.parametrize("block", [(128, 128), (1, 16), (3, 7)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_quantize_fp8_block_all_patterns(
    isa: str, dtype: torch.dtype, block: tuple[int, int], ue8m0: bool
) -> None:
    x = all_patterns(dtype)
    grid = math.ceil(512 / block[0]), math.ceil(256 / block[1])
    scales = torch.empty(grid, dtype=torch.uint8 if ue8m0 else torch.float32)
    expected = torch.empty(512, 256, dtype=torch.uint8), scales
    found = tuple(torch.empty_like(t) for t in expected)
    reference.quantize_fp8_block(x, block, ue8m0, True, *expected)
    native.quantize_fp8_block(x, block, ue8m0, True, *found, isa=isa)
    assert_same(found[0], expected[0], "weight")
    assert_same(found[1], expected[1], "weight_scale")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("divide", [False, True], ids=["multiply", "divide"])
def test_dequantize_nvfp4_all_scales_and_codes(isa: str, divide: bool, dtype: torch.dtype) -> None:
    weight = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    weight = weight.repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1)
    for global_scale in (*GLOBAL_SCALES, -1.5, math.inf, math.nan):
        expected, found = torch.empty(256, 16, dtype=dtype), torch.empty(256, 16, dtype=dtype)
        value = float(torch.tensor(global_scale))
        reference.dequantize_nvfp4(weight, scale, value, divide, expected)
        native.dequantize_nvfp4(weight, scale, value, divide, found, isa=isa)
        assert_same(found, expected, f"global scale {global_scale}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_mxfp4_all_scales_and_codes(isa: str, dtype: torch.dtype) -> None:
    weight = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).view(256, 16)
    expected, found = torch.empty(256, 512, dtype=dtype), torch.empty(256, 512, dtype=dtype)
    reference.dequantize_mxfp4(weight, scale, expected)
    native.dequantize_mxfp4(weight, scale, found, isa=isa)
    assert_same(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [(2, 256), (128, 256), (2, 8), (1, 3)], ids=str)
def test_dequantize_fp8_block_all_bytes(
    isa: str, block: tuple[int, int], dtype: torch.dtype
) -> None:
    """All 256 bytes under every E8M0 scale and under scales that round, overflow or are odd."""
    powers = torch.exp2(torch.arange(-149, 128).float())
    odd = torch.tensor([0.0, -0.0, 1e-45, 3e38, 1 / 3, -1.1, math.inf, -math.inf, math.nan])
    values = torch.cat((powers, odd, powers * 1.37))
    num_scales = len(values)
    weight = torch.arange(256, dtype=torch.uint8).repeat(num_scales * block[0], 1)
    scale = values.repeat_interleave(math.ceil(256 / block[1])).view(num_scales, -1)
    expected, found = (torch.empty(weight.shape, dtype=dtype) for _ in range(2))
    reference.dequantize_fp8_block(weight, scale, block, expected)
    native.dequantize_fp8_block(weight, scale, block, found, isa=isa)
    assert_same(found, expected)


def test_mxfp4_to_nvfp4_all_scales(isa: str) -> None:
    weight = torch.zeros(256, 48, dtype=torch.uint8)
    weight[:, :16] = torch.arange(16, dtype=torch.uint8) * 17
    weight[:, 16:32] = 0x80  # zeros of both signs: no scale can change them
    weight[:, 47] = 0x10  # one element that is not zero
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 3)
    for shift in (-300, 0, 9, 100, 127, 200, 247, 300):
        scale_out = torch.empty(256, 6, dtype=torch.uint8)
        lossless = torch.empty(256, 3, dtype=torch.bool)
        copy = torch.empty_like(weight)
        lossy = native.mxfp4_to_nvfp4(weight, scale, shift, copy, scale_out, lossless, isa=isa)
        exponent = scale.int() - shift
        value = torch.exp2(exponent.clamp(-9, 8).float())
        value[255] = math.nan
        exact = (exponent >= -9) & (exponent <= 8)
        exact[:, 1] = True
        exact[255] = True  # NaN stays NaN
        decoded = reference.decode_e4m3(scale_out)
        assert torch.equal(decoded.nan_to_num(-1), value.repeat_interleave(2, 1).nan_to_num(-1))
        assert torch.equal(copy, weight)
        assert torch.equal(lossless, exact)
        assert lossy == int((~exact).sum())


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_amax_each_pattern_alone(isa: str, dtype: torch.dtype) -> None:
    patterns = torch.arange(0, 65536, 37).to(torch.int16).view(dtype)
    for pattern in (*patterns, torch.tensor(math.inf), torch.tensor(math.nan)):
        x = torch.full((1, 67), 0.0, dtype=dtype)
        x[0, 66] = pattern
        assert native.amax(x, isa=isa, threads=1) == reference.amax(x)
