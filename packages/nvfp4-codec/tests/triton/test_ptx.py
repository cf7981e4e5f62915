"""What the compiled kernels must not contain, read from their PTX; compiling needs no GPU.

A kernel that flushes subnormals, divides approximately or fuses operations that the reference
rounds one by one would be right on most inputs. One that passes values between threads or loads
them byte by byte would be right and slow.
"""

import re
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="needs triton (torch brings it on x86-64 Linux)")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from nvfp4_codec import triton_dequantize, triton_quantize  # noqa: E402

POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}


def ptx(kernel: Any, types: dict[str, str], **constants: Any) -> tuple[str, int]:
    """The kernel's PTX for compute capability 9.0 and its bytes of shared memory."""
    names = kernel.arg_names
    types = types | dict.fromkeys(constants, "constexpr")
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, type_ in types.items()
        if type_.startswith("*")
    }
    source = ASTSource(kernel, {n: types[n] for n in names}, constexprs=constants, attrs=aligned)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return compiled.asm["ptx"], compiled.metadata.shared


def assert_ieee(text: str) -> None:
    assert not re.findall(r"\.ftz|\.approx|div\.full", text)


@pytest.mark.parametrize("scale", ["multiply", "divide", "e8m0"])
@pytest.mark.parametrize("dtype", POINTERS)
def test_dequantize_e2m1(dtype: str, scale: str) -> None:
    text, shared = ptx(
        triton_dequantize.dequantize_e2m1,
        {
            "weight_ptr": "*i16" if dtype == "float32" else "*i32",
            "scale_ptr": "*u8",
            "out_ptr": POINTERS[dtype],
            "num_words": "i32",
            "global_scale_bits": "i32",
        },
        SCALE=scale,
        WORDS=128,
        UNROLL=2,
    )
    assert_ieee(text)
    assert "fma" not in text
    assert "st.global.v4.b32" in text
    assert shared == 0


@pytest.mark.parametrize("dtype", POINTERS)
def test_dequantize_e4m3(dtype: str) -> None:
    text, shared = ptx(
        triton_dequantize.dequantize_e4m3_words,
        {
            "weight_ptr": "*i32",
            "scale_ptr": "*fp32",
            "out_ptr": POINTERS[dtype],
            "rows": "i32",
            "columns": "i32",
        },
        BLOCK_ROWS=128,
        BLOCK_WORDS=32,
        ROWS=4,
        WORDS=32,
        UNROLL=4,
    )
    assert_ieee(text)
    assert "fma" not in text
    assert re.search(r"st\.global\.v[24]\.b32", text)
    assert shared == 0


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "general"])
@pytest.mark.parametrize("dtype", POINTERS)
def test_quantize_nvfp4(dtype: str, fast: bool) -> None:
    text, shared = ptx(
        triton_quantize.quantize_nvfp4,
        {
            "x_ptr": "*i32",
            "weight_ptr": "*i32",
            "scale_ptr": "*u8",
            "num_blocks": "i32",
            "global_scale_bits": "i32",
            "amax_reciprocal_bits": "i32",
        },
        FORMAT=dtype,
        ZERO_BLOCK_SCALE=1.0,
        MIN_SCALE=2.0**-9,
        KEEP_NEGATIVE_ZERO=False,
        SATURATE=False,
        FAST=fast,
        BLOCKS=128,
        UNROLL=1,
    )
    assert_ieee(text)
    # Per value: two of the division and four of the rounding; two for the scale.
    assert len(re.findall(r"fma\.rn\.f32", text)) == (16 * 6 + 2 if fast else 16 * 4)
    assert len(re.findall(r"div\.rn\.f32", text)) == (1 if fast else 17)
    assert "ld.global.v4.b32" in text
    assert "st.global.v2.b32" in text
    assert shared == 0


@pytest.mark.parametrize("dtype", POINTERS)
def test_quantize_mxfp4(dtype: str) -> None:
    text, shared = ptx(
        triton_quantize.quantize_mxfp4,
        {"x_ptr": "*i32", "weight_ptr": "*i32", "scale_ptr": "*u8", "num_blocks": "i32"},
        FORMAT=dtype,
        ROUND_UP_FROM=0x800000,
        SATURATE=False,
        BLOCKS=128,
    )
    assert_ieee(text)
    assert "ld.global.v4.b32" in text
    assert shared == 0


@pytest.mark.parametrize("ue8m0", [True, False], ids=["ue8m0", "fp32"])
def test_quantize_fp8_block(ue8m0: bool) -> None:
    text, _ = ptx(
        triton_quantize.quantize_fp8_block,
        {
            "x_ptr": "*bf16",
            "weight_ptr": "*u8",
            "scale_ptr": "*u8" if ue8m0 else "*fp32",
            "rows": "i32",
            "columns": "i32",
        },
        BLOCK_ROWS=128,
        BLOCK_COLUMNS=128,
        UE8M0=ue8m0,
        SATURATE=False,
        ROWS=32,
        COLUMNS=128,
    )
    assert_ieee(text)
    assert "fma" not in text


@pytest.mark.parametrize(("integer", "infinity"), [("*i16", 0x7F80), ("*i32", 0x7F800000)])
def test_amax(integer: str, infinity: int) -> None:
    text, _ = ptx(
        triton_quantize.amax_bits,
        {"x_ptr": integer, "result_ptr": "*i64", "count": "i64"},
        MASK=2 ** (int(integer[2:]) - 1) - 1,
        INFINITY=infinity,
        COUNT_NONFINITE=False,
        SIZE=2048,
    )
    assert "ld.global.v4.b32" in text
