"""E8M0: all 256 bytes, and float32 around every power of two in every mode."""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_codec import CodecError, DtypeError, LosslessError, e8m0_to_fp32, fp32_to_e8m0

BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def _around_every_power_of_two() -> Tensor:
    """Powers of two, 1.5 and 1.75 times them, each with its neighbours; and subnormals."""
    powers = 2.0 ** np.arange(-149, 128)
    x = np.concatenate((powers, 1.5 * powers, 1.75 * powers)).astype(np.float32)
    x = np.concatenate((np.nextafter(x, np.float32(0)), x, np.nextafter(x, np.float32(np.inf))))
    return torch.from_numpy(np.unique(x[(x > 0) & np.isfinite(x)]))


def _exact_byte(x: float, mode: str) -> int:
    """From the definition, in Python's floats: x lies in [2^k, 2^(k+1))."""
    significand, exponent = math.frexp(x)
    k = exponent - 1
    up = {"floor": False, "ceil": significand > 0.5, "nearest": significand >= 0.75}[mode]
    return min(max(k + up, -127), 127) + 127


def test_every_byte_is_its_power_of_two() -> None:
    decoded = e8m0_to_fp32(BYTES)
    expected = torch.tensor([2.0 ** (byte - 127) for byte in range(255)])
    assert torch.equal(decoded[:255], expected)
    assert decoded[255:].view(torch.int32).item() == 0x7FC00000  # NaN, not infinity
    assert decoded[0].item() == 2.0**-127  # a float32 subnormal, not zero
    assert decoded[127].item() == 1.0  # bias 127


def test_decoding_agrees_with_others(cuda: Callable[[str, Tensor], Tensor]) -> None:
    theirs = BYTES.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    for oracle in (torch.from_numpy(theirs), cuda("decode_e8m0", BYTES)):
        assert torch.equal(e8m0_to_fp32(BYTES)[:255], oracle[:255])
        assert oracle[255].isnan()
    as_float8 = BYTES.view(torch.float8_e8m0fnu)
    assert torch.equal(
        e8m0_to_fp32(as_float8).view(torch.int32), e8m0_to_fp32(BYTES).view(torch.int32)
    )


@pytest.mark.parametrize("mode", ["floor", "ceil", "nearest", "exact"])
def test_every_byte_survives_a_round_trip(mode: str) -> None:
    found = fp32_to_e8m0(e8m0_to_fp32(BYTES[:255]), mode)  # type: ignore[arg-type]
    assert torch.equal(found, BYTES[:255])


@pytest.mark.parametrize("mode", ["floor", "ceil", "nearest"])
def test_encoding_follows_the_definition(mode: str) -> None:
    x = _around_every_power_of_two()
    expected = [_exact_byte(value, mode) for value in x.tolist()]
    assert fp32_to_e8m0(x, mode).tolist() == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["floor", "ceil"])
def test_encoding_agrees_with_nvidia(mode: str, cuda: Callable[[str, Tensor], Tensor]) -> None:
    x = torch.cat((_around_every_power_of_two(), torch.tensor([0.0, float("nan")])))
    ours = fp32_to_e8m0(x, mode)  # type: ignore[arg-type]
    assert torch.equal(ours, cuda(f"encode_e8m0_{mode}", x))


def test_nearest_agrees_with_torch_where_its_cast_is_normal() -> None:
    x = _around_every_power_of_two()
    x = x[(x >= 2.0**-126) & (x < 1.5 * 2.0**127)]
    assert torch.equal(fp32_to_e8m0(x, "nearest"), x.to(torch.float8_e8m0fnu).view(torch.uint8))


def test_all_bf16(all_bf16: Tensor) -> None:
    positive = all_bf16[(all_bf16 > 0) & all_bf16.isfinite()]
    for mode in ("floor", "ceil", "nearest"):
        expected = [_exact_byte(value, mode) for value in positive.tolist()]
        assert fp32_to_e8m0(positive, mode).tolist() == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["floor", "ceil", "nearest"])
def test_what_has_no_power_of_two(mode: str) -> None:
    x = torch.tensor([0.0, -0.0, -1.0, -float("inf"), float("inf"), float("nan"), -float("nan")])
    assert fp32_to_e8m0(x, mode).tolist() == [0, 0, 0, 255, 255, 255, 255]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [0.003, 1.5, 1.0000001, 0.0, -0.0, -2.0, 2.0**-128, 1.5 * 2.0**-127, math.inf, math.nan],
)
def test_exact_refuses_everything_but_powers_of_two(value: float) -> None:
    """Keeping only the exponent of 1.5 would scale a block by a third too little, silently."""
    with pytest.raises(LosslessError, match="1 of 3 values"):
        fp32_to_e8m0(torch.tensor([1.0, value, 4.0]), "exact")


def test_refusals() -> None:
    with pytest.raises(DtypeError, match="float32"):
        fp32_to_e8m0(torch.ones(3, dtype=torch.bfloat16), "floor")
    with pytest.raises(CodecError, match="exact"):
        fp32_to_e8m0(torch.ones(3), "truncate")  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="one-byte"):
        e8m0_to_fp32(torch.ones(3))


def test_any_shape_and_stride() -> None:
    x = torch.exp2(torch.arange(-20.0, 20.0)).view(5, 8).t()
    assert torch.equal(e8m0_to_fp32(fp32_to_e8m0(x)), x)
    assert e8m0_to_fp32(fp32_to_e8m0(torch.tensor(4.0))).item() == 4.0
    assert fp32_to_e8m0(torch.empty(0, 2)).shape == (0, 2)
