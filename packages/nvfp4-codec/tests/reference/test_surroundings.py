"""Nothing outside the arguments changes a result: torch's defaults, lazy views, odd block sizes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from nvfp4_codec import (
    Divisor,
    ScaleError,
    ShapeError,
    backends,
    dequantize_fp8_block,
    dequantize_nvfp4,
    formats,
    quantize_fp8_block,
    quantize_nvfp4,
)
from nvfp4_codec.scales import PROFILES

X = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def as_bytes(x: torch.Tensor | Divisor) -> torch.Tensor:
    value = x.value if isinstance(x, Divisor) else x
    return torch.atleast_1d(value).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("profile", PROFILES)
def test_torch_default_dtype(profile: str, dtype: torch.dtype) -> None:
    """Model loaders set it to bfloat16 while they read weights."""
    expected = quantize_nvfp4(X, profile=profile, backend="reference")
    decoded = dequantize_nvfp4(*expected, dtype=torch.float32, backend="reference")
    with default_dtype(dtype):
        found = quantize_nvfp4(X, profile=profile, backend="reference")
        again = dequantize_nvfp4(*expected, dtype=torch.float32, backend="reference")
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(as_bytes(a), as_bytes(b))
    assert torch.equal(again, decoded)


def test_meta_device_context_leaves_nothing_behind() -> None:
    packed = quantize_nvfp4(X, backend="reference")
    expected = dequantize_nvfp4(*packed, backend="reference")
    formats._table.cache_clear()
    with torch.device("meta"):
        inside = dequantize_nvfp4(*packed, backend="reference", out=torch.empty_like(expected))
    assert torch.equal(inside, expected)
    assert torch.equal(dequantize_nvfp4(*packed, backend="reference"), expected)


def test_a_lazily_negated_input_keeps_its_sign() -> None:
    negated = torch._neg_view(X)
    assert negated.is_neg()
    assert torch.equal(quantize_nvfp4(negated).weight, quantize_nvfp4(-X).weight)


@pytest.mark.parametrize("backend", ["reference", None])
def test_a_block_larger_than_the_matrix_costs_nothing(backend: str | None) -> None:
    found = quantize_fp8_block(X, block=(2**40, 2**40), backend=backend)
    assert found.weight_scale.shape == (1, 1)
    decoded = dequantize_fp8_block(*found, block=(2**40, 2**40), backend=backend)
    assert torch.equal(decoded, dequantize_fp8_block(*found, block=(64, 256), backend=backend))


@pytest.mark.parametrize("block", [128, None, (1.5, 2), ("4", "16"), (True, 2), (0, 4), (4,)])
def test_refused_blocks(block: object) -> None:
    with pytest.raises(ShapeError, match="expected two positive integers"):
        quantize_fp8_block(X, block=block)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_refused_global_scales(value: float) -> None:
    weight, weight_scale, _ = quantize_nvfp4(X)
    for scale in (torch.tensor(value), Divisor(torch.tensor(value))):
        with pytest.raises(ScaleError, match="expected a positive finite number"):
            dequantize_nvfp4(weight, weight_scale, scale)


def test_a_multiplier_that_looks_like_a_divisor_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weight, weight_scale, _ = quantize_nvfp4(X)
    dequantize_nvfp4(weight, weight_scale, torch.tensor(3584.5))
    assert "wrap it in Divisor" in caplog.text


def test_flushed_denormals_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("needs a processor that can flush denormals")
    backends.warn_once.cache_clear()
    try:
        quantize_nvfp4(X)
    finally:
        torch.set_flush_denormal(False)
    assert "set_flush_denormal" in caplog.text
