"""Formats and functions of common/ and stages/, against the codec, torch and float64."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megamoe_kernel.activations import quantize_intermediate
from megamoe_kernel.layout_sm100 import to_scale_words
from megamoe_kernel.reference import swiglu
from nvfp4_codec.formats import decode_e2m1, decode_e4m3, encode_e2m1, encode_e4m3

INFINITY = float("inf")


def call(function: Callable[..., object], x: Tensor, dtype: torch.dtype, *more: object) -> Tensor:
    """Call ``f(in, [more,] out, n)`` of the library on a tensor."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype)
    function(ctypes.c_void_p(x.data_ptr()), *more, ctypes.c_void_p(out.data_ptr()),
             ctypes.c_int64(x.numel()))  # fmt: skip
    return out


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def around(values: Tensor) -> Tensor:
    """The values, their float32 neighbours, and the same with a minus sign."""
    near = [values, *(values.nextafter(torch.tensor(end)) for end in (INFINITY, -INFINITY))]
    positive = torch.cat(near)
    return torch.cat([positive, -positive])


def midpoints(grid: Tensor) -> Tensor:
    return torch.cat([grid, (grid[1:] + grid[:-1]) / 2])


def test_e2m1_decodes_all_codes(host_library: ctypes.CDLL) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    got = call(host_library.megamoe_fp32_from_e2m1, codes, torch.float32)
    assert torch.equal(bits(got), bits(decode_e2m1(codes)))  # -0.0 too


def test_ue4m3_decodes_all_bytes(host_library: ctypes.CDLL) -> None:
    codes = torch.arange(0x7F, dtype=torch.uint8)
    got = call(host_library.megamoe_fp32_from_ue4m3, codes, torch.float32)
    assert torch.equal(got, decode_e4m3(codes))


def test_e2m1_rounds_like_the_codec(host_library: ctypes.CDLL) -> None:
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    special = torch.tensor([7.0, 1e30, INFINITY, 1e-45, 1e-38])
    x = torch.cat([around(midpoints(grid)), around(special), torch.randn(20000) * 3])
    got = call(host_library.megamoe_e2m1_from_fp32, x, torch.uint8)
    assert torch.equal(got, encode_e2m1(x, nan_code=7, keep_negative_zero=True))


def test_ue4m3_rounds_like_the_codec(host_library: ctypes.CDLL) -> None:
    grid = decode_e4m3(torch.arange(0x7F, dtype=torch.uint8))
    near = around(midpoints(grid))
    x = torch.cat([near, torch.rand(20000) * 448, torch.rand(20000) * 2.0**-6]).abs()
    x = x[x <= 448]
    got = call(host_library.megamoe_ue4m3_from_fp32, x, torch.uint8)
    assert torch.equal(got, encode_e4m3(x))


def test_bf16_rounds_like_torch(host_library: ctypes.CDLL) -> None:
    # Every BF16 number, the middle to the next one, and the neighbours of both.
    upper = torch.arange(1 << 16, dtype=torch.int32) << 16
    x = torch.cat([upper + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values = x.view(torch.float32)
    got = call(host_library.megamoe_bf16_from_fp32, values, torch.int16)
    numbers = ~values.isnan()
    assert torch.equal(got[numbers], values.bfloat16().view(torch.int16)[numbers])
    assert bool((got[~numbers] == 0x7FC0).all())


def test_exp_is_within_2_to_minus_22(host_library: ctypes.CDLL) -> None:
    x = torch.cat([torch.linspace(-86, 88.7, 400001), torch.randn(100000)])
    got = call(host_library.megamoe_exp, x, torch.float32).double()
    error = (got / x.double().exp() - 1).abs().max().item()
    assert error < 2.0**-22
    assert error > 2.0**-26  # it is float32 after all: the test measures something


def test_exp_at_its_ends(host_library: ctypes.CDLL) -> None:
    x = torch.tensor([0.0, -0.0, 88.73, 89.0, 1e30, INFINITY, -INFINITY, -1e30, float("nan")])
    got = call(host_library.megamoe_exp, x, torch.float32).tolist()
    assert got[:2] == [1.0, 1.0]
    assert got[2:6] == [INFINITY] * 4  # e^88.73 is beyond float32
    assert all(0 < value < 1e-37 for value in got[6:8])
    assert math.isnan(got[8])


@pytest.mark.parametrize("limit", [10.0, None])
def test_swiglu_is_the_references(host_library: ctypes.CDLL, limit: float | None) -> None:
    gate = torch.cat([torch.randn(20000) * 8, torch.tensor([0.0, -0.0, 10.0, -100.0, 200.0])])
    up = torch.cat([torch.randn(20000) * 8, torch.tensor([1.0, 1.0, -11.0, 5.0, -200.0])])
    clamp = ctypes.c_float(INFINITY if limit is None else limit)
    got = call(
        host_library.megamoe_swiglu, gate, torch.float32, ctypes.c_void_p(up.data_ptr()), clamp
    )
    want = swiglu(gate.double(), up.double(), limit)
    # Three roundings and exp's error.
    assert torch.allclose(got.double(), want, rtol=2.0**-20, atol=1e-35)


@pytest.mark.parametrize("input_scale", [8.0 / 2688, 100.0 / 2688, 1.0, 1e-30])
def test_requantize_gives_the_codecs_bytes(host_library: ctypes.CDLL, input_scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(64, 256, generator=generator) * input_scale * 400
    h[3] = 0.0
    h[4, :16] = -0.0
    h[5] *= 1e-6  # block scales at their lower end
    h[6] *= 1e6  # and beyond their upper
    scale = torch.tensor(input_scale)
    want = quantize_intermediate(h, scale)
    codes = torch.empty(64, 128, dtype=torch.uint8)
    scales = torch.empty(64, 16, dtype=torch.uint8)
    host_library.megamoe_requantize(
        ctypes.c_void_p(h.data_ptr()), ctypes.c_float(float(scale)),
        ctypes.c_void_p(codes.data_ptr()), ctypes.c_void_p(scales.data_ptr()),
        ctypes.c_int64(scales.numel()), ctypes.c_uint64(1),
    )  # fmt: skip
    assert torch.equal(scales, want.block_scale.view(torch.uint8))
    assert torch.equal(codes, want.codes)


@pytest.mark.parametrize("block_rows", [8, 40, 128, 256])
def test_scale_words_lie_in_the_order_of_the_weights(
    host_library: ctypes.CDLL, block_rows: int
) -> None:
    # A block's words are those of a matrix with whole chunks of 128 rows, as weights have them.
    words = 4
    rows = -(-block_rows // 128) * 128
    marked = torch.arange(rows * words, dtype=torch.int32).view(1, rows, words)
    layout = to_scale_words(marked.view(torch.uint8))[0]  # [rows, words], strides (1, rows)
    memory = layout.T.contiguous().flatten()
    problem = (ctypes.c_int32 * 10)(1, 1, 0, 1, 256, 256, 2 * rows, block_rows, 1, 128)
    for row in range(block_rows):
        for word in range(words):
            at = host_library.megamoe_scale_word(problem, row, word)
            assert memory[at] == marked[0, row, word]
