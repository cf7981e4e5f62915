"""nvfp4_to_fp8_block: true scales per block, and a report that tells the truth."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nvfp4_codec import (
    CodecError,
    Divisor,
    DtypeError,
    LayoutError,
    NonFiniteError,
    ScaleError,
    ShapeError,
    dequantize_fp8_block,
    dequantize_nvfp4,
    nvfp4_to_fp8_block,
    quantize_fp8_block,
    quantize_nvfp4,
    swizzle_blockscale,
)
from nvfp4_codec.convert import fp8_block, quantize_fp8_block_with_report


def _weights(rows: int, cols: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, cols, generator=generator) * 0.02
    x *= torch.exp2(torch.randint(-6, 6, (rows, 1), generator=generator))
    weight, scale, scale_2 = quantize_nvfp4(x, backend="reference")
    assert isinstance(weight, Tensor)
    assert isinstance(scale, Tensor)
    assert isinstance(scale_2, Tensor)
    return weight, scale, scale_2


@pytest.mark.parametrize("shape", [(128, 128), (130, 576), (1, 16), (300, 144)])
@pytest.mark.parametrize("scale_fmt", ["fp32", "ue8m0"])
def test_scales_are_amax_over_448_of_each_block(shape: tuple[int, int], scale_fmt: str) -> None:
    parts = _weights(*shape)
    values = dequantize_nvfp4(*parts, dtype=torch.float32, backend="reference")
    fp8, _ = nvfp4_to_fp8_block(*parts, scale_fmt=scale_fmt)
    for i in range(fp8.weight_scale.shape[0]):
        for j in range(fp8.weight_scale.shape[1]):
            block = values[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            wanted = float(block.abs().max() / torch.tensor(448.0))
            if scale_fmt == "ue8m0":
                wanted = 2.0 ** math.ceil(math.log2(wanted))
            assert float(fp8.weight_scale[i, j].float()) == wanted


@pytest.mark.parametrize("chunk_elements", [1, 1 << 13, 1 << 20])
def test_report_is_the_measured_error_whatever_the_chunks(
    chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = _weights(200, 144)
    whole, whole_report = nvfp4_to_fp8_block(*parts)
    monkeypatch.setattr(fp8_block, "_CHUNK_ELEMENTS", chunk_elements)
    fp8, report = nvfp4_to_fp8_block(*parts)
    assert torch.equal(fp8.weight.view(torch.uint8), whole.weight.view(torch.uint8))
    assert torch.equal(fp8.weight_scale, whole.weight_scale)

    expected = dequantize_nvfp4(*parts, dtype=torch.float32, backend="reference").double()
    found = dequantize_fp8_block(*fp8, dtype=torch.float32, backend="reference").double()
    error = (found - expected).abs()
    assert report.num_values == 200 * 144
    assert report.inexact_values == int((error > 0).sum())
    assert report.max_abs_error == float(error.max())
    nonzero = expected != 0
    relative = float((error[nonzero] / expected[nonzero].abs()).max())
    assert report.max_relative_error == pytest.approx(relative, rel=1e-6)
    sqnr = 10 * math.log10(float(expected.square().sum() / error.square().sum()))
    assert report.sqnr_db == pytest.approx(sqnr, abs=1e-3)
    assert report.sqnr_db == pytest.approx(whole_report.sqnr_db, abs=1e-3)
    assert 25 < report.sqnr_db < 45  # E4M3 has four significant bits


def test_values_that_e4m3_can_hold_are_exact() -> None:
    """One power-of-two scale for all: E2M1 is a subset of E4M3."""
    weight = torch.arange(256, dtype=torch.uint8).repeat(16, 4)
    scale = torch.ones(16, 128).to(torch.float8_e4m3fn)
    fp8, report = nvfp4_to_fp8_block(weight, scale, torch.tensor(2.0**-5), scale_fmt="ue8m0")
    assert report.inexact_values == 0
    assert report.max_abs_error == 0
    assert report.max_relative_error == 0
    assert report.sqnr_db == math.inf
    expected = dequantize_nvfp4(weight, scale, torch.tensor(2.0**-5), backend="reference")
    found = dequantize_fp8_block(*fp8, backend="reference")
    assert torch.equal(expected.view(torch.int16), found.view(torch.int16))


def test_nan_scales_stacks_and_swizzled_scales_are_refused() -> None:
    weight, scale, scale_2 = _weights(128, 128)
    broken = scale.clone()
    broken.view(torch.uint8)[3, 3] = 0x7F
    with pytest.raises(NonFiniteError, match="weight_scale has 1 NaN bytes of 1024"):
        nvfp4_to_fp8_block(weight, broken, scale_2)
    with pytest.raises(ShapeError, match="matrix"):
        nvfp4_to_fp8_block(weight[None], scale[None], scale_2)
    with pytest.raises(ShapeError, match="swizzled"):
        nvfp4_to_fp8_block(weight, scale.flatten(), scale_2)


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, float("nan"), float("inf"), 1e38])
def test_global_scales_without_finite_values_are_refused(value: float) -> None:
    weight, scale, _ = _weights(1, 16)
    with pytest.raises(ScaleError, match="weight_scale_2 is the multiplier"):
        nvfp4_to_fp8_block(weight, scale, torch.tensor(value))
    if value != 1e38:
        with pytest.raises(ScaleError, match="weight_scale_2 is the divisor"):
            nvfp4_to_fp8_block(weight, scale, Divisor(torch.tensor(value)))
    with pytest.raises(ScaleError):
        nvfp4_to_fp8_block(weight, scale, Divisor(torch.tensor(1e-38)))


def test_other_types_and_choices_are_refused_also_without_rows() -> None:
    weight, scale, scale_2 = _weights(128, 64)
    with pytest.raises(LayoutError, match="unswizzle"):
        nvfp4_to_fp8_block(weight, swizzle_blockscale(scale), scale_2)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="list"):
        nvfp4_to_fp8_block([0], scale, scale_2)  # type: ignore[arg-type]
    fp8, report = nvfp4_to_fp8_block(weight[:0], scale[:0], scale_2)
    assert (fp8.weight.shape, report.num_values) == ((0, 64), 0)
    with pytest.raises(CodecError, match="scale_fmt is 'e8m0'"):
        nvfp4_to_fp8_block(weight[:0], scale[:0], scale_2, scale_fmt="e8m0")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1.0, 1e-30])
@pytest.mark.parametrize("scale_fmt", ["fp32", "ue8m0"])
def test_float_weights_are_quantized_alike_and_their_error_told(
    dtype: torch.dtype, magnitude: float, scale_fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where squares leave float32, and with zeros among the values."""
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(300, 144, generator=generator) * magnitude).to(dtype)
    x[x.abs() < 0.1 * magnitude] = 0
    monkeypatch.setattr(fp8_block, "_CHUNK_ELEMENTS", 1 << 14)
    found, report = quantize_fp8_block_with_report(x, scale_fmt=scale_fmt)
    expected = quantize_fp8_block(x.float(), scale_fmt=scale_fmt)
    assert torch.equal(found.weight.view(torch.uint8), expected.weight.view(torch.uint8))
    assert torch.equal(found.weight_scale, expected.weight_scale)
    values = dequantize_fp8_block(*found, dtype=torch.float32)
    error = (values.double() - x.double()).abs()
    assert report.num_values == x.numel()
    assert report.inexact_values == int((error > 0).sum())
    assert report.max_abs_error == pytest.approx(float(error.max()), rel=1e-6)
    relative = float((error[x != 0] / x[x != 0].abs()).max())
    assert report.max_relative_error == pytest.approx(relative, rel=1e-6)
    sqnr = 10 * math.log10(float(x.double().square().sum() / error.square().sum()))
    assert report.sqnr_db == pytest.approx(sqnr, abs=1e-3)


def test_float_weights_must_be_a_matrix() -> None:
    with pytest.raises(ShapeError, match="expected a matrix"):
        quantize_fp8_block_with_report(torch.zeros(2, 3, 4))
