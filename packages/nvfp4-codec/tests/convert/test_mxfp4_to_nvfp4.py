"""mxfp4_to_nvfp4: bit-exact inside the window, nearest below it, over every pair of exponents."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_codec import (
    Divisor,
    DtypeError,
    LosslessError,
    NonFiniteError,
    ShapeError,
    dequantize_mxfp4,
    dequantize_nvfp4,
    joint_weight_scale_2,
    mxfp4_to_nvfp4,
    pack_e2m1,
    swizzle_blockscale,
    unpack_e2m1,
)
from nvfp4_codec.backends import BackendName, available

BACKENDS = [name for name in ("reference", "native") if available()[name] is None]
WINDOW = 17  # E4M3's powers of two are 2^-9..2^8

# One row for each code repeated, one that mixes all of them.
CODES = torch.cat((torch.arange(16).repeat_interleave(32), torch.arange(16).repeat(2)))
CODES = CODES.to(torch.uint8).view(17, 32)


def _weights(num_blocks: int) -> Tensor:
    """Every code, and a mix of them, against every one of num_blocks scales: [17, K/2]."""
    return pack_e2m1(CODES.repeat(1, num_blocks))


def _scales(scale_bytes: list[int]) -> Tensor:
    return torch.tensor(scale_bytes, dtype=torch.uint8).expand(17, -1).contiguous()


def _float64(weight: Tensor, scale: Tensor, fmt: type, block: int, scale_2: float) -> np.ndarray:
    """Dequantize with ml_dtypes and numpy in float64, where every product is exact."""
    codes = unpack_e2m1(weight).numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    factors = scale.view(torch.uint8).numpy().view(fmt).astype(np.float64) * scale_2
    return codes * np.repeat(factors, block, axis=-1)


def _mx_values(weight: Tensor, scale: Tensor) -> np.ndarray:
    return _float64(weight, scale, ml_dtypes.float8_e8m0fnu, 32, 1.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_pair_of_exponents_in_the_window_is_bit_exact(backend: BackendName) -> None:
    for top in range(255):
        scale = _scales(list(range(max(0, top - WINDOW), top + 1)))
        weight = _weights(scale.shape[-1])
        cast = mxfp4_to_nvfp4(weight, scale, backend=backend)
        assert cast.lossless_mask.all()
        assert torch.equal(cast.weight, weight)
        wanted = _mx_values(weight, scale)
        scale_2 = float(cast.weight_scale_2)
        found = _float64(cast.weight, cast.weight_scale, ml_dtypes.float8_e4m3fn, 16, scale_2)
        np.testing.assert_array_equal(wanted.view(np.int64), found.view(np.int64))


@pytest.mark.parametrize("top", [0, 1, 2, 17, 18, 100, 127, 128, 253, 254])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_forms_decode_to_the_same_bits(top: int, dtype: torch.dtype) -> None:
    """Also where float32 has only subnormals left, and where it overflows."""
    scale = _scales(list(range(max(0, top - WINDOW), top + 1)))
    weight = _weights(scale.shape[-1])
    cast = mxfp4_to_nvfp4(weight, scale)
    before = dequantize_mxfp4(weight, scale, dtype=dtype, backend="reference")
    after = dequantize_nvfp4(*cast[:3], dtype=dtype, backend="reference")
    assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))


def test_the_largest_exponent_lands_on_the_largest_power_of_two_of_e4m3() -> None:
    for top in range(255):
        cast = mxfp4_to_nvfp4(_weights(1), _scales([top]))
        exponent = math.log2(float(cast.weight_scale_2))
        # Below 2^-126 it would be a subnormal float32, which a GPU may flush to zero.
        assert exponent == max(top - 127 - 8, -126)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("top", [254, 180, 127, 60, 18])
def test_blocks_below_the_window_become_the_nearest_values(top: int, backend: BackendName) -> None:
    scale = _scales(list(range(top + 1)))
    weight = _weights(top + 1)
    cast = mxfp4_to_nvfp4(weight, scale, outside="requantize", backend=backend)

    wanted = _mx_values(weight, scale)
    scale_2 = float(cast.weight_scale_2)
    found = _float64(cast.weight, cast.weight_scale, ml_dtypes.float8_e4m3fn, 16, scale_2)
    changed = (wanted != found).reshape(17, -1, 32).any(-1)
    np.testing.assert_array_equal(cast.lossless_mask.numpy(), ~changed)
    assert not changed[:, -1 - WINDOW :].any()
    assert changed[:, : top - WINDOW].any()

    # The best that any code could do at any scale: one of E4M3's values times one of E2M1's.
    e4m3 = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    e2m1 = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    grid = np.unique(np.outer(e4m3, e2m1)) * scale_2
    magnitude = np.abs(wanted[changed.repeat(32, axis=-1)])
    place = np.searchsorted(grid, magnitude)
    best = np.minimum(grid[place] - magnitude, magnitude - grid[np.maximum(place - 1, 0)])
    np.testing.assert_array_equal(
        np.abs(np.abs(found[changed.repeat(32, axis=-1)]) - magnitude), np.abs(best)
    )
    # No sign is lost either: a negative value that rounds to zero is -0.
    np.testing.assert_array_equal(np.signbit(wanted), np.signbit(found))


def test_a_block_below_the_window_is_exact_if_its_codes_can_be_shifted() -> None:
    """Codes 2 (1.0) and 4 (2.0) one step below the window are 1 (0.5) and 2 (1.0) inside it."""
    weight = pack_e2m1(torch.tensor([[7] * 32 + [2, 4] * 16 + [1] * 32], dtype=torch.uint8))
    scale = torch.tensor([[127, 127 - 18, 127 - 18]], dtype=torch.uint8)
    cast = mxfp4_to_nvfp4(weight, scale, outside="requantize")
    assert cast.lossless_mask.tolist() == [[True, True, False]]
    assert unpack_e2m1(cast.weight)[0, 32:64].tolist() == [1, 2] * 16


def test_the_default_refuses_blocks_below_the_window_with_their_number_and_spread() -> None:
    # Of 17 rows two hold only zeros.
    scale = _scales([127, 127 - 18])
    with pytest.raises(LosslessError, match=r"15 of 34 blocks .* spread over 18, at most 17"):
        mxfp4_to_nvfp4(_weights(2), scale)
    # A partner with larger exponents may be the cause.
    with pytest.raises(LosslessError, match=r"weight_scale_2 2\^10 is too large"):
        mxfp4_to_nvfp4(_weights(1), _scales([127]), weight_scale_2=torch.tensor(2.0**10))


def test_zero_blocks_do_not_count_for_the_window_and_keep_their_signs() -> None:
    zeros = torch.tensor([0, 8] * 16, dtype=torch.uint8)
    weight = pack_e2m1(torch.cat((zeros, torch.full((32,), 5), zeros)).to(torch.uint8)[None])
    scale = torch.tensor([[254, 127, 0]], dtype=torch.uint8)
    cast = mxfp4_to_nvfp4(weight, scale)
    assert float(cast.weight_scale_2) == 2.0**-8
    assert cast.lossless_mask.all()
    assert torch.equal(cast.weight, weight)
    before = dequantize_mxfp4(weight, scale, backend="reference")
    after = dequantize_nvfp4(*cast[:3], backend="reference")
    assert torch.equal(before.view(torch.int16), after.view(torch.int16))


def test_a_tensor_of_zeros_is_legal() -> None:
    cast = mxfp4_to_nvfp4(torch.full((2, 16), 0x80, dtype=torch.uint8), _scales([3])[:2])
    assert float(cast.weight_scale_2) == 1.0
    assert cast.lossless_mask.all()
    assert cast.weight_scale.view(torch.uint8).eq(1).all()  # 2^-9, E4M3's smallest


def test_e8m0_nan_is_refused_by_name() -> None:
    scale = _scales([127, 255])
    with pytest.raises(NonFiniteError, match=r"17 bytes 255 \(NaN\) of 34"):
        mxfp4_to_nvfp4(_weights(2), scale)
    with pytest.raises(NonFiniteError, match="17 bytes 255"):
        joint_weight_scale_2([scale])


def test_joint_scale_makes_a_pair_exact() -> None:
    """w1 and w3 share one weight_scale_2: the larger of the two decides for both."""
    w1, w3 = _scales([120, 125]), _scales([110, 113])
    shared = joint_weight_scale_2([w1, w3])
    assert float(shared) == 2.0 ** (125 - 127 - 8)
    for scale in (w1, w3):
        cast = mxfp4_to_nvfp4(_weights(2), scale, weight_scale_2=shared)
        assert float(cast.weight_scale_2) == float(shared)
        assert cast.lossless_mask.all()
        before = dequantize_mxfp4(_weights(2), scale, backend="reference")
        assert torch.equal(before, dequantize_nvfp4(*cast[:3], backend="reference"))


def test_joint_scale_ignores_zero_blocks_only_if_it_sees_the_codes() -> None:
    weight = pack_e2m1(torch.tensor([[0] * 32 + [3] * 32], dtype=torch.uint8))
    scale = torch.tensor([[200, 127]], dtype=torch.uint8)
    assert float(joint_weight_scale_2([scale])) == 2.0 ** (200 - 127 - 8)
    assert float(joint_weight_scale_2([scale], [weight])) == 2.0**-8


@pytest.mark.parametrize("outside", ["error", "requantize"])
def test_a_given_scale_that_would_saturate_is_refused(outside: str) -> None:
    with pytest.raises(LosslessError, match=r"too small: 15 of 17 blocks would saturate"):
        mxfp4_to_nvfp4(
            _weights(1), _scales([140]), weight_scale_2=torch.tensor(2.0**-8), outside=outside
        )


def test_a_given_scale_must_be_a_power_of_two() -> None:
    with pytest.raises(LosslessError, match="expected a power of two"):
        mxfp4_to_nvfp4(_weights(1), _scales([127]), weight_scale_2=torch.tensor(3e-3))
    divisor = Divisor(torch.tensor(2.0**8))
    cast = mxfp4_to_nvfp4(_weights(1), _scales([127]), weight_scale_2=divisor)
    assert float(cast.weight_scale_2) == 2.0**-8


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_input_is_never_touched_and_out_is_filled(backend: BackendName) -> None:
    weight, scale = _weights(2), _scales([127, 100])
    copies = weight.clone(), scale.clone()
    out = torch.empty_like(weight), torch.empty(17, 4, dtype=torch.float8_e4m3fn)
    cast = mxfp4_to_nvfp4(weight, scale, outside="requantize", out=out, backend=backend)
    assert cast.weight is out[0]
    assert cast.weight_scale is out[1]
    fresh = mxfp4_to_nvfp4(weight, scale, outside="requantize", backend=backend)
    assert torch.equal(fresh.weight, cast.weight)
    assert torch.equal(fresh.weight_scale.view(torch.uint8), out[1].view(torch.uint8))
    assert torch.equal(weight, copies[0])
    assert torch.equal(scale, copies[1])


def test_no_copy_of_the_codes_is_made_unless_one_changes() -> None:
    weight = _weights(1)
    assert mxfp4_to_nvfp4(weight, _scales([127])).weight.data_ptr() == weight.data_ptr()


def test_stacks_int8_codes_and_e8m0_dtype_are_accepted() -> None:
    weight = _weights(2).expand(3, -1, -1).contiguous().view(torch.int8)
    scale = _scales([127, 125]).expand(3, -1, -1).contiguous().view(torch.float8_e8m0fnu)
    cast = mxfp4_to_nvfp4(weight, scale)
    assert cast.weight_scale.shape == (3, 17, 4)
    assert cast.lossless_mask.shape == (3, 17, 2)
    assert cast.weight.dtype == torch.uint8
    flat = mxfp4_to_nvfp4(_weights(2), _scales([127, 125]))
    assert torch.equal(cast.weight_scale[2].view(torch.uint8), flat.weight_scale.view(torch.uint8))


@pytest.mark.parametrize(
    ("weight", "scale", "error"),
    [
        pytest.param(torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 0, dtype=torch.uint8),
                     ShapeError, id="K-16"),
        pytest.param(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8),
                     ShapeError, id="1-D-scale"),
        pytest.param(torch.zeros(2, 16), torch.zeros(2, 1, dtype=torch.uint8),
                     DtypeError, id="float-codes"),
        pytest.param(torch.zeros(2, 16, dtype=torch.uint8),
                     torch.zeros(2, 1, dtype=torch.float8_e4m3fn), DtypeError, id="e4m3-scale"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(weight: Tensor, scale: Tensor, error: type[Exception]) -> None:
    with pytest.raises(error):
        mxfp4_to_nvfp4(weight, scale)


def test_the_joint_scale_takes_lists_of_tensors() -> None:
    scale = torch.full((1, 2), 120, dtype=torch.uint8)
    weight = torch.zeros(1, 32, dtype=torch.uint8)
    for bad in (scale, None, swizzle_blockscale(scale)):
        with pytest.raises(DtypeError, match="weight_scales is a .*, expected a list"):
            joint_weight_scale_2(bad)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="weights is a Tensor"):
        joint_weight_scale_2([scale], weight)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="a weight_scale is list"):
        joint_weight_scale_2([[120]])  # type: ignore[list-item]
