"""Inputs, options and global scales that are refused, by name."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_codec import (
    BackendError,
    CodecError,
    Divisor,
    DtypeError,
    LayoutError,
    NonFiniteError,
    ShapeError,
)

U8, E4M3, E8M0 = torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu
QUANTIZERS = ["quantize_nvfp4", "quantize_mxfp4", "quantize_fp8_block"]
DEQUANTIZERS = ["dequantize_nvfp4", "dequantize_mxfp4", "dequantize_fp8_block"]


def x() -> Tensor:
    return torch.arange(1.0, 129.0).view(2, 64)


def u8(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=U8)


def packed(name: str) -> list[Any]:
    """Legal arguments of a dequantizer: a weight [2, 64] and its scales."""
    return {
        "dequantize_nvfp4": [u8(2, 32), u8(2, 4).view(E4M3), torch.tensor(1.0)],
        "dequantize_mxfp4": [u8(2, 32), u8(2, 2).view(E8M0)],
        "dequantize_fp8_block": [u8(2, 64).view(E4M3), torch.ones(1, 1)],
    }[name]


@pytest.fixture(params=QUANTIZERS)
def quantize(request: pytest.FixtureRequest, codec: Any) -> Any:
    return getattr(codec, request.param)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, U8, E4M3])
def test_input_dtype(quantize: Any, dtype: torch.dtype) -> None:
    with pytest.raises(DtypeError, match=f"x is {dtype}, expected bfloat16, float16 or float32"):
        quantize(x().to(dtype))


def test_input_that_is_no_tensor(quantize: Any) -> None:
    with pytest.raises(DtypeError, match="x is list"):
        quantize([1.0])


def test_input_without_dimensions(quantize: Any) -> None:
    with pytest.raises(ShapeError, match="scalar"):
        quantize(torch.tensor(1.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_non_finite_value(quantize: Any, value: float) -> None:
    bad = x()
    bad[1, 63] = value
    with pytest.raises(NonFiniteError, match=r"1 NaN or Inf of 128 values.*nonfinite='saturate'"):
        quantize(bad)


def test_block_size(codec: Any) -> None:
    with pytest.raises(ShapeError, match=r"\(2, 60\).*multiple of 16; pass pad=True"):
        codec.quantize_nvfp4(x()[:, :60])
    with pytest.raises(ShapeError, match=r"\(2, 48\).*multiple of 32"):
        codec.quantize_mxfp4(x()[:, :48])
    for shape in ((2, 2, 32), (128,)):
        with pytest.raises(ShapeError, match="matrix"):
            codec.quantize_fp8_block(x().view(shape))


@pytest.mark.parametrize("block", [(0, 128), (128, -1), (128,), (1, 2, 3)])
def test_fp8_block(codec: Any, block: Any) -> None:
    with pytest.raises(ShapeError, match="two positive integers"):
        codec.quantize_fp8_block(x(), block=block)
    with pytest.raises(ShapeError, match="two positive integers"):
        codec.dequantize_fp8_block(*packed("dequantize_fp8_block"), block=block)


def test_misspelt_options(codec: Any) -> None:
    """A misspelt policy must not act as the other one."""
    with pytest.raises(CodecError, match="zero_amax is 'zero', expected one of: error, one"):
        codec.quantize_nvfp4(x(), zero_amax="zero")
    with pytest.raises(CodecError, match="scale_mode is 'up', expected one of: floor, ceil"):
        codec.quantize_mxfp4(x(), scale_mode="up")
    with pytest.raises(CodecError, match="scale_fmt is 'e8m0', expected one of: fp32, ue8m0"):
        codec.quantize_fp8_block(x(), scale_fmt="e8m0")
    with pytest.raises(CodecError, match="profile is 'nvidia', expected one of: modelopt"):
        codec.quantize_nvfp4(x(), profile="nvidia")


def test_misspelt_nonfinite_policy(quantize: Any) -> None:
    with pytest.raises(CodecError, match="nonfinite is 'zero', expected one of: error, saturate"):
        quantize(x(), nonfinite="zero")


def test_unknown_backend(quantize: Any) -> None:
    with pytest.raises(BackendError, match="'cuda', expected None or one of: reference"):
        quantize(x(), backend="cuda")


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0.5, DtypeError, "is a float.*direction"),
        (1, DtypeError, "is a int.*direction"),
        (None, DtypeError, "is a NoneType"),
        (torch.tensor(0.5, dtype=torch.float64), DtypeError, "float64, expected a torch.float32"),
        (torch.ones(2), ShapeError, r"\(2,\).*one global scale"),
    ],
    ids=["float", "int", "none", "float64", "two-elements"],
)
def test_global_scale_must_be_one_float32_with_a_direction(
    codec: Any, value: Any, error: type[CodecError], message: str
) -> None:
    if value is not None:  # None asks the quantizer to derive it
        with pytest.raises(error, match=message):
            codec.quantize_nvfp4(x(), weight_scale_2=value)
    with pytest.raises(error, match=message):
        codec.dequantize_nvfp4(*packed("dequantize_nvfp4")[:2], value)


def test_divisor_checks_what_it_wraps() -> None:
    with pytest.raises(DtypeError, match="bfloat16"):
        Divisor(torch.tensor(1.0).bfloat16())
    with pytest.raises(DtypeError, match=r"Divisor\.value is float"):
        Divisor(2.0)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="one element"):
        Divisor(torch.ones(2))
    with pytest.raises(DtypeError, match="weight_scale_2 is float"):
        Divisor.from_multiplier(0.5)  # type: ignore[arg-type]


def test_divisor_is_the_reciprocal_of_a_multiplier() -> None:
    assert Divisor.from_multiplier(torch.tensor([4.0])).value.item() == 0.25
    assert Divisor(torch.tensor([4.0])).to_multiplier().item() == 0.25


@pytest.mark.parametrize("name", DEQUANTIZERS)
def test_dequantizer_types(codec: Any, name: str) -> None:
    dequantize = getattr(codec, name)
    weight, *scales = packed(name)
    with pytest.raises(DtypeError, match="weight is list"):
        dequantize([], *scales)
    with pytest.raises(DtypeError, match=r"weight is torch\.int16"):
        dequantize(weight.view(torch.int16), *scales)
    with pytest.raises(DtypeError, match=r"dtype is torch\.float64"):
        dequantize(weight, *scales, dtype=torch.float64)
    with pytest.raises(DtypeError, match="weight_scale is a meta tensor"):
        dequantize(weight, scales[0].to("meta"), *scales[1:])
    with pytest.raises(DtypeError, match="weight is a meta tensor"):
        dequantize(weight.to("meta"), *scales)


@pytest.mark.parametrize("name", DEQUANTIZERS[:2])
def test_scales_in_another_layout(codec: Any, name: str) -> None:
    """Swizzled bytes read as linear ones decode to garbage of the right shape."""
    weight, scale, *rest = packed(name)
    dequantize = getattr(codec, name)
    with pytest.raises(ShapeError, match="1-D or padded scale is swizzled"):
        dequantize(weight, scale.flatten(), *rest)
    with pytest.raises(ShapeError, match="1-D or padded scale is swizzled"):
        dequantize(weight, u8(128, 4).view(scale.dtype), *rest)
    with pytest.raises(LayoutError, match=r"SimpleNamespace.*unswizzle_blockscale"):
        dequantize(weight, types.SimpleNamespace(), *rest)
    with pytest.raises(ShapeError, match="scalar"):
        dequantize(torch.tensor(1, dtype=U8), scale, *rest)
    with pytest.raises(ShapeError, match="K is no multiple of the block"):
        dequantize(weight[:, :4], scale[:, :0], *rest)


def test_scale_bytes_of_another_format(codec: Any) -> None:
    one = torch.tensor(1.0)
    with pytest.raises(DtypeError, match=r"float8_e8m0fnu, expected torch\.float8_e4m3fn"):
        codec.dequantize_nvfp4(u8(2, 32), u8(2, 4).view(E8M0), one)
    with pytest.raises(DtypeError, match=r"uint8, expected torch\.float8_e4m3fn"):
        codec.dequantize_nvfp4(u8(2, 32), u8(2, 4), one)
    with pytest.raises(DtypeError, match=r"float8_e4m3fn, expected torch\.float8_e8m0fnu"):
        codec.dequantize_mxfp4(u8(2, 32), u8(2, 2).view(E4M3))
    with pytest.raises(DtypeError, match=r"uint8.*view raw E8M0 bytes"):
        codec.dequantize_fp8_block(u8(2, 64).view(E4M3), u8(1, 1))


def test_fp8_scale_grid(codec: Any) -> None:
    with pytest.raises(ShapeError, match=r"\(1, 4\), expected \(2, 5\) for weight \(130, 576\)"):
        codec.dequantize_fp8_block(u8(130, 576).view(E4M3), torch.ones(1, 4))
    with pytest.raises(ShapeError, match="matrix"):
        codec.dequantize_fp8_block(u8(64).view(E4M3), torch.ones(1, 1))


def test_errors_are_also_the_builtin_they_resemble() -> None:
    assert issubclass(ShapeError, ValueError)
    assert issubclass(DtypeError, TypeError)
    assert issubclass(NonFiniteError, ValueError)
