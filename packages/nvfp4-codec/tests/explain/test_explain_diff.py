"""explain_diff names each seeded error, and claims nothing without evidence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nvfp4_codec import (
    Divisor,
    DtypeError,
    FP8BlockTensor,
    MXFP4Tensor,
    NVFP4Tensor,
    ShapeError,
    dequantize_fp8_block,
    dequantize_mxfp4,
    dequantize_nvfp4,
    e8m0_to_fp32,
    explain_diff,
    fp32_to_e8m0,
    pack_e2m1,
    quantize_fp8_block,
    quantize_mxfp4,
    quantize_nvfp4,
    swizzle_blockscale,
    unpack_e2m1,
)
from nvfp4_codec.explain import HYPOTHESES
from nvfp4_codec.formats import decode_e2m1, decode_e4m3, encode_e4m3
from nvfp4_codec.ggml import linear_to_ggml


def _weights(rows: int = 128, cols: int = 128, seed: int = 0) -> Tensor:
    """Rows and columns of different sizes, so that a misplaced scale shows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * 0.02
    return x * torch.exp2(torch.randint(-4, 4, (rows, 1), generator=generator))


def _nvfp4(x: Tensor) -> NVFP4Tensor:
    return quantize_nvfp4(x, backend="reference")


def _values(tensor: NVFP4Tensor | MXFP4Tensor | FP8BlockTensor) -> Tensor:
    decode: Callable[..., Tensor] = {
        NVFP4Tensor: dequantize_nvfp4,
        MXFP4Tensor: dequantize_mxfp4,
        FP8BlockTensor: dequantize_fp8_block,
    }[type(tensor)]
    return decode(*tensor, dtype=torch.float32, backend="reference")


NVFP4 = _nvfp4(_weights())
MXFP4 = quantize_mxfp4(_weights(), backend="reference")
FP8 = quantize_fp8_block(_weights(130, 200), backend="reference")


def _scaled(tensor: NVFP4Tensor, scale: Tensor) -> Tensor:
    """Decode with other float32 block scales (they include the global one)."""
    elements = decode_e2m1(unpack_e2m1(tensor.weight))
    return elements * scale.repeat_interleave(16, -1)


def _swapped(weight: Tensor) -> Tensor:
    return weight << 4 | weight >> 4


def _scale_2(tensor: NVFP4Tensor) -> Tensor:
    assert isinstance(tensor.weight_scale_2, Tensor)
    return tensor.weight_scale_2


def _truncated_fp8() -> Tensor:
    floor = e8m0_to_fp32(fp32_to_e8m0(FP8.weight_scale, "floor"))
    return _values(FP8BlockTensor(FP8.weight, floor))


def _mismatched_halves() -> Tensor:
    values = _values(NVFP4)
    return torch.cat((values[:64], values[64:] * 1.37))


_E4M3 = decode_e4m3(NVFP4.weight_scale)
_E8M0 = MXFP4.weight_scale.view(torch.uint8)
_MX_ELEMENTS = decode_e2m1(unpack_e2m1(MXFP4.weight))

# name: (trusted, suspect); every error is made on bytes or by a wrong decode.
SEEDED = {
    "nibble-order": (NVFP4, replace(NVFP4, weight=_swapped(NVFP4.weight))),
    "ggml-order": (NVFP4, replace(NVFP4, weight=linear_to_ggml(NVFP4.weight, 16))),
    "transposed": (_weights(64, 256), _weights(64, 256).T),
    "sign-lost": (NVFP4, replace(NVFP4, weight=NVFP4.weight & 0x77)),
    "swizzled-scales": (
        NVFP4,
        replace(NVFP4, weight_scale=swizzle_blockscale(NVFP4.weight_scale).data),
    ),
    "reciprocal-global-scale": (NVFP4, replace(NVFP4, weight_scale_2=Divisor(_scale_2(NVFP4)))),
    "missing-global-scale": (NVFP4, replace(NVFP4, weight_scale_2=torch.tensor(1.0))),
    "unit-scales": (NVFP4, _scaled(NVFP4, torch.ones_like(_E4M3) * _scale_2(NVFP4))),
    "scale-format": (MXFP4, _MX_ELEMENTS * decode_e4m3(_E8M0).repeat_interleave(32, -1)),
    "scale-as-integer": (MXFP4, _MX_ELEMENTS * _E8M0.float().repeat_interleave(32, -1)),
    "e8m0-bias": (MXFP4, MXFP4Tensor(MXFP4.weight, (_E8M0 - 2).view(torch.float8_e8m0fnu))),
    "constant-factor": (_values(NVFP4), _values(NVFP4) * 0.0123),
    "half-mismatch": (_values(NVFP4), _mismatched_halves()),
    "truncated-ue8m0": (FP8, _truncated_fp8()),
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_error_is_named_first(name: str) -> None:
    trusted, suspect = SEEDED[name]
    report = explain_diff(trusted, suspect)
    assert report.verdict == "explained", str(report)
    assert report.best is not None
    assert report.best.name == name, str(report)
    assert report.best.sqnr_before < 20
    assert report.best.sqnr_after > 100
    assert report.best.fix in str(report)


@pytest.mark.parametrize("name", SEEDED)
def test_the_sides_may_be_exchanged(name: str) -> None:
    trusted, suspect = SEEDED[name]
    report = explain_diff(suspect, trusted)
    assert report.best is not None
    assert report.best.name == name, str(report)


# Errors that leave their mark in the values alone, when all scales are gone.
@pytest.mark.parametrize(
    "name",
    ["nibble-order", "ggml-order", "transposed", "sign-lost", "e8m0-bias", "half-mismatch",
     "truncated-ue8m0"],
)  # fmt: skip
def test_plain_values_are_enough_for_some(name: str) -> None:
    trusted, suspect = (
        side if isinstance(side, Tensor) else _values(side) for side in SEEDED[name]
    )
    report = explain_diff(trusted.bfloat16(), suspect.bfloat16())
    assert report.best is not None
    assert report.best.name == name, str(report)
    assert report.best.sqnr_after > 30  # bfloat16 rounding is left


def test_every_hypothesis_has_a_seeded_error() -> None:
    elsewhere = {"e4m3-subnormals", "single-steps", "double-rounding", "block-factors"}
    assert {h.name for h in HYPOTHESES} == SEEDED.keys() | elsewhere


def test_e4m3_subnormals_decoded_as_normals() -> None:
    x = _weights(64, 64)
    x[::2] *= 2.0**-14
    tensor = _nvfp4(x)
    # The large rows would hide the small ones: look at the rows that hold small values.
    small = NVFP4Tensor(tensor.weight[::2], tensor.weight_scale[::2], tensor.weight_scale_2)
    byte = small.weight_scale.view(torch.uint8).int()
    assert bool(((byte > 0) & (byte < 8)).any())
    wrong = (1 + (byte & 7) / 8) * torch.exp2((byte >> 3) - 7.0)
    report = explain_diff(small, _scaled(small, wrong * _scale_2(tensor)))
    assert report.best is not None
    assert report.best.name == "e4m3-subnormals", str(report)


def test_double_rounding_in_scales_shows_as_single_steps() -> None:
    """Through bfloat16, some E4M3 scales land one code away: a rounding, not a convention."""
    amax = torch.rand(128, 64, generator=torch.Generator().manual_seed(1)) * 400 + 1
    once = encode_e4m3(amax).view(torch.float8_e4m3fn)
    twice = encode_e4m3(amax.bfloat16().float()).view(torch.float8_e4m3fn)
    report = explain_diff(once, twice)
    assert report.best is not None
    assert report.best.name == "single-steps"
    assert f"{report.num_different} of 8192 scales" in report.best.detail
    report = explain_diff(amax, twice)
    assert report.best is not None
    assert report.best.name == "double-rounding"
    assert report.best.exact
    assert "double-rounding" not in {e.name for e in explain_diff(amax, once).explanations}

    once, twice = once[:, :8], twice[:, :8]
    weight = torch.randint(0, 256, (128, 64), dtype=torch.uint8)
    left, right = (NVFP4Tensor(weight, scale, torch.tensor(1e-4)) for scale in (once, twice))
    report = explain_diff(left, right)
    assert report.best is not None
    assert report.best.name == "single-steps"
    assert report.notes == (
        f"{int((once.float() != twice.float()).sum())} of 1024 block scales differ",
    )


def test_other_scales_with_the_same_codes_are_block_factors() -> None:
    factor = torch.rand(128, 8, generator=torch.Generator().manual_seed(2)) * 5 + 0.1
    report = explain_diff(_values(NVFP4), _scaled(NVFP4, _E4M3 * _scale_2(NVFP4) * factor))
    assert report.best is not None
    assert report.best.name == "block-factors"
    assert "per 1x16 block" in report.best.detail


@pytest.mark.parametrize("shape", [(130, 80), (128, 64)], ids=str)
def test_padded_or_flat_swizzled_scales(shape: tuple[int, int]) -> None:
    tensor = _nvfp4(_weights(*shape))
    swizzled = swizzle_blockscale(tensor.weight_scale).data
    for stored in (swizzled, swizzled.flatten()):
        report = explain_diff(tensor, replace(tensor, weight_scale=stored))
        assert report.best is not None
        assert report.best.name == "swizzled-scales", str(report)
        assert report.best.exact
        report = explain_diff(tensor.weight_scale, stored)
        assert report.best is not None
        assert report.best.name == "swizzled-scales", str(report)


def test_a_factor_is_named_by_the_scales_that_are_known() -> None:
    values = _values(NVFP4)
    report = explain_diff(values, values * 0.0317, known_scales={"input_scale": 0.0317})
    assert report.best is not None
    assert "1 / (input_scale)" in report.best.detail
    report = explain_diff(NVFP4, values * _scale_2(NVFP4))
    assert report.best is not None
    assert "1 / (a's global scale)" in report.best.detail
    report = explain_diff(values, values * (448 / 256))
    assert report.best is not None
    assert "four-over-six" in report.best.detail


def test_mxfp4_in_ggml_order() -> None:
    report = explain_diff(MXFP4, replace(MXFP4, weight=linear_to_ggml(MXFP4.weight, 32)))
    assert report.best is not None
    assert report.best.name == "ggml-order"
    assert "halves of 32" in report.best.detail


def test_packed_codes_alone() -> None:
    report = explain_diff(NVFP4.weight, _swapped(NVFP4.weight))
    assert report.best is not None
    assert report.best.name == "nibble-order"


def test_identical_tensors_are_identical() -> None:
    for tensor in (NVFP4, MXFP4, FP8, _weights(), NVFP4.weight_scale, NVFP4.weight):
        report = explain_diff(tensor, tensor)
        assert report.verdict == "identical"
        assert report.sqnr == math.inf
        assert report.explanations == ()
    # The same values with a factor moved between the scales are told apart by the notes.
    moved = NVFP4Tensor(NVFP4.weight, NVFP4.weight_scale, Divisor(_scale_2(NVFP4).reciprocal()))
    assert "global scales are" in str(explain_diff(NVFP4, moved))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param(_weights(seed=1), _weights(seed=2), id="unrelated"),
        pytest.param(_weights(), NVFP4, id="quantized-nvfp4"),
        pytest.param(_weights(), MXFP4, id="quantized-mxfp4"),
        pytest.param(_weights(130, 200), FP8, id="quantized-fp8"),
        pytest.param(NVFP4, _nvfp4(_weights(seed=3)), id="unrelated-nvfp4"),
        pytest.param(NVFP4, MXFP4, id="two-formats"),
        pytest.param(_weights(), _weights() * 1.01 + 1e-3, id="shifted"),
    ],
)
def test_nothing_is_claimed_without_evidence(a: Tensor, b: Tensor) -> None:
    report = explain_diff(a, b)
    assert report.verdict == "unknown", str(report)
    assert report.best is None
    assert report.num_different
    assert report.max_abs_error
    assert "values differ" in str(report)


def test_more_factors_than_needed_are_not_claimed() -> None:
    report = explain_diff(_values(NVFP4), _values(NVFP4) * 0.0123)
    assert [e.name for e in report.explanations] == ["constant-factor"]
    report = explain_diff(_values(NVFP4), _mismatched_halves())
    assert {e.name for e in report.explanations} <= {
        "half-mismatch",
        "truncated-ue8m0",
        "block-factors",
    }


@pytest.mark.parametrize(("steps", "claimed"), [(1, True), (2, False)])
def test_only_single_steps_are_called_a_rounding(steps: int, claimed: bool) -> None:
    other = NVFP4.weight_scale.view(torch.uint8).clone()
    other[::9] -= steps
    suspect = replace(NVFP4, weight_scale=other.view(torch.float8_e4m3fn))
    names = {e.name for e in explain_diff(NVFP4, suspect).explanations}
    assert ("single-steps" in names) is claimed


def test_positions_of_nan_must_agree() -> None:
    a = _weights()
    b = a.clone()
    b[3, 5] = math.nan
    report = explain_diff(a, b)
    assert report.sqnr == -math.inf
    assert report.verdict == "unknown"


def test_incomparable_input_is_refused() -> None:
    with pytest.raises(ShapeError, match="expected equal shapes"):
        explain_diff(_weights(8, 16), _weights(8, 32))
    with pytest.raises(ShapeError, match="expected 128 x 8 scales"):
        explain_diff(NVFP4, replace(NVFP4, weight_scale=NVFP4.weight_scale[:, :5]))
    with pytest.raises(DtypeError):
        explain_diff(torch.zeros(4, 4, dtype=torch.int64), NVFP4)
    with pytest.raises(DtypeError):
        explain_diff([1.0], NVFP4)  # type: ignore[arg-type]


def test_the_input_is_not_touched() -> None:
    before = NVFP4.weight.clone(), NVFP4.weight_scale.view(torch.uint8).clone()
    explain_diff(NVFP4, replace(NVFP4, weight=pack_e2m1(unpack_e2m1(_swapped(NVFP4.weight)))))
    assert torch.equal(NVFP4.weight, before[0])
    assert torch.equal(NVFP4.weight_scale.view(torch.uint8), before[1])


def test_all_nan_is_not_explained() -> None:
    x = torch.full((64, 64), math.nan)
    good = _weights(64, 64)
    broken = _nvfp4(good)
    nan_scale = torch.full_like(broken.weight_scale.view(torch.uint8), 0x7F)
    broken = replace(broken, weight_scale=nan_scale.view(torch.float8_e4m3fn))
    for bad in (x, broken, torch.full((64, 64), math.inf)):
        for other in (good, _nvfp4(good)):
            report = explain_diff(bad, other)
            assert report.verdict == "unknown", report
            assert report.notes[0] == "a holds 4096 NaN or Inf of 4096 values"
            assert (report.num_different, report.max_abs_error) == (4096, 0)
            report = explain_diff(other, bad)
            assert report.verdict == "unknown", report
            assert report.notes[0] == "b holds 4096 NaN or Inf of 4096 values"


def test_some_nan_are_counted_and_are_no_rounding_step() -> None:
    one = NVFP4.weight_scale.view(torch.uint8).clone()
    one[3, 3] = 0x7F
    report = explain_diff(NVFP4, replace(NVFP4, weight_scale=one.view(torch.float8_e4m3fn)))
    assert report.verdict == "unknown", report
    assert "b holds 16 NaN or Inf of 16384 values" in report.notes
    x = _weights(64, 64)
    x[0, 0] = math.nan
    report = explain_diff(x, x * 4)
    assert report.best is not None
    assert report.num_different == 4095
    assert len(report.notes) == 2
    assert explain_diff(x, x.clone()).verdict == "identical"


def test_factors_are_positive() -> None:
    x = _weights()
    assert explain_diff(x, -x).verdict == "unknown"
    halves = torch.cat((x[:64], -x[64:]))
    assert explain_diff(x, halves).verdict == "unknown"


@pytest.mark.parametrize("k", [50, 33, 64])
def test_a_padded_tensor_is_compared_by_its_logical_k(k: int) -> None:
    x = _weights(64, k)
    padded = quantize_nvfp4(x, pad=True, backend="reference")
    values = _values(padded)[:, :k]
    assert explain_diff(values, padded).verdict == "identical"
    assert explain_diff(padded, padded).num_values == 64 * k
    report = explain_diff(values * 4, padded)
    assert report.best is not None
    assert report.best.name == "e8m0-bias"
    assert 10 < explain_diff(x, padded).sqnr < 40
    with pytest.raises(ShapeError, match="logical_k is 999"):
        explain_diff(x, replace(padded, logical_k=999))
