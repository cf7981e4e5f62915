"""E2M1 and E4M3: every code, every bfloat16 pattern, and float32 at every rounding boundary."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_codec import CodecError, DtypeError
from nvfp4_codec.formats import (
    E2M1,
    E4M3,
    E4M3_MIN_NORMAL,
    E4M3_MIN_SUBNORMAL,
    ElementFormat,
    Rounding,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
)

ROUNDINGS = get_args(Rounding)
E2M1_CODES = torch.arange(16, dtype=torch.uint8)
E4M3_CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def assert_same_floats(found: Tensor, expected: Tensor) -> None:
    """Equal bit for bit, except that any NaN equals any other."""
    assert torch.equal(found.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(bits(found[number]), bits(expected[number]))


def test_e2m1_decodes_to_the_sixteen_values_of_the_specification() -> None:
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = torch.tensor(values + [-value for value in values])
    assert torch.equal(bits(decode_e2m1(E2M1_CODES)), bits(expected))


@pytest.mark.parametrize(
    ("code", "value"),
    [
        pytest.param(0x01, 2.0**-9, id="smallest-subnormal"),
        pytest.param(0x07, 7 * 2.0**-9, id="largest-subnormal"),
        pytest.param(0x08, 2.0**-6, id="smallest-normal"),
        pytest.param(0x38, 1.0, id="one"),
        pytest.param(0x7E, 448.0, id="largest"),
        pytest.param(0xFE, -448.0, id="most-negative"),
    ],
)
def test_e4m3_landmarks(code: int, value: float) -> None:
    assert decode_e4m3(torch.tensor([code], dtype=torch.uint8)).item() == value


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_e4m3_top_codes_are_nan_not_480(code: int) -> None:
    assert decode_e4m3(torch.tensor([code], dtype=torch.uint8)).isnan().item()


def test_constants() -> None:
    assert (E2M1.max_value, E4M3.max_value) == (6.0, 448.0)
    assert (E4M3.value(0x08), E4M3.value(0x01)) == (E4M3_MIN_NORMAL, E4M3_MIN_SUBNORMAL)
    assert np.isnan(E4M3.value(0x7F))
    assert np.isnan(E4M3.value(0xFF))


def test_decoding_agrees_with_ml_dtypes() -> None:
    e2m1 = E2M1_CODES.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    e4m3 = E4M3_CODES.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert_same_floats(decode_e2m1(E2M1_CODES), torch.from_numpy(e2m1))
    assert_same_floats(decode_e4m3(E4M3_CODES), torch.from_numpy(e4m3))


def test_decoding_agrees_with_nvidia(cuda: Callable[[str, Tensor], Tensor]) -> None:
    assert_same_floats(decode_e2m1(E2M1_CODES), cuda("decode_e2m1", E2M1_CODES))
    assert_same_floats(decode_e4m3(E4M3_CODES), cuda("decode_e4m3", E4M3_CODES))


def test_e4m3_accepts_the_float8_dtype() -> None:
    float8 = E4M3_CODES.view(torch.float8_e4m3fn)
    assert_same_floats(decode_e4m3(float8), decode_e4m3(E4M3_CODES))
    assert_same_floats(decode_e4m3(float8), float8.float())


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_every_code_survives_a_round_trip(rounding: Rounding) -> None:
    assert torch.equal(encode_e2m1(decode_e2m1(E2M1_CODES), rounding=rounding), E2M1_CODES)
    encoded = encode_e4m3(decode_e4m3(E4M3_CODES), rounding=rounding)
    number = E4M3_CODES & 0x7F != 0x7F
    assert torch.equal(encoded[number], E4M3_CODES[number])
    assert (encoded[~number] & 0x7F == 0x7F).all()


@pytest.fixture(params=["boundaries", "all-bf16"])
def numbers(
    request: pytest.FixtureRequest,
    fmt: ElementFormat,
    critical: Callable[[ElementFormat], Tensor],
    all_bf16: Tensor,
) -> Tensor:
    x = critical(fmt) if request.param == "boundaries" else all_bf16
    return x[~x.isnan()]


@pytest.fixture(params=[E2M1, E4M3], ids=lambda fmt: fmt.name)
def fmt(request: pytest.FixtureRequest) -> ElementFormat:
    return request.param  # type: ignore[no-any-return]


def encode(fmt: ElementFormat, x: Tensor, rounding: Rounding) -> Tensor:
    encoder = encode_e2m1 if fmt is E2M1 else encode_e4m3
    return encoder(x, rounding=rounding)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_encoding_finds_the_right_neighbour(
    fmt: ElementFormat,
    numbers: Tensor,
    rounding: Rounding,
    nearest: Callable[[ElementFormat, Tensor, str], Tensor],
) -> None:
    magnitude = nearest(fmt, numbers, rounding).clamp(max=fmt.max_code)
    sign = torch.signbit(numbers).int() * fmt.sign_bit
    assert torch.equal(encode(fmt, numbers, rounding).int(), magnitude | sign)


_GFLOAT_FORMATS = {
    "E2M1": gfloat.formats.format_info_ocp_e2m1,
    "E4M3": gfloat.formats.format_info_ocp_e4m3,
}
_GFLOAT_MODES = {
    "nearest_even": (gfloat.RoundMode.TiesToEven, gfloat.RoundMode.TiesToEven),
    "ties_away": (gfloat.RoundMode.TiesToAway, gfloat.RoundMode.TiesToAway),
    "toward_zero": (gfloat.RoundMode.TowardZero, gfloat.RoundMode.TowardZero),
    "away": (gfloat.RoundMode.TowardPositive, gfloat.RoundMode.TowardNegative),
}


@pytest.mark.parametrize("rounding", list(_GFLOAT_MODES))
def test_encoding_agrees_with_gfloat(
    fmt: ElementFormat,
    critical: Callable[[ElementFormat], Tensor],
    rounding: Rounding,
) -> None:
    x = critical(fmt)
    info = _GFLOAT_FORMATS[fmt.name]
    for mode, side in zip(_GFLOAT_MODES[rounding], (~x.signbit(), x.signbit()), strict=True):
        rounded = gfloat.round_ndarray(info, x[side].numpy().astype(np.float64), mode, sat=True)
        codes = gfloat.encode_ndarray(info, rounded)
        assert torch.equal(encode(fmt, x[side], rounding), torch.from_numpy(codes.astype(np.uint8)))


def test_encoding_agrees_with_ml_dtypes(numbers: Tensor, fmt: ElementFormat) -> None:
    """ml_dtypes saturates E2M1; its E4M3 overflows to NaN."""
    dtype = ml_dtypes.float4_e2m1fn if fmt is E2M1 else ml_dtypes.float8_e4m3fn
    theirs = torch.from_numpy(numbers.numpy().astype(dtype).view(np.uint8))
    ours = encode_e2m1(numbers) if fmt is E2M1 else encode_e4m3(numbers, overflow="nan")
    assert torch.equal(ours, theirs)


def test_encoding_agrees_with_nvidia(
    numbers: Tensor, fmt: ElementFormat, cuda: Callable[[str, Tensor], Tensor]
) -> None:
    if fmt is E2M1:
        assert torch.equal(encode_e2m1(numbers), cuda("encode_e2m1", numbers))
    else:
        assert torch.equal(encode_e4m3(numbers), cuda("encode_e4m3_saturate", numbers))
        unsaturated = encode_e4m3(numbers, overflow="nan")
        assert torch.equal(unsaturated, cuda("encode_e4m3_nan", numbers))


def test_e4m3_encoding_agrees_with_torch_inside_the_range(
    critical: Callable[[ElementFormat], Tensor],
) -> None:
    """Outside it torch's cast saturates or gives NaN, depending on its version and device."""
    x = critical(E4M3)
    x = x[x.abs() <= 448]
    assert torch.equal(encode_e4m3(x), x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_nan_becomes_the_code_asked_for(
    all_bf16: Tensor, cuda: Callable[[str, Tensor], Tensor]
) -> None:
    nan = all_bf16[all_bf16.isnan()]
    assert nan.numel() == 254
    assert torch.equal(encode_e2m1(nan), cuda("encode_e2m1", nan))
    for code in (0x0, 0x3, 0x8):
        assert (encode_e2m1(nan, nan_code=code) == code).all()
    assert torch.equal(encode_e4m3(nan), torch.where(nan.signbit(), 0xFF, 0x7F).to(torch.uint8))


def test_negative_zero_can_be_dropped_but_a_negative_number_keeps_its_sign() -> None:
    x = torch.tensor([0.0, -0.0, -1e-30, -0.25, -0.26])
    assert encode_e2m1(x).tolist() == [0, 8, 8, 8, 9]
    assert encode_e2m1(x, keep_negative_zero=False).tolist() == [0, 0, 8, 8, 9]


@pytest.mark.parametrize(
    ("value", "code", "code_above"),
    [(0.25, 0, 1), (0.75, 2, 2), (1.25, 2, 3), (1.75, 4, 4), (2.5, 4, 5), (3.5, 6, 6), (5.0, 6, 7)],
)
def test_e2m1_ties_go_to_even_not_up(value: float, code: int, code_above: int) -> None:
    """Half-up rounding, and a subnormal path that cannot round up, are faults seen in kernels."""
    above = torch.nextafter(torch.tensor(value), torch.tensor(9.0)).item()
    found = encode_e2m1(torch.tensor([value, -value, above]))
    assert found.tolist() == [code, code | 8, code_above]


def test_any_shape_and_stride(all_bf16: Tensor) -> None:
    x = all_bf16[:4096].view(4, 8, 128).transpose(0, 2)
    assert torch.equal(encode_e4m3(x), encode_e4m3(x.contiguous()))
    assert torch.equal(encode_e2m1(x[::2]), encode_e2m1(x[::2].contiguous()))
    assert encode_e2m1(torch.tensor(3.0)).item() == 5
    assert encode_e4m3(torch.empty(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_encoders_refuse_other_dtypes(dtype: torch.dtype) -> None:
    """An implicit upcast would hide a double rounding in the caller."""
    x = torch.ones(16, dtype=dtype)
    for encoder in (encode_e2m1, encode_e4m3):
        with pytest.raises(DtypeError, match="float32"):
            encoder(x)


def test_decoders_refuse_other_dtypes() -> None:
    with pytest.raises(DtypeError, match="uint8"):
        decode_e2m1(torch.ones(16, dtype=torch.int8))
    for dtype in (torch.bool, torch.int16, torch.float32):
        with pytest.raises(DtypeError, match="one-byte"):
            decode_e4m3(torch.ones(16, dtype=dtype))


def test_unknown_options_are_refused() -> None:
    x = torch.ones(1)
    with pytest.raises(CodecError, match="nearest_even"):
        encode_e2m1(x, rounding="up")  # type: ignore[arg-type]
    with pytest.raises(CodecError, match="saturate"):
        encode_e4m3(x, overflow="inf")  # type: ignore[arg-type]
