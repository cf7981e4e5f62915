"""Dequantization against numpy: all codes with all scale bytes, three formats, three dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_codec import Divisor
from nvfp4_codec.tensors import GlobalScale

BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
# Each row of 16 codes once: low nibble first.
ALL_CODES = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
GLOBAL_SCALES = [1.0, 0.75, 1e-3, 2.0**-120, 3e-39, 1e-45, 3e38, 5.1e5]
NUMPY = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16, torch.float32: np.float32}
CANONICAL_NAN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00, torch.float32: 0x7FC00000}


@pytest.fixture(params=list(NUMPY), ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


def _fp32(x: np.ndarray) -> np.ndarray:
    """Round float64 to float32. Products of two float32 numbers are exact in float64."""
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(np.float32)


def assert_rounded(found: Tensor, exact: np.ndarray) -> None:
    """Found is exact (float32) rounded to found's dtype; every NaN is the canonical one."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        expected = torch.from_numpy(exact.astype(NUMPY[found.dtype]).view(f"i{found.itemsize}"))
    integers = found.contiguous().view(expected.dtype)
    nan = torch.from_numpy(np.isnan(exact))
    assert torch.equal(integers[~nan], expected[~nan])
    assert (integers[nan] == CANONICAL_NAN[found.dtype]).all()


def _e2m1(weight: Tensor) -> np.ndarray:
    nibbles = torch.stack((weight & 15, weight >> 4), -1).flatten(-2)
    return nibbles.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float64)


@pytest.mark.parametrize(
    ("global_scale", "divides"),
    [(scale, divides) for divides in (False, True) for scale in GLOBAL_SCALES],
)
def test_nvfp4_every_code_with_every_scale_byte(
    codec: Any, dtype: torch.dtype, global_scale: float, divides: bool
) -> None:
    weight = ALL_CODES.expand(256, 8)
    value = torch.tensor(global_scale)
    scale_2: GlobalScale = Divisor(value) if divides else value
    found = codec.dequantize_nvfp4(
        weight, BYTES.view(256, 1).view(torch.float8_e4m3fn), scale_2, dtype=dtype
    )
    scale = BYTES.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    factor = np.float64(np.float32(global_scale))
    with np.errstate(all="ignore"):
        block = _fp32(scale / factor if divides else scale * factor).astype(np.float64)
        exact = _fp32(_e2m1(weight) * block[:, None])
    assert_rounded(found, exact)


def test_nvfp4_covers_subnormal_results_and_overflow(codec: Any) -> None:
    """The grid above holds these cases: bfloat16 subnormals, and float16 overflow."""
    scale = torch.full((256, 1), 1.0).to(torch.float8_e4m3fn)
    weight = ALL_CODES.expand(256, 8)
    small = codec.dequantize_nvfp4(weight, scale, torch.tensor(2.0**-130))
    assert small[0, 7].item() == 6 * 2.0**-130
    large = codec.dequantize_nvfp4(weight, scale, torch.tensor(5.1e5), dtype=torch.float16)
    assert large[0, 7].item() == float("inf")
    assert large[0, 15].item() == -float("inf")


def test_nvfp4_code_eight_is_negative_zero(codec: Any, dtype: torch.dtype) -> None:
    one = torch.ones(1, 1).to(torch.float8_e4m3fn)
    weight = torch.full((1, 8), 0x88, dtype=torch.uint8)
    found = codec.dequantize_nvfp4(weight, one, torch.tensor(1.0), dtype=dtype)
    assert (found == 0).all()
    assert found.signbit().all()


def test_a_divisor_is_not_used_as_a_multiplier(codec: Any) -> None:
    """Sixteen sixes, block scale 448, global 3584: 0.75 and not 9.6 million."""
    weight = torch.full((1, 8), 0x77, dtype=torch.uint8)
    scale = torch.full((1, 1), 448.0).to(torch.float8_e4m3fn)
    found = codec.dequantize_nvfp4(weight, scale, Divisor(torch.tensor([3584.0])))
    assert found.tolist() == [[0.75] * 16]


def test_mxfp4_every_code_with_every_scale_byte(codec: Any, dtype: torch.dtype) -> None:
    weight = torch.cat((ALL_CODES, ALL_CODES.flip(0))).expand(256, 16)
    found = codec.dequantize_mxfp4(weight, BYTES.view(256, 1), dtype=dtype)
    scale = BYTES.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    with np.errstate(all="ignore"):
        exact = _fp32(_e2m1(weight) * scale[:, None])
    assert_rounded(found, exact)
    as_float8 = BYTES.view(256, 1).view(torch.float8_e8m0fnu)
    again = codec.dequantize_mxfp4(weight.view(torch.int8), as_float8, dtype=dtype)
    assert torch.equal(again.view(torch.uint8), found.view(torch.uint8))


@pytest.mark.parametrize("scale", [1.0, 0.1, 2.0**-127, 1e-45, 3e38, float("inf"), float("nan")])
def test_fp8_every_byte_with_a_scale(codec: Any, dtype: torch.dtype, scale: float) -> None:
    weight = BYTES.view(16, 16).view(torch.float8_e4m3fn)
    found = codec.dequantize_fp8_block(
        weight, torch.full((1, 1), scale), block=(16, 16), dtype=dtype
    )
    values = BYTES.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64).reshape(16, 16)
    with np.errstate(all="ignore"):
        exact = _fp32(values * np.float64(np.float32(scale)))
    assert_rounded(found, exact)


@pytest.mark.parametrize("block", [(128, 128), (1, 128), (100, 7), (1000, 1000), (1, 1)])
@pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32", "ue8m0"])
def test_fp8_ragged_edges(
    codec: Any, dtype: torch.dtype, block: tuple[int, int], power_of_two: bool
) -> None:
    """130 x 576 has ragged edges for most blocks: 576 is no multiple of 128."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(0, 256, (130, 576), generator=generator, dtype=torch.uint8)
    grid = (-(-130 // block[0]), -(-576 // block[1]))
    if power_of_two:
        raw = torch.randint(0, 256, grid, generator=generator, dtype=torch.uint8)
        scale = raw.view(torch.float8_e8m0fnu)
        numbers = raw.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    else:
        scale = torch.randn(grid, generator=generator)
        numbers = scale.numpy().astype(np.float64)
    found = codec.dequantize_fp8_block(
        weight.view(torch.float8_e4m3fn), scale, block=block, dtype=dtype
    )
    values = weight.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    rows, columns = np.indices(values.shape)
    with np.errstate(all="ignore"):
        exact = _fp32(values * numbers[rows // block[0], columns // block[1]])
    assert_rounded(found, exact)
