"""Triton kernels give the reference's bytes: every code and scale, every 16-bit float, any shape.

The reference runs on the CPU. Outputs are poisoned first, so an element that nobody writes
differs. Without a GPU the same tests run, on smaller inputs, in Triton's interpreter: see
``tests/triton/test_interpreter.py``.
"""

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from nvfp4_codec import (
    Divisor,
    NonFiniteError,
    dequantize_nvfp4,
    quantize_nvfp4,
    reference,
)
from nvfp4_codec.formats import decode_e4m3
from nvfp4_codec.scales import PROFILES

triton_kernels = pytest.importorskip("nvfp4_codec.triton_kernels", reason="needs triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
needs_cuda = pytest.mark.skipif(INTERPRETED, reason="needs a real CUDA device")

T = TypeVar("T")

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
IDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
by_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=IDS.get)
SIZE = 1 if INTERPRETED else 64  # factor on the amount of random data


def some(items: Iterable[T], step: int = 2) -> list[T]:
    """All items on a GPU; in the slow interpreter every step-th."""
    return list(items)[:: step if INTERPRETED else 1]


# Ordinary; products subnormal in every output dtype; at both ends of float32.
GLOBAL_SCALES = (1.0, 0.37e-4, 1.7e-38, 1.3e-40, 2.0**-149, 3.0e38, 777.7)


def float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((count,), 0xAA, dtype=torch.uint8, device=device).view(dtype).view(shape)


def as_bits(x: Tensor) -> Tensor:
    return torch.atleast_1d(x).contiguous().view(torch.uint8)


def assert_same_bytes(actual: Tensor, expected: Tensor, what: str) -> None:
    actual, expected = as_bits(actual.cpu()), as_bits(expected)
    if not torch.equal(actual, expected):
        wrong = (actual != expected).nonzero()
        first = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{what}: {len(wrong)} of {actual.numel()} bytes differ, first at {first}: "
            f"{int(actual[first]):#x}, expected {int(expected[first]):#x}"
        )


# Dequantize


def check_dequantize_nvfp4(
    weight: Tensor,
    scale: Tensor,
    global_scale: float,
    divide: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    shape = (weight.shape[0], 2 * weight.shape[1])
    expected = torch.empty(shape, dtype=dtype)
    reference.dequantize_nvfp4(weight, scale, global_scale, divide, expected)
    out = poisoned(shape, dtype, device)
    triton_kernels.dequantize_nvfp4(weight.to(device), scale.to(device), global_scale, divide, out)
    assert_same_bytes(out, expected, f"{dtype} {global_scale} divide={divide}")


def all_codes(rows: int, block: int, generator: torch.Generator) -> Tensor:
    """Packed blocks with every code at shuffled places."""
    codes = torch.stack([torch.randperm(block, generator=generator) % 16 for _ in range(rows)]).to(
        torch.uint8
    )
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


@by_dtype
@pytest.mark.parametrize("divide", [False, True], ids=["multiply", "divide"])
def test_nvfp4_dequantize_every_scale_and_code(
    dtype: torch.dtype, divide: bool, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(1)
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1)
    weight = all_codes(256, 16, generator)
    scales = (*GLOBAL_SCALES, float("inf"), 0.0, float("nan"))
    for global_scale in some(scales, 3):
        check_dequantize_nvfp4(weight, scale, float32(global_scale), divide, dtype, device)


@by_dtype
def test_mxfp4_dequantize_every_scale_and_code(dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1)
    weight = all_codes(256, 32, generator)
    expected = torch.empty((256, 32), dtype=dtype)
    reference.dequantize_mxfp4(weight, scale, expected)
    out = poisoned((256, 32), dtype, device)
    triton_kernels.dequantize_mxfp4(weight.to(device), scale.to(device), out)
    assert_same_bytes(out, expected, str(dtype))


@pytest.mark.parametrize("shape", some([(5, 80), (1, 16), (3, 48), (17, 1040), (129, 2064)], 3))
def test_dequantize_shapes_with_tails(shape: tuple[int, int], device: torch.device) -> None:
    generator = torch.Generator().manual_seed(shape[0])
    rows, k = shape
    weight = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 256, (rows, k // 16), dtype=torch.uint8, generator=generator)
    for dtype in FLOATS:
        check_dequantize_nvfp4(weight, scale, float32(0.01), False, dtype, device)


FP8_CASES = [
    ((256, 512), (128, 128)),
    ((130, 1000), (128, 128)),
    ((576, 200), (128, 128)),
    ((7, 130), (3, 50)),
    ((33, 64), (1, 16)),
    ((40, 36), (64, 12)),
    ((1, 1), (128, 128)),
    ((65, 129), (32, 64)),
]
fp8_case = pytest.mark.parametrize(
    ("shape", "block"), FP8_CASES, ids=lambda pair: f"{pair[0]}x{pair[1]}"
)


def num_blocks(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def check_dequantize_fp8_block(
    weight: Tensor,
    scale: Tensor,
    block: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    expected = torch.empty(weight.shape, dtype=dtype)
    reference.dequantize_fp8_block(weight, scale, block, expected)
    out = poisoned(tuple(weight.shape), dtype, device)
    triton_kernels.dequantize_fp8_block(weight.to(device), scale.to(device), block, out)
    assert_same_bytes(out, expected, f"{dtype} {tuple(weight.shape)} in blocks of {block}")


@fp8_case
@by_dtype
def test_fp8_block_dequantize(
    shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    scale = torch.randn(num_blocks(shape, block), generator=generator)
    special = torch.tensor([0.0, float("nan"), float("inf"), 1.3e-40, 2.0**-127, 3e38, -1.0])
    scale.view(-1)[1::2][: len(special)] = special[: len(scale.view(-1)[1::2])]
    check_dequantize_fp8_block(weight, scale, block, device, dtype)


def test_fp8_block_dequantize_every_code(device: torch.device) -> None:
    weight = torch.arange(256, dtype=torch.uint8).view(4, 64)
    for dtype in FLOATS:
        scale = torch.tensor([[1.0e-5], [3.0], [1.1e-39], [2.0**120]])
        check_dequantize_fp8_block(weight, scale, (1, 128), device, dtype)


# Quantize


def check_quantize_nvfp4(
    x: Tensor, global_scale: float, profile: str, device: torch.device, saturate: bool = False
) -> None:
    rows, k = x.shape
    weight = torch.empty((rows, k // 2), dtype=torch.uint8)
    scale = torch.empty((rows, k // 16), dtype=torch.uint8)
    rules = PROFILES[profile]
    reference.quantize_nvfp4(x, global_scale, rules, saturate, weight, scale)
    weight_out = poisoned((rows, k // 2), torch.uint8, device)
    scale_out = poisoned((rows, k // 16), torch.uint8, device)
    triton_kernels.quantize_nvfp4(
        x.to(device), global_scale, rules, saturate, weight_out, scale_out
    )
    what = f"{tuple(x.shape)} {x.dtype} {profile} {global_scale!r}"
    assert_same_bytes(scale_out, scale, f"scales of {what}")
    assert_same_bytes(weight_out, weight, f"codes of {what}")


def global_scale_of(x: Tensor, profile: str = "modelopt") -> float:
    value = PROFILES[profile].global_scale(x[x.isfinite()].abs().max().cpu())
    assert isinstance(value, Tensor)
    return float(value)


by_profile = pytest.mark.parametrize("profile", some(triton_kernels.NVFP4_PROFILES))


def all_patterns(dtype: torch.dtype) -> Tensor:
    """All 65,536 16-bit floats as blocks of neighbours, then as blocks of mixed magnitudes."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    return torch.cat([patterns.view(-1, 16), patterns.view(16, -1).T.contiguous()])


@by_profile
@pytest.mark.parametrize("dtype", FLOATS[:2], ids=IDS.get)
def test_nvfp4_quantize_every_16_bit_float(
    dtype: torch.dtype, profile: str, device: torch.device
) -> None:
    x = all_patterns(dtype)
    finite = torch.where(x.isfinite(), x, 0.0)
    scales = [global_scale_of(x), 1e-3, 2.0**-30, 1.1e-44, 2.0**90, 3e38, 0.02]
    for global_scale in some(scales, 4):
        check_quantize_nvfp4(finite, float32(global_scale), profile, device)
    check_quantize_nvfp4(x, float32(1e-3), profile, device, saturate=True)


def samples(dtype: torch.dtype, rows: int, k: int, generator: torch.Generator) -> dict[str, Tensor]:
    normal = torch.randn((rows, k), generator=generator)
    exponents = torch.randint(-20, 21, (rows, 1), generator=generator).float()
    result = {
        "normal": normal * 0.02,
        "heavy-tailed": normal**5,
        "row-scaled": normal * exponents.exp2(),
        "zero rows": torch.where(exponents < 0, 0.0, normal),
        "negative zeros": torch.where(normal < 0.5, -0.0, normal),
        "tiny": normal * 1e-40,
        "huge": normal * 1e37,
        "constant": torch.full_like(normal, -3.0),
    }
    if dtype == torch.float16:
        result = {name: x.clamp(-65000, 65000) for name, x in result.items()}
    return {name: x.to(dtype) for name, x in result.items()}


@by_profile
@by_dtype
def test_nvfp4_quantize_random(dtype: torch.dtype, profile: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(4)
    for x in some(samples(dtype, 37 * SIZE, 208, generator).values(), 4):
        for factor in some(
            (1.0, 1e-3, 1e3), 3
        ):  # right, so small that most blocks saturate, too large
            global_scale = float32(global_scale_of(x) * factor)
            if global_scale > 0:  # the float16 of "tiny" is zero
                check_quantize_nvfp4(x, global_scale, profile, device)


@pytest.mark.parametrize("shape", some([(5, 80), (1, 16), (3, 48), (17, 1040), (129, 2064)], 3))
def test_nvfp4_quantize_shapes_with_tails(shape: tuple[int, int], device: torch.device) -> None:
    generator = torch.Generator().manual_seed(shape[0])
    for dtype in FLOATS:
        x = torch.randn(shape, generator=generator).to(dtype)
        check_quantize_nvfp4(x, global_scale_of(x), "modelopt", device)


@pytest.mark.parametrize("num_warps", [1, 2, 4, 8])
@pytest.mark.parametrize("unroll", [1, 2, 4])
def test_launch_shapes(
    num_warps: int, unroll: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results do not depend on how many threads and words a program has."""
    if INTERPRETED and (num_warps, unroll) not in ((1, 1), (1, 4)):
        pytest.skip("slow in the interpreter")
    launch = triton_kernels.Launch(num_warps, unroll)
    for name in ("QUANTIZE_NVFP4", "QUANTIZE_MXFP4", "DEQUANTIZE_E2M1", "DEQUANTIZE_E4M3"):
        monkeypatch.setattr(triton_kernels, name, launch)
    generator = torch.Generator().manual_seed(10)
    rows = 3 if INTERPRETED else 301
    codes = torch.randint(0, 256, (rows, 260), dtype=torch.uint8, generator=generator)
    for block in ((128, 128), (2, 12)):
        check_dequantize_fp8_block(codes, torch.rand(num_blocks(codes.shape, block)), block, device)
    x = torch.randn((rows, 352), generator=generator).bfloat16()
    check_quantize_nvfp4(x, global_scale_of(x), "modelopt", device)
    weight = torch.randint(0, 256, (rows, 176), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 256, (rows, 22), dtype=torch.uint8, generator=generator)
    check_dequantize_nvfp4(weight, scale, float32(0.01), False, torch.bfloat16, device)


@by_dtype
def test_nvfp4_quantize_at_rounding_boundaries(dtype: torch.dtype, device: torch.device) -> None:
    """Values within a few units of bound * divisor, where an inexact quotient picks wrong codes."""
    generator = torch.Generator().manual_seed(5)
    rows = 1024 * SIZE
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    for global_scale in some((0.00123, 1.0, 3.3e-5, 2.0**-75 / 3, 2.0**80 / 3), 3):
        if dtype == torch.float16 and not 1e-6 < global_scale < 1e3:
            continue
        global_scale = float32(global_scale)
        code = torch.randint(1, 0x7F, (rows, 1), dtype=torch.uint8, generator=generator)
        divisor = decode_e4m3(code) * global_scale
        near = (bounds * divisor).repeat(1, 2)
        steps = torch.randint(-2, 3, near.shape, dtype=torch.int32, generator=generator)
        near = (near.view(torch.int32) + steps).view(torch.float32)
        near = torch.where(torch.rand(near.shape, generator=generator) < 0.5, near, -near)
        x = torch.cat([6 * divisor, near, -6 * divisor], dim=1).to(dtype)
        x = torch.where(x.isfinite(), x, 0.0)
        check_quantize_nvfp4(x, global_scale, "modelopt", device)


@by_dtype
def test_nvfp4_quantize_saturates_what_is_not_finite(
    dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn((64, 96), generator=generator).to(dtype)
    for value in (float("inf"), float("-inf"), float("nan"), -0.0):
        x[torch.rand(x.shape, generator=generator) < 0.1] = value
    x[3] = float("nan")
    x[4] = float("-inf")
    cases = itertools.product((1e-3, 1e-44), triton_kernels.NVFP4_PROFILES)
    for global_scale, profile in some(cases, 3):
        check_quantize_nvfp4(x, float32(global_scale), profile, device, saturate=True)


@pytest.mark.parametrize("mode", ["floor", "ceil", "rceil", "even"])
@by_dtype
def test_mxfp4_quantize(mode: str, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(7)
    inputs = list(samples(dtype, 11 * SIZE, 224, generator).values())
    if dtype != torch.float32:
        x = all_patterns(dtype).view(-1, 32)
        inputs.append(torch.where(x.isfinite(), x, 0.0))
        inputs.append(x)
    for x in some(inputs[::-1], 7):
        saturate = not bool(x.isfinite().all())
        rows, k = x.shape
        weight = torch.empty((rows, k // 2), dtype=torch.uint8)
        scale = torch.empty((rows, k // 32), dtype=torch.uint8)
        reference.quantize_mxfp4(x, mode, saturate, weight, scale)
        weight_out = poisoned((rows, k // 2), torch.uint8, device)
        scale_out = poisoned((rows, k // 32), torch.uint8, device)
        triton_kernels.quantize_mxfp4(x.to(device), mode, saturate, weight_out, scale_out)
        assert_same_bytes(scale_out, scale, f"scales of {tuple(x.shape)} {dtype} {mode}")
        assert_same_bytes(weight_out, weight, f"codes of {tuple(x.shape)} {dtype} {mode}")


@pytest.mark.parametrize(
    ("shape", "block"),
    FP8_CASES[3::2] if INTERPRETED else FP8_CASES,
    ids=lambda pair: f"{pair[0]}x{pair[1]}",
)
@pytest.mark.parametrize("ue8m0", [False, True], ids=["fp32", "ue8m0"])
def test_fp8_block_quantize(
    shape: tuple[int, int], block: tuple[int, int], ue8m0: bool, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(8)
    for dtype in some(FLOATS):
        inputs = list(samples(dtype, *shape, generator).values())
        inputs.append(inputs[0].clone().fill_(0.0))
        special = inputs[0].clone()
        special.view(-1)[::5] = float("inf")
        special.view(-1)[1::7] = float("nan")
        for x in some([*inputs, special, -special], 9):
            saturate = not bool(x.isfinite().all())
            scale_dtype = torch.uint8 if ue8m0 else torch.float32
            weight = torch.empty(shape, dtype=torch.uint8)
            scale = torch.empty(num_blocks(shape, block), dtype=scale_dtype)
            reference.quantize_fp8_block(x, block, ue8m0, saturate, weight, scale)
            weight_out = poisoned(shape, torch.uint8, device)
            scale_out = poisoned(tuple(scale.shape), scale_dtype, device)
            triton_kernels.quantize_fp8_block(
                x.to(device), block, ue8m0, saturate, weight_out, scale_out
            )
            assert_same_bytes(scale_out, scale, f"scales of {dtype}")
            assert_same_bytes(weight_out, weight, f"codes of {dtype}")


@by_dtype
@pytest.mark.parametrize("count", [0, 1, 15, 2047, 2049, 9000])
def test_amax(dtype: torch.dtype, count: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn((1, count), generator=generator).to(dtype)
    inputs = [x, -x, torch.full_like(x, -0.0), x * 1e-7]
    for value in (float("nan"), float("-inf")):
        for where in (slice(None), slice(-1, None), slice(None, None, 3)):
            broken = x.clone()
            broken[:, where] = value
            inputs.append(broken)
    for each in inputs:
        assert triton_kernels.amax(each.to(device)) == reference.amax(each)


# Memory


@pytest.mark.parametrize("offset", [1, 2, 3, 8], ids="offset{}".format)
def test_misaligned_views(offset: int, device: torch.device) -> None:
    """Inputs and outputs that start in the middle of a word, with neighbours left alone."""
    generator = torch.Generator().manual_seed(9)
    rows, k = 9, 112
    for dtype in FLOATS:
        x = torch.randn((rows, k), generator=generator).to(dtype)
        shifted = torch.zeros(rows * k + 16, dtype=dtype, device=device)[offset:][: rows * k]
        shifted = shifted.copy_(x.view(-1)).view(rows, k)
        global_scale = global_scale_of(x)
        weight = torch.empty((rows, k // 2), dtype=torch.uint8)
        scale = torch.empty((rows, k // 16), dtype=torch.uint8)
        profile = PROFILES["modelopt"]
        reference.quantize_nvfp4(x, global_scale, profile, False, weight, scale)
        backing = [poisoned((t.numel() + 16,), torch.uint8, device) for t in (weight, scale)]
        outs = [
            b[offset:][: t.numel()].view(t.shape)
            for b, t in zip(backing, (weight, scale), strict=True)
        ]
        triton_kernels.quantize_nvfp4(shifted, global_scale, profile, False, *outs)
        for out, expected, whole in zip(outs, (weight, scale), backing, strict=True):
            assert_same_bytes(out, expected, f"{dtype} offset {offset}")
            around = torch.cat([whole[:offset], whole[offset + expected.numel() :]])
            assert (around == 0xAA).all()

        values = torch.empty((rows, k), dtype=dtype)
        reference.dequantize_nvfp4(weight, scale, global_scale, False, values)
        whole = poisoned((rows * k + 16,), dtype, device)
        out = whole[offset:][: rows * k].view(rows, k)
        triton_kernels.dequantize_nvfp4(*outs, global_scale, False, out)
        assert_same_bytes(out, values, f"{dtype} offset {offset}")
        around = torch.cat([whole[:offset], whole[offset + rows * k :]])
        assert (around.view(torch.uint8) == 0xAA).all()

        byte_scale = torch.rand((1, 1), generator=generator)
        raw = torch.randint(0, 256, (rows, k), dtype=torch.uint8, generator=generator)
        moved = torch.zeros(rows * k + 16, dtype=torch.uint8, device=device)[offset:][: rows * k]
        moved = moved.copy_(raw.view(-1)).view(rows, k)
        reference.dequantize_fp8_block(raw, byte_scale, (128, 128), values)
        triton_kernels.dequantize_fp8_block(moved, byte_scale.to(device), (128, 128), out)
        assert_same_bytes(out, values, f"{dtype} offset {offset}")


def test_empty_tensors(device: torch.device) -> None:
    empty = torch.empty((0, 32), dtype=torch.uint8, device=device)
    out = torch.empty((0, 64), device=device)
    triton_kernels.dequantize_nvfp4(empty, empty, 1.0, False, out)
    triton_kernels.dequantize_fp8_block(out.to(torch.uint8), out, (128, 128), out)
    triton_kernels.quantize_nvfp4(out, 1.0, PROFILES["modelopt"], False, empty, empty)
    triton_kernels.quantize_mxfp4(out, "floor", False, empty, empty)


@needs_cuda
def test_work_is_queued_on_the_current_stream() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    expected = quantize_nvfp4(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.zeros_like(x)
        torch.cuda._sleep(50_000_000)  # a kernel on another stream would read zeros
        late.copy_(x)
        actual = quantize_nvfp4(late)
        values = dequantize_nvfp4(*actual)
    stream.synchronize()
    assert torch.equal(actual.weight, expected.weight)
    assert torch.equal(values, dequantize_nvfp4(*expected))


@needs_cuda
@by_dtype
def test_public_functions_choose_triton_and_agree(dtype: torch.dtype) -> None:
    x = torch.randn(3, 130, 256).to(dtype)
    on_cpu = quantize_nvfp4(x, backend="reference")
    on_gpu = quantize_nvfp4(x.cuda(), backend="triton")
    for actual, expected in zip(on_gpu, on_cpu, strict=True):
        assert isinstance(actual, Tensor)
        assert actual.is_cuda
        assert_same_bytes(actual, expected, "quantize_nvfp4")
    values = dequantize_nvfp4(*on_gpu, dtype=dtype, backend="triton")
    assert_same_bytes(values, dequantize_nvfp4(*on_cpu, dtype=dtype, backend="reference"), "values")
    divisor = Divisor(on_gpu.weight_scale_2.reciprocal())
    values = dequantize_nvfp4(on_gpu.weight, on_gpu.weight_scale, divisor, backend="triton")
    expected = dequantize_nvfp4(
        on_cpu.weight, on_cpu.weight_scale, Divisor(divisor.value.cpu()), backend="reference"
    )
    assert_same_bytes(values, expected, "values by divisor")


@needs_cuda
def test_non_finite_input_is_refused_before_anything_is_written() -> None:
    x = torch.randn(64, 64, device="cuda")
    x[3, 5] = float("nan")
    out = (
        poisoned((64, 32), torch.uint8, x.device),
        poisoned((64, 4), torch.float8_e4m3fn, x.device),
    )
    with pytest.raises(NonFiniteError, match="1 NaN or Inf of 4096"):
        quantize_nvfp4(x, out=out)
    assert all((as_bits(each) == 0xAA).all() for each in out)


@needs_cuda
def test_more_than_2_to_the_31_elements() -> None:
    """Offsets are 64-bit: compared with the reference at the start, around 2^31 and at the end."""
    k, rows = 4096, 2**19 + 33
    free, _ = torch.cuda.mem_get_info()
    if free < 24 << 30:
        pytest.skip(f"needs 24 GiB of GPU memory, {free >> 30} are free")
    device = torch.device("cuda")
    x = torch.randn((rows, k), dtype=torch.bfloat16, device=device)
    x[-1, -1] = 100.0
    assert triton_kernels.amax(x) == (100.0, 0)
    global_scale = float32(100.0 / 2688)
    weight = poisoned((rows, k // 2), torch.uint8, device)
    scale = poisoned((rows, k // 16), torch.uint8, device)
    triton_kernels.quantize_nvfp4(x, global_scale, PROFILES["modelopt"], False, weight, scale)
    out = poisoned((rows, k), torch.bfloat16, device)
    triton_kernels.dequantize_nvfp4(weight, scale, global_scale, False, out)
    places = [slice(0, 8), slice(2**19 - 4, 2**19 + 4), slice(2**18 - 4, 2**18 + 4)]
    places.append(slice(rows - 8, rows))
    for place in places:
        part = x[place].cpu()
        expected = [torch.empty(part.shape[0], k // n, dtype=torch.uint8) for n in (2, 16)]
        reference.quantize_nvfp4(part, global_scale, PROFILES["modelopt"], False, *expected)
        assert_same_bytes(weight[place], expected[0], f"codes of rows {place}")
        assert_same_bytes(scale[place], expected[1], f"scales of rows {place}")
        values = torch.empty_like(part)
        reference.dequantize_nvfp4(*expected, global_scale, False, values)
        assert_same_bytes(out[place], values, f"values of rows {place}")

    codes = x.view(torch.uint8)[:, :k]  # random bytes, not contiguous
    codes = codes.contiguous()
    block_scale = torch.rand((-(-rows // 128), k // 128), device=device)
    triton_kernels.dequantize_fp8_block(codes, block_scale, (128, 128), out)
    for start in (0, 2**19 - 128, rows - rows % 128):
        part = codes[start : start + 128].cpu()
        values = torch.empty(part.shape, dtype=torch.bfloat16)
        first = start // 128
        reference.dequantize_fp8_block(
            part, block_scale[first : first + 1].cpu(), (128, 128), values
        )
        assert_same_bytes(out[start : start + 128], values, f"values of rows from {start}")
