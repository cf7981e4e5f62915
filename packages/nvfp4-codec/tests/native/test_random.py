"""Random shapes, addresses, tails and thread counts: native equals the reference byte for byte."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nvfp4_codec import native, reference
from nvfp4_codec.scales import get_profile

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
quick = settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
any_seed = st.integers(0, 2**32)
any_threads = st.integers(1, 5)
any_dtype = st.sampled_from(DTYPES)
GUARD = 0xA5


class Arena:
    """Tensors at odd addresses, each between guard bytes that must survive."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.guarded: list[tuple[Tensor, int, int]] = []

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def empty(self, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        # Whole elements off a 64-byte boundary: torch refuses views at other addresses.
        start = 128 + dtype.itemsize * self.integer(0, 63)
        memory = torch.full((start + size + 128,), GUARD, dtype=torch.uint8)
        self.guarded.append((memory, start, start + size))
        return memory[start : start + size].view(dtype).view(shape)

    def bytes(self, *shape: int) -> Tensor:
        found = self.empty(*shape)
        return found.copy_(torch.randint(0, 256, shape, generator=self.generator))

    def floats(self, rows: int, columns: int, dtype: torch.dtype, *, nonfinite: bool) -> Tensor:
        """Rows of very different magnitudes, with zeros, zero runs, and NaN and Inf if asked."""
        x = torch.randn(rows, columns, generator=self.generator)
        x *= torch.exp2(torch.randint(-30, 14, (rows, 1), generator=self.generator).float())
        kind = torch.randint(0, 60, (rows, columns), generator=self.generator)
        x[kind == 0] = 0.0
        x[kind == 1] = -0.0
        if nonfinite:
            x[kind == 2], x[kind == 3], x[kind == 4] = math.inf, -math.inf, math.nan
        if columns >= 96:
            x[:, 32:64] = 0.0
        return self.empty(rows, columns, dtype=dtype).copy_(x)

    def check_guards(self) -> None:
        for memory, start, end in self.guarded:
            assert (memory[:start] == GUARD).all()
            assert (memory[end:] == GUARD).all()


def assert_same(found: Tensor, expected: Tensor) -> None:
    wrong = (found.view(torch.uint8) != expected.view(torch.uint8)).nonzero()
    assert not len(wrong), f"{len(wrong)} bytes differ, first at {wrong[0].tolist()}"


@quick
@given(any_seed, any_threads, any_dtype, st.integers(0, 9), st.integers(0, 40), st.booleans())
def test_quantize_nvfp4(
    isa: str, seed: int, threads: int, dtype: torch.dtype, rows: int, blocks: int, nonfinite: bool
) -> None:
    arena = Arena(seed)
    x = arena.floats(rows, 16 * blocks, dtype, nonfinite=nonfinite)
    largest, count = native.amax(x, isa=isa, threads=threads)
    assert (largest, count) == reference.amax(x)
    for profile in map(get_profile, sorted(native.NVFP4_PROFILES)):
        scale_2 = float(torch.tensor(max(largest, 1.0) / 2688))
        outputs = arena.empty(rows, 8 * blocks), arena.empty(rows, blocks)
        expected = [torch.empty_like(t) for t in outputs]
        reference.quantize_nvfp4(x, scale_2, profile, count > 0, *expected)
        native.quantize_nvfp4(x, scale_2, profile, count > 0, *outputs, isa=isa, threads=threads)
        assert_same(outputs[0], expected[0])
        assert_same(outputs[1], expected[1])
    arena.check_guards()


@quick
@given(any_seed, any_threads, any_dtype, st.integers(0, 9), st.integers(0, 40))
def test_dequantize_nvfp4(
    isa: str, seed: int, threads: int, dtype: torch.dtype, rows: int, blocks: int
) -> None:
    arena = Arena(seed)
    weight, scale = arena.bytes(rows, 8 * blocks), arena.bytes(rows, blocks)
    out = arena.empty(rows, 16 * blocks, dtype=dtype)
    expected = torch.empty_like(out)
    reference.dequantize_nvfp4(weight, scale, 0.0123, False, expected)
    native.dequantize_nvfp4(weight, scale, 0.0123, False, out, isa=isa, threads=threads)
    assert_same(out, expected)
    arena.check_guards()


@quick
@given(any_seed, any_threads, any_dtype, st.integers(0, 9), st.integers(0, 20), st.booleans())
def test_mxfp4_both_ways(
    isa: str, seed: int, threads: int, dtype: torch.dtype, rows: int, blocks: int, nonfinite: bool
) -> None:
    arena = Arena(seed)
    x = arena.floats(rows, 32 * blocks, dtype, nonfinite=nonfinite)
    weight, scale = arena.empty(rows, 16 * blocks), arena.empty(rows, blocks)
    expected = torch.empty_like(weight), torch.empty_like(scale)
    reference.quantize_mxfp4(x, "rceil", nonfinite, *expected)
    native.quantize_mxfp4(x, "rceil", nonfinite, weight, scale, isa=isa, threads=threads)
    assert_same(weight, expected[0])
    assert_same(scale, expected[1])
    out = arena.empty(*x.shape, dtype=dtype)
    decoded = torch.empty_like(out)
    scale = arena.bytes(rows, blocks)
    reference.dequantize_mxfp4(weight, scale, decoded)
    native.dequantize_mxfp4(weight, scale, out, isa=isa, threads=threads)
    assert_same(out, decoded)
    arena.check_guards()


@quick
@given(
    any_seed,
    any_threads,
    any_dtype,
    st.tuples(st.integers(0, 150), st.integers(0, 300)),
    st.tuples(st.integers(1, 160), st.integers(1, 320)),
    st.booleans(),
)
def test_fp8_block_both_ways(
    isa: str,
    seed: int,
    threads: int,
    dtype: torch.dtype,
    shape: tuple[int, int],
    block: tuple[int, int],
    ue8m0: bool,
) -> None:
    arena = Arena(seed)
    x = arena.floats(*shape, dtype, nonfinite=True)
    grid = math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])
    weight = arena.empty(*shape)
    scale = arena.empty(*grid, dtype=torch.uint8 if ue8m0 else torch.float32)
    expected = torch.empty_like(weight), torch.empty_like(scale)
    reference.quantize_fp8_block(x, block, ue8m0, True, *expected)
    native.quantize_fp8_block(x, block, ue8m0, True, weight, scale, isa=isa, threads=threads)
    assert_same(weight, expected[0])
    assert_same(scale, expected[1])
    factors = arena.empty(*grid, dtype=torch.float32)
    factors.copy_(torch.randn(grid, generator=arena.generator))
    weight = arena.bytes(*shape)
    out = arena.empty(*shape, dtype=dtype)
    decoded = torch.empty_like(out)
    reference.dequantize_fp8_block(weight, factors, block, decoded)
    native.dequantize_fp8_block(weight, factors, block, out, isa=isa, threads=threads)
    assert_same(out, decoded)
    arena.check_guards()


@quick
@given(any_seed, any_threads, st.integers(0, 9), st.integers(0, 20), st.booleans())
def test_mxfp4_to_nvfp4(
    isa: str, seed: int, threads: int, rows: int, blocks: int, in_place: bool
) -> None:
    arena = Arena(seed)
    weight, scale = arena.bytes(rows, 16 * blocks), arena.bytes(rows, blocks)
    scale.clamp_(max=254)
    before = weight.clone()
    weight_out = weight if in_place else arena.empty(rows, 16 * blocks)
    scale_out = arena.empty(rows, 2 * blocks)
    lossless = torch.empty(rows, blocks, dtype=torch.bool)
    lossy = native.mxfp4_to_nvfp4(
        weight, scale, 130, weight_out, scale_out, lossless, isa=isa, threads=threads
    )
    assert torch.equal(weight_out, before)
    exact = ((scale.int() - 130 >= -9) & (scale.int() - 130 <= 8)) | (
        (before.view(rows, blocks, 16) & 0x77) == 0
    ).all(-1)
    assert torch.equal(lossless, exact)
    assert lossy == int((~exact).sum())
    arena.check_guards()


LARGE = (2051, 4096)  # as bfloat16, and twice as many rows as codes, above 8 MiB


@cache
def large_inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    rows, columns = LARGE
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)
    scale = torch.randint(1, 127, (rows, columns // 16), dtype=torch.uint8, generator=generator)
    factors = torch.rand(math.ceil(rows / 128), columns // 128, generator=generator)
    return codes, codes[:, : columns // 2].contiguous(), scale, factors


@cache
def large_expected() -> tuple[Tensor, ...]:
    codes, weight, scale, factors = large_inputs()
    nvfp4, fp8 = (torch.empty(LARGE, dtype=torch.bfloat16) for _ in range(2))
    reference.dequantize_nvfp4(weight, scale, 0.5, False, nvfp4)
    reference.dequantize_fp8_block(codes, factors, (128, 128), fp8)
    packed, scales = torch.empty_like(weight), torch.empty_like(scale)
    reference.quantize_nvfp4(fp8, 0.01, get_profile("modelopt"), True, packed, scales)
    return nvfp4, fp8, packed, scales


@pytest.mark.parametrize("threads", [1, 3])
def test_large_outputs_bypass_the_caches(isa: str, threads: int) -> None:
    """Above some size outputs are written by streaming stores: a path of its own."""
    codes, weight, scale, factors = large_inputs()
    nvfp4, fp8, packed, scales = large_expected()
    out = torch.empty(LARGE, dtype=torch.bfloat16)
    native.dequantize_nvfp4(weight, scale, 0.5, False, out, isa=isa, threads=threads)
    assert_same(out, nvfp4)
    native.dequantize_fp8_block(codes, factors, (128, 128), out, isa=isa, threads=threads)
    assert_same(out, fp8)
    twice = torch.cat((fp8, fp8))
    found = torch.cat((packed, packed)).zero_(), torch.cat((scales, scales)).zero_()
    modelopt = get_profile("modelopt")
    native.quantize_nvfp4(twice, 0.01, modelopt, True, *found, isa=isa, threads=threads)
    assert_same(found[0], torch.cat((packed, packed)))
    assert_same(found[1], torch.cat((scales, scales)))
