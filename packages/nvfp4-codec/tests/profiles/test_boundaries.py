"""Where libraries leave the format, or us: what they do, and what the profile does instead."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from nvfp4_codec import (
    CodecError,
    Divisor,
    DtypeError,
    ScaleError,
    ZeroAmaxError,
    dequantize_nvfp4,
    quantize_nvfp4,
)
from nvfp4_codec.scales import PROFILES, get_profile

ALL_PROFILES = list(PROFILES)
ZERO_BLOCK_BYTES = {
    "modelopt": 0x38,
    "modelopt-static": 0x38,
    "compressed-tensors": 0x20,
    "torchao": 0x08,
    "te": 0x00,
    "ieee": 0x01,
}


def quantize(x: torch.Tensor, **options: Any) -> Any:
    return quantize_nvfp4(x, backend="reference", **options)


def scale_bytes(quantized: Any) -> list[int]:
    return quantized.weight_scale.view(torch.uint8).flatten().tolist()  # type: ignore[no-any-return]


def test_an_all_zero_tensor_by_the_library(profile: str, peer: Any) -> None:
    """ModelOpt and torchao write NaN scale bytes (and a global scale of zero); others do not."""
    zeros = torch.zeros(2, 16)
    theirs = peer.quantize(zeros, zeros.max())
    wrote_nan = (theirs.scale & 0x7F == 0x7F).all().item()
    assert wrote_nan == (profile in ("modelopt", "torchao"))
    if profile in ("compressed-tensors", "te"):
        assert theirs.scale.flatten().tolist() == [ZERO_BLOCK_BYTES[profile]] * 2


@pytest.mark.parametrize("name", ALL_PROFILES)
def test_an_all_zero_tensor_is_refused_or_stored_with_scale_one(name: str) -> None:
    zeros = torch.zeros(2, 32)
    with pytest.raises(ZeroAmaxError, match="zero_amax='one'"):
        quantize(zeros, profile=name)
    found = quantize(zeros, profile=name, zero_amax="one")
    scale_2 = found.weight_scale_2
    assert (scale_2.value if isinstance(scale_2, Divisor) else scale_2).item() == 1.0
    assert not found.weight.any()
    assert scale_bytes(found) == [ZERO_BLOCK_BYTES[name]] * 4
    assert not dequantize_nvfp4(*found, backend="reference").any()


@pytest.mark.parametrize("name", ALL_PROFILES)
def test_zero_blocks_are_always_legal(name: str) -> None:
    x = torch.zeros(1, 32)
    x[0, 3] = PROFILES[name].min_scale or 1.0
    found = quantize(x, profile=name)
    zero_block = 0x7E if name == "modelopt-static" else ZERO_BLOCK_BYTES[name]
    assert scale_bytes(found)[1] == zero_block
    given = PROFILES[name].typed_scale(torch.tensor(0.5))
    found = quantize(torch.zeros(1, 16), profile=name, weight_scale_2=given)
    assert not found.weight.any()
    assert scale_bytes(found)[0] & 0x7F < 0x7F


def test_static_zero_block_of_a_small_tensor_is_not_nan() -> None:
    """A zero block becomes 1.0, then 1.0 * 448 / (amax / 6): beyond 464 a cast gives NaN."""
    x = torch.zeros(1, 32)
    x[0, 0] = 0.01
    assert scale_bytes(quantize(x, profile="modelopt-static")) == [0x7E, 0x7E]


@pytest.mark.parametrize("name", ["modelopt", "modelopt-static", "torchao", "ieee"])
def test_an_amax_whose_global_scale_underflows_counts_as_zero(name: str) -> None:
    x = torch.full((1, 16), 100 * 2.0**-149)  # amax / 2688 rounds to 0
    with pytest.raises(ZeroAmaxError):
        quantize(x, profile=name)
    found = quantize(x, profile=name, zero_amax="one")
    assert found.weight_scale_2.item() == 1.0
    assert scale_bytes(found)[0] & 0x7F < 0x7F


@pytest.mark.parametrize(
    ("dtype", "amax", "divisor"),
    [
        (torch.float32, 1e-45, 1.0),
        (torch.bfloat16, 1e-36, 1.0),
        (torch.float16, 0.04, 1.0),
        (torch.float16, 0.0417, 64480.0),
    ],
)
def test_compressed_tensors_takes_one_when_its_divisor_overflows(
    dtype: torch.dtype, amax: float, divisor: float
) -> None:
    found = quantize(torch.full((1, 16), amax, dtype=dtype), profile="compressed-tensors")
    assert found.weight_scale_2.value.item() == divisor


def test_te_tiny_tensor_keeps_a_finite_divisor() -> None:
    found = quantize(torch.full((1, 16), 1e-45), profile="te")
    assert found.weight_scale_2.value.item() == torch.finfo(torch.float32).max


@pytest.mark.parametrize("profile", ["torchao"], indirect=True)
def test_torchao_zeros_beside_values_too_small_for_its_reciprocal(profile: str, peer: Any) -> None:
    """torchao multiplies 0 by infinity there; its code for NaN is 3 with the NaN's sign."""
    x = torch.zeros(2, 16)
    x[0, ::2] = 2.0**-112  # weight_scale_2 is below 2^-122, and the second block is all zero
    theirs = peer.quantize(x, x.max())
    ours = quantize(x, profile=profile)
    assert ours.weight_scale_2 < 2.0**-122
    assert scale_bytes(ours) == theirs.scale.flatten().tolist()
    assert torch.equal(ours.weight[0], theirs.weight[0])
    assert set(theirs.weight[1].tolist()) <= {0x33, 0xBB}
    assert not ours.weight[1].any()


@pytest.mark.parametrize("name", ALL_PROFILES)
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_given_global_scale_must_be_positive_and_finite(name: str, value: float) -> None:
    given = PROFILES[name].typed_scale(torch.tensor(value))
    with pytest.raises(ScaleError, match="positive finite"):
        quantize(torch.ones(1, 16), profile=name, weight_scale_2=given, zero_amax="one")


@pytest.mark.parametrize("name", ALL_PROFILES)
def test_a_given_global_scale_must_not_overflow_block_scales(name: str) -> None:
    """448 times 8e35 is infinite, and zero times that would decode to NaN."""
    profile = PROFILES[name]
    divides = isinstance(profile.typed_scale(torch.ones(())), Divisor)
    for multiplier in (7.5e35, 8e35):
        value = torch.tensor(1 / multiplier if divides else multiplier)
        call = functools.partial(
            quantize, torch.ones(1, 16), profile=name, weight_scale_2=profile.typed_scale(value)
        )
        if multiplier == 8e35:
            with pytest.raises(ScaleError, match="448"):
                call()
        else:
            assert dequantize_nvfp4(*call(), backend="reference").isfinite().all()


@pytest.mark.parametrize("name", ALL_PROFILES)
def test_a_global_scale_of_the_other_direction_is_refused(name: str) -> None:
    value = torch.tensor(0.5)
    divides = isinstance(PROFILES[name].typed_scale(value), Divisor)
    wrong = value if divides else Divisor(value)
    with pytest.raises(DtypeError, match=r"Divisor\.(from|to)_multiplier"):
        quantize(torch.ones(1, 16), profile=name, weight_scale_2=wrong)


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(CodecError, match="modelopt, modelopt-static, compressed-tensors"):
        get_profile("nvidia")


def test_static_scales_stay_finite_where_2688_times_the_given_scale_overflows() -> None:
    x = torch.zeros(2, 16)
    x[1, -1] = 4.5e36
    given = quantize(x, profile="modelopt-static", weight_scale_2=torch.tensor(1.27e35))
    assert (given.weight_scale.view(torch.uint8) < 0x7F).all()


def test_static_recovers_the_amax_from_a_given_scale() -> None:
    """bfloat16 amax: exactly. Otherwise the product with 2688, one float32 ulp from it or none."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    derived = quantize(x, profile="modelopt-static")
    given = quantize(x, profile="modelopt-static", weight_scale_2=derived.weight_scale_2)
    assert torch.equal(given.weight, derived.weight)
    assert scale_bytes(given) == scale_bytes(derived)
    odd = quantize(x, profile="modelopt-static", weight_scale_2=torch.tensor(0.01))
    assert scale_bytes(odd) == scale_bytes(
        quantize(x.float(), profile="modelopt-static", weight_scale_2=torch.tensor(0.01))
    )
