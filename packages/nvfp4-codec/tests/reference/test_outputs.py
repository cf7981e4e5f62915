"""Preallocated outputs: used when they fit, refused by name when they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_codec import CodecError, DtypeError, NonFiniteError, ShapeError

U8, BF16, E4M3, E8M0 = torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu


def x() -> Tensor:
    return torch.arange(1.0, 129.0).view(2, 64)


def u8(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=U8)


def scale() -> Tensor:
    return u8(2, 4).view(E4M3)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "fp8_block"])
def test_outputs_are_written_and_returned(codec: Any, name: str) -> None:
    quantize = getattr(codec, f"quantize_{name}")
    dequantize = getattr(codec, f"dequantize_{name}")
    expected = quantize(x())
    out = (torch.empty_like(expected.weight), torch.empty_like(expected.weight_scale))
    found = quantize(x(), out=out)
    assert found.weight is out[0]
    assert found.weight_scale is out[1]
    for ours, theirs in zip(out, (expected.weight, expected.weight_scale), strict=True):
        assert torch.equal(ours.contiguous().view(U8), theirs.contiguous().view(U8))
    decoded = torch.empty(2, 64, dtype=BF16)
    rest = [found.weight_scale_2] if name == "nvfp4" else []
    assert dequantize(found.weight, found.weight_scale, *rest, out=decoded) is decoded
    assert torch.equal(decoded, dequantize(found.weight, found.weight_scale, *rest))


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        pytest.param(lambda: (u8(2, 32),), ShapeError, "out is a tuple of 1, expected", id="one"),
        pytest.param(
            lambda: (u8(2, 32).view(torch.int8), scale()),
            DtypeError,
            r"out weight is torch\.int8, expected torch\.uint8",
            id="dtype",
        ),
        pytest.param(
            lambda: (u8(2, 32), u8(2, 4)),
            DtypeError,
            r"out weight_scale is torch\.uint8, expected torch\.float8_e4m3fn",
            id="scale-dtype",
        ),
        pytest.param(lambda: ([], scale()), DtypeError, "out weight is list", id="list"),
        pytest.param(
            lambda: (u8(2, 64), scale()),
            ShapeError,
            r"out weight has shape \(2, 64\), expected \(2, 32\)",
            id="shape",
        ),
        pytest.param(
            lambda: (u8(2, 32), scale().flatten()),
            ShapeError,
            r"out weight_scale has shape \(8,\), expected \(2, 4\)",
            id="scale-shape",
        ),
        pytest.param(
            lambda: (u8(2, 64)[:, ::2], scale()),
            ShapeError,
            r"out weight is not contiguous \(strides \(64, 2\)\)",
            id="strided",
        ),
        pytest.param(
            lambda: (u8(2, 32), u8(4, 2).t().view(E4M3)),
            ShapeError,
            "out weight_scale is not contiguous",
            id="transposed",
        ),
        pytest.param(
            lambda: (u8(2, 32).to("meta"), scale()),
            ShapeError,
            "out weight is on meta, expected cpu",
            id="device",
        ),
    ],
)
def test_refused_outputs(codec: Any, out: Any, error: type[CodecError], message: str) -> None:
    with pytest.raises(error, match=message):
        codec.quantize_nvfp4(x(), out=out())


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        pytest.param(lambda: torch.empty(2, 64), DtypeError, "out is torch.float32", id="dtype"),
        pytest.param(
            lambda: torch.empty(64, 2, dtype=BF16), ShapeError, r"expected \(2, 64\)", id="shape"
        ),
        pytest.param(
            lambda: torch.empty(64, 2, dtype=BF16).t(), ShapeError, "not contiguous", id="stride"
        ),
    ],
)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "fp8_block"])
def test_refused_decoded_output(
    codec: Any, name: str, out: Any, error: type[CodecError], message: str
) -> None:
    quantized = getattr(codec, f"quantize_{name}")(x())
    with pytest.raises(error, match=message):
        getattr(codec, f"dequantize_{name}")(*quantized, out=out())


def _weight_over_input(codec: Any) -> None:
    data = torch.ones(2, 64)
    codec.quantize_nvfp4(data, out=(data.view(U8).flatten()[-64:].view(2, 32), scale()))


def _scale_over_input(codec: Any) -> None:
    data = torch.ones(2, 64)
    codec.quantize_nvfp4(data, out=(u8(2, 32), data.view(U8).flatten()[:8].view(2, 4).view(E4M3)))


def _weight_over_scale(codec: Any) -> None:
    data = u8(71)
    out = (data[:64].view(2, 32), data[63:].view(2, 4).view(E4M3))
    codec.quantize_nvfp4(x(), out=out)


def _decoded_over_weight(codec: Any) -> None:
    data = u8(256)
    out = data.view(BF16).view(2, 64)
    codec.dequantize_nvfp4(data[:64].view(2, 32), scale(), torch.tensor(1.0), out=out)


def _decoded_over_scale(codec: Any) -> None:
    data = u8(256)
    out = data.view(BF16).view(2, 64)
    codec.dequantize_mxfp4(u8(2, 32), data[-4:].view(2, 2).view(E8M0), out=out)


def _fp8_decoded_over_scale(codec: Any) -> None:
    out = torch.ones(2, 64)
    codec.dequantize_fp8_block(u8(2, 64).view(E4M3), out[:1, :1], dtype=out.dtype, out=out)


@pytest.mark.parametrize(
    "call",
    [
        _weight_over_input,
        _scale_over_input,
        _weight_over_scale,
        _decoded_over_weight,
        _decoded_over_scale,
        _fp8_decoded_over_scale,
    ],
)
def test_overlapping_memory_is_refused(codec: Any, call: Any) -> None:
    with pytest.raises(ShapeError, match="overlaps"):
        call(codec)


def test_adjacent_memory_is_not_an_overlap(codec: Any) -> None:
    data = u8(72)
    found = codec.quantize_nvfp4(x(), out=(data[:64].view(2, 32), data[64:].view(2, 4).view(E4M3)))
    assert torch.equal(found.weight, codec.quantize_nvfp4(x()).weight)


def test_a_refused_input_leaves_the_outputs_alone(codec: Any) -> None:
    out = (torch.full((2, 32), 7, dtype=U8), torch.full((2, 4), 7, dtype=U8).view(E4M3))
    bad = x()
    bad[1, 63] = float("inf")
    with pytest.raises(NonFiniteError):
        codec.quantize_nvfp4(bad, out=out)
    assert (out[0] == 7).all()
    assert (out[1].view(U8) == 7).all()
