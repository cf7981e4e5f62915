"""unify_weight_scale_2: exact where it can be, rounded once to nearest even where not."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nvfp4_codec import (
    CodecError,
    Divisor,
    DtypeError,
    LosslessError,
    NonFiniteError,
    NVFP4Tensor,
    ScaleError,
    ShapeError,
    dequantize_nvfp4,
    quantize_nvfp4,
    unify_weight_scale_2,
)

ALL_SCALES = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
E4M3 = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
EXACT = [Fraction(value) for value in E4M3]


def _tensor(scale_2: float, scales: Tensor = ALL_SCALES) -> NVFP4Tensor:
    """One block of the codes 0..15 for every scale byte."""
    codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    weight = codes.repeat(scales.numel()).view(1, -1)
    return NVFP4Tensor(weight, scales.view(torch.float8_e4m3fn)[None], torch.tensor(scale_2))


def _scale_bytes(tensor: NVFP4Tensor) -> list[int]:
    return tensor.weight_scale.view(torch.uint8).flatten().tolist()


def _values(tensor: NVFP4Tensor) -> Tensor:
    return dequantize_nvfp4(*tensor, dtype=torch.float32, backend="reference").view(torch.int32)


@pytest.mark.parametrize("shift", range(19))
def test_powers_of_two_are_exact_until_mantissa_bits_fall_off(shift: int) -> None:
    small, large = _tensor(2.0**-20), _tensor(2.0 ** (-20 + shift))
    (new_small, new_large), (report, untouched) = unify_weight_scale_2(
        [small, large], underflow="floor"
    )
    assert float(new_small.weight_scale_2) == 2.0 ** (-20 + shift)
    assert new_large.weight_scale is large.weight_scale
    assert untouched.exact
    same = (_values(small) == _values(new_small)).view(-1, 16).all(-1)
    assert report.inexact_blocks == int((~same).sum())
    # A byte m * 2^e survives if m * 2^(e - shift) is a multiple of 2^-9.
    multiples = np.abs(np.concatenate((E4M3, -E4M3))) * 2.0 ** (9 - shift)
    assert report.inexact_blocks == int((multiples != np.floor(multiples)).sum())
    assert torch.equal(new_small.weight, small.weight)
    # Among subnormals a power of two gives ties: they go to the even byte.
    for byte, found in zip(ALL_SCALES.tolist(), _scale_bytes(new_small), strict=True):
        best = _nearest_even(EXACT[byte & 0x7F] / 2**shift)
        assert found & 0x7F == (max(best, 1) if byte & 0x7F else 0)


@given(st.floats(2.0**-40, 2.0**20, width=32), st.floats(2.0**-40, 2.0**20, width=32))
def test_scales_are_rounded_once_to_nearest_even_and_floored(x: float, y: float) -> None:
    tensors = [_tensor(x), _tensor(y)]
    unified, reports = unify_weight_scale_2(tensors, underflow="floor")
    assert float(unified[0].weight_scale_2) == float(unified[1].weight_scale_2) == max(x, y)
    for old, new, report in zip(tensors, unified, reports, strict=True):
        ratio = Fraction(float(old.weight_scale_2)) / Fraction(max(x, y))
        worst, underflowed = 0.0, 0
        for byte, found in zip(ALL_SCALES.tolist(), _scale_bytes(new), strict=True):
            wanted = EXACT[byte & 0x7F] * ratio
            assert found & 0x80 == byte & 0x80
            if byte & 0x7F == 0:
                assert found == byte
                continue
            best = _nearest_even(wanted)
            assert found & 0x7F == max(best, 1)
            underflowed += best == 0
            worst = max(worst, float(abs(EXACT[found & 0x7F] - wanted) / wanted))
        assert report.underflowed_blocks == underflowed
        assert report.max_relative_error == pytest.approx(worst, rel=1e-6)


def _nearest_even(wanted: Fraction) -> int:
    place = int(np.searchsorted(E4M3, float(wanted)))
    near = range(max(place - 2, 0), min(place + 3, len(E4M3)))
    return min(near, key=lambda code: (abs(EXACT[code] - wanted), code % 2))


def test_zero_blocks_are_not_counted_as_inexact() -> None:
    tensor = _tensor(1e-4)
    zeros = NVFP4Tensor(torch.full_like(tensor.weight, 0x80), *list(tensor)[1:])
    _, (report, _) = unify_weight_scale_2([zeros, _tensor(3e-1)])  # would underflow
    assert report.exact
    assert report.underflowed_blocks == 0
    assert report.num_blocks == ALL_SCALES.numel()


def test_divisors_are_unified_by_the_smallest_divisor() -> None:
    tensors = [
        NVFP4Tensor(t.weight, t.weight_scale, Divisor(torch.tensor(value)))
        for t, value in ((_tensor(1.0), 4096.0), (_tensor(1.0), 1024.0))
    ]
    unified, reports = unify_weight_scale_2(tensors, underflow="floor")
    assert all(isinstance(t.weight_scale_2, Divisor) for t in unified)
    assert float(unified[0].weight_scale_2.value) == 1024.0
    ((mixed, _), _) = unify_weight_scale_2([tensors[0], _tensor(2.0**-10)], underflow="floor")
    assert torch.equal(
        mixed.weight_scale.view(torch.uint8), unified[0].weight_scale.view(torch.uint8)
    )
    assert reports[1].exact


def test_fused_real_weights_stay_close() -> None:
    """The rounding of a scale moves its block by at most 2^-4, in practice far less on average."""
    generator = torch.Generator().manual_seed(0)
    w1 = quantize_nvfp4(torch.randn(32, 256, generator=generator) * 0.02, backend="reference")
    w3 = quantize_nvfp4(torch.randn(32, 256, generator=generator) * 0.05, backend="reference")
    (new, _), (report, _) = unify_weight_scale_2([w1, w3])
    before = dequantize_nvfp4(*w1, dtype=torch.float32, backend="reference")
    after = dequantize_nvfp4(*new, dtype=torch.float32, backend="reference")
    error = ((after - before).abs() / before.abs().clamp(min=1e-30)).max()
    assert report.inexact_blocks > 0
    assert 0 < report.max_relative_error <= 2.0**-4
    assert float(error) == pytest.approx(report.max_relative_error, rel=1e-4)


def test_nan_scales_bad_globals_and_nothing_are_refused() -> None:
    bad = _tensor(1.0, torch.tensor([0x7F, 0x38], dtype=torch.uint8))
    with pytest.raises(NonFiniteError, match="1 NaN bytes of 2"):
        unify_weight_scale_2([bad, _tensor(2.0)])
    for value in (0.0, -1.0, float("inf"), float("nan"), 1e38):
        with pytest.raises(ScaleError, match="tensor 1"):
            unify_weight_scale_2([_tensor(1.0), _tensor(value)])
    with pytest.raises(ShapeError):
        unify_weight_scale_2([])


def test_an_underflow_is_refused_unless_a_policy_is_given() -> None:
    # 1 * 2^-10 is a tie of zero and the smallest scale, and zero is even; 1.125 * 2^-10 is none.
    small = _tensor(2.0**-30, torch.tensor([0x38, 0xB8, 0x39, 0x7E, 0x00], dtype=torch.uint8))
    tensors = [_tensor(2.0**-20), small]
    with pytest.raises(LosslessError, match="tensor 1: 2 of 5 blocks .* 0.0009766"):
        unify_weight_scale_2(tensors)
    (_, floored), (_, report) = unify_weight_scale_2(tensors, underflow="floor")
    assert _scale_bytes(floored) == [0x01, 0x81, 0x01, _nearest_even(EXACT[0x7E] / 1024), 0x00]
    assert (report.underflowed_blocks, report.max_relative_error) == (2, 1.0)
    (_, zeroed), (_, report) = unify_weight_scale_2(tensors, underflow="zero")
    assert _scale_bytes(zeroed) == [0x00, 0x80, *_scale_bytes(floored)[2:]]
    assert (report.underflowed_blocks, report.max_relative_error) == (2, 1.0)
    extreme = [_tensor(2.0**-149), _tensor(2.0**110)]
    (_, _), (report, _) = unify_weight_scale_2(extreme, underflow="floor")
    assert report.max_relative_error == pytest.approx(2.0**259)
    with pytest.raises(CodecError, match="expected one of: error, floor, zero"):
        unify_weight_scale_2(tensors, underflow="drop")  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [None, [1.0], tuple(_tensor(1.0)), torch.ones(2), np.ones(2)])
def test_anything_but_a_list_of_nvfp4_tensors_is_refused(bad: object) -> None:
    with pytest.raises(DtypeError, match="tensor 1 is a .*, expected NVFP4Tensor"):
        unify_weight_scale_2([_tensor(1.0), bad])  # type: ignore[list-item]
    with pytest.raises(DtypeError):
        unify_weight_scale_2(bad)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="tensors is a NVFP4Tensor"):
        unify_weight_scale_2(_tensor(1.0))  # type: ignore[arg-type]
