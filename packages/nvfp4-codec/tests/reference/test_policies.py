"""Non-finite input, padding, shapes; and what holds for every finite input."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nvfp4_codec import CodecError, Divisor, ZeroAmaxError, unpack_e2m1
from nvfp4_codec.scales import PROFILES

FP32 = torch.float32
INF, NAN = float("inf"), float("nan")
ALL_PROFILES = list(PROFILES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP32])
@pytest.mark.parametrize("profile", ALL_PROFILES)
def test_nvfp4_saturation(codec: Any, profile: str, dtype: torch.dtype) -> None:
    """Scales are those of the finite values alone; Inf is +-6 in its block and NaN is 0."""
    x = torch.linspace(-3, 3, 64).view(2, 32).to(dtype)
    x[1, 16:] = torch.tensor([INF, -INF, NAN, -NAN] * 4)  # a block without a finite value
    finite = x.clone()
    x[0, :4] = torch.tensor([INF, -INF, NAN, -NAN])
    finite[0, :4] = 0
    finite[1, 16:] = 0
    found = codec.quantize_nvfp4(x, profile=profile, nonfinite="saturate")
    expected = codec.quantize_nvfp4(finite, profile=profile)
    assert torch.equal(
        found.weight_scale.view(torch.uint8), expected.weight_scale.view(torch.uint8)
    )
    codes = unpack_e2m1(expected.weight)
    codes[0, :4] = torch.tensor([7, 15, 0, 0])
    codes[1, 16:] = torch.tensor([7, 15, 0, 0] * 4)
    assert torch.equal(unpack_e2m1(found.weight), codes)


def test_mxfp4_and_fp8_saturation(codec: Any) -> None:
    x = torch.linspace(-3, 3, 64).view(1, 64)
    x[0, :4] = torch.tensor([INF, -INF, NAN, -NAN])
    finite = x.clone()
    finite[0, :4] = 0
    for name, codes in (("mxfp4", [7, 15, 0, 0]), ("fp8_block", [0x7E, 0xFE, 0, 0])):
        quantize = getattr(codec, f"quantize_{name}")
        found, expected = quantize(x, nonfinite="saturate"), quantize(finite)
        assert torch.equal(found.weight_scale.float(), expected.weight_scale.float())
        unpack = unpack_e2m1 if name == "mxfp4" else (lambda weight: weight.view(torch.uint8))
        assert unpack(found.weight)[0, :4].tolist() == codes
        assert torch.equal(unpack(found.weight)[0, 4:], unpack(expected.weight)[0, 4:])


def test_saturation_changes_nothing_for_finite_input(codec: Any) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    for name in ("nvfp4", "mxfp4", "fp8_block"):
        quantize = getattr(codec, f"quantize_{name}")
        assert torch.equal(quantize(x, nonfinite="saturate").weight, quantize(x).weight)


def test_a_tensor_without_finite_values_has_no_amax(codec: Any) -> None:
    x = torch.full((1, 16), NAN)
    with pytest.raises(ZeroAmaxError):
        codec.quantize_nvfp4(x, nonfinite="saturate")
    found = codec.quantize_nvfp4(x, nonfinite="saturate", zero_amax="one")
    assert not found.weight.any()


@pytest.mark.parametrize("k", [1, 15, 16, 17, 31])
def test_padding_records_the_logical_k(codec: Any, k: int) -> None:
    x = torch.linspace(-3, 3, 2 * k).view(2, k)
    found = codec.quantize_nvfp4(x, pad=True)
    width = -(-k // 16) * 16
    assert found.logical_k == (None if k == 16 else k)
    assert found.weight.shape == (2, width // 2)
    padded = torch.zeros(2, width)
    padded[:, :k] = x
    assert torch.equal(found.weight, codec.quantize_nvfp4(padded).weight)
    assert not codec.dequantize_nvfp4(*found)[:, k:].any()


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64), (2, 1, 3, 64)])
def test_any_number_of_dimensions(codec: Any, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    for name, block in (("nvfp4", 16), ("mxfp4", 32)):
        found = getattr(codec, f"quantize_{name}")(x)
        flat = getattr(codec, f"quantize_{name}")(x.view(-1, 64))
        assert found.weight.shape == (*shape[:-1], 32)
        assert found.weight_scale.shape == (*shape[:-1], 64 // block)
        assert torch.equal(found.weight.view(-1, 32), flat.weight)
        decoded = getattr(codec, f"dequantize_{name}")(*found)
        assert decoded.shape == shape
        assert torch.equal(decoded.view(-1, 64), getattr(codec, f"dequantize_{name}")(*flat))


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 0), (0,), (2, 0, 32)])
def test_empty_tensors(codec: Any, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    nvfp4 = codec.quantize_nvfp4(x)
    assert nvfp4.weight_scale_2 == 1.0
    assert codec.dequantize_nvfp4(*nvfp4).shape == shape
    assert codec.dequantize_mxfp4(*codec.quantize_mxfp4(x)).shape == shape
    if len(shape) == 2:
        assert codec.dequantize_fp8_block(*codec.quantize_fp8_block(x)).shape == shape


def test_non_contiguous_input_is_read_in_its_own_order(codec: Any) -> None:
    base = torch.randn(64, 96, generator=torch.Generator().manual_seed(2))
    for view in (base.t(), base[::2, ::3], base[:, 32:]):
        for name in ("nvfp4", "mxfp4", "fp8_block"):
            quantize = getattr(codec, f"quantize_{name}")
            found, expected = quantize(view), quantize(view.contiguous())
            assert torch.equal(found.weight.view(torch.uint8), expected.weight.view(torch.uint8))
            dequantize = getattr(codec, f"dequantize_{name}")
            strided = [_strided(part) if part.ndim else part for part in found]
            assert torch.equal(dequantize(*strided), dequantize(*found))


def _strided(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def test_the_input_is_never_touched(codec: Any) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    before = x.clone()
    for name in ("nvfp4", "mxfp4", "fp8_block"):
        getattr(codec, f"quantize_{name}")(x)
        assert torch.equal(x, before)


def test_parameters_need_no_detaching(codec: Any) -> None:
    parameter = torch.nn.Parameter(torch.randn(4, 64))
    for name in ("nvfp4", "mxfp4", "fp8_block"):
        found = getattr(codec, f"quantize_{name}")(parameter)
        assert not any(part.requires_grad for part in found)
    scale = torch.nn.Parameter(torch.ones(1, 1))
    decoded = codec.dequantize_fp8_block(found.weight, scale)
    assert not decoded.requires_grad
    given = codec.quantize_nvfp4(parameter, weight_scale_2=torch.nn.Parameter(torch.tensor(0.5)))
    assert given.weight_scale_2.item() == 0.5


def test_results_unpack_as_tuples(codec: Any) -> None:
    x = torch.randn(4, 64)
    weight, weight_scale, weight_scale_2 = codec.quantize_nvfp4(x)
    assert (weight.dtype, weight_scale.dtype) == (torch.uint8, torch.float8_e4m3fn)
    assert weight_scale_2.shape == ()
    assert isinstance(codec.quantize_nvfp4(x, profile="te").weight_scale_2, Divisor)


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
rows = st.lists(numbers, min_size=16, max_size=16)


@pytest.mark.parametrize("profile", ALL_PROFILES)
@settings(max_examples=60, deadline=None)
@given(blocks=st.lists(rows, min_size=1, max_size=3), data=st.data())
def test_no_finite_input_gives_a_nan_scale(
    codec: Any, profile: str, blocks: list[list[float]], data: st.DataObject
) -> None:
    """Whatever the global scale; nor does any value decode to NaN."""
    dtype = data.draw(st.sampled_from([FP32, torch.bfloat16, torch.float16]))
    info = torch.finfo(dtype)
    x = torch.tensor(blocks).clamp(info.min, info.max).to(dtype)
    largest = 2.0**118  # beyond, 448 times it is no float32
    divides = isinstance(PROFILES[profile].typed_scale(torch.tensor(1.0)), Divisor)
    bounds = (1 / largest, torch.finfo(FP32).max) if divides else (2.0**-149, largest)
    value = data.draw(st.none() | st.floats(*bounds, width=32), label="given global scale")
    scale_2 = None
    if value is not None:
        scale_2 = PROFILES[profile].typed_scale(torch.tensor(value))
    found = codec.quantize_nvfp4(x, profile=profile, weight_scale_2=scale_2, zero_amax="one")
    magnitude = found.weight_scale.view(torch.uint8)
    assert (magnitude < 0x7F).all()  # no NaN, and no sign bit
    decoded = codec.dequantize_nvfp4(*found, dtype=FP32)
    assert not decoded.isnan().any()
    amax = x.float().abs().max()
    if value is None and amax > 2.0**-100 and dtype != torch.float16:
        # Less than 2^-20 below float32's largest, 6 * scale may round to Inf; nowhere else.
        overflowed = decoded.isinf()
        assert (x.float().abs()[overflowed] > (1 - 2.0**-20) * torch.finfo(FP32).max).all()
        # Half of the widest step, from 4 to 6, after a scale that was rounded by up to 1/16.
        error = torch.where(overflowed, 0.0, decoded - x.float())
        assert error.abs().max() <= amax / 6 * 1.07


@settings(max_examples=60, deadline=None)
@given(blocks=st.lists(rows, min_size=2, max_size=4))
def test_no_finite_input_gives_a_nan_scale_elsewhere(codec: Any, blocks: list[list[float]]) -> None:
    x = torch.tensor([list(itertools.chain(*blocks[:2]))])
    for mode in ("floor", "ceil", "rceil", "even"):
        found = codec.quantize_mxfp4(x, scale_mode=mode)
        assert (found.weight_scale.view(torch.uint8) < 0xFF).all()
    for scale_fmt in ("fp32", "ue8m0"):
        fp8 = codec.quantize_fp8_block(x, scale_fmt=scale_fmt, block=(1, 5))
        assert fp8.weight_scale.float().isfinite().all()
        assert (fp8.weight_scale.float() > 0).all()
        assert (fp8.weight.view(torch.uint8) & 0x7F < 0x7F).all()


def test_unknown_profile_lists_the_known_ones(codec: Any) -> None:
    with pytest.raises(CodecError, match="ieee"):
        codec.quantize_nvfp4(torch.ones(1, 16), profile="IEEE")
