"""The 128x4 tile order, against CUTLASS's atom (pycute), torchao and the written formula."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from pycute import Layout, make_layout
from torch import Tensor

from nvfp4_codec import (
    DtypeError,
    LayoutError,
    ShapeError,
    SwizzledScale,
    dequantize_mxfp4,
    dequantize_nvfp4,
    from_blocked,
    swizzle_blockscale,
    to_blocked,
    unswizzle_blockscale,
)

SHAPES = [(1, 1), (128, 4), (130, 5), (33, 8), (256, 12), (300, 3), (384, 448)]
IDS = [f"{rows}x{cols}" for rows, cols in SHAPES]
DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu]


def _scales(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(1, 256, shape, generator=generator, dtype=torch.uint8)


def _padded(rows: int, cols: int) -> tuple[int, int]:
    return rows + -rows % 128, cols + -cols % 4


def _cutlass_layout(rows: int, cols: int) -> Layout:
    """The scale-factor atom of a 128x64 tile, tiled with K fastest as CUTLASS does for SFA."""
    atom = Layout(((32, 4), (16, 4)), ((16, 4), (0, 1)))
    tile_rows, tile_cols = _padded(rows, cols)[0] // 128, _padded(rows, cols)[1] // 4
    return make_layout(
        make_layout(atom[0], Layout(tile_rows, 512 * tile_cols)),
        make_layout(atom[1], Layout(tile_cols, 512)),
    )


def _place(linear: Tensor, offset: dict[tuple[int, int], int]) -> Tensor:
    flat = torch.zeros(_padded(*linear.shape)[0] * _padded(*linear.shape)[1], dtype=torch.uint8)
    for (row, col), place in offset.items():
        flat[place] = linear[row, col]
    return flat


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=IDS[:-1])
def test_bytes_lie_where_cutlass_looks_for_them(shape: tuple[int, int]) -> None:
    layout = _cutlass_layout(*shape)
    # A scale column covers 16 elements along K.
    offset = {(r, c): layout(r, 16 * c) for r in range(shape[0]) for c in range(shape[1])}
    linear = _scales(*shape)
    assert torch.equal(swizzle_blockscale(linear).data.flatten(), _place(linear, offset))


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=IDS[:-1])
def test_bytes_lie_where_the_formula_says(shape: tuple[int, int]) -> None:
    columns = _padded(*shape)[1]
    offset = {
        (r, c): r // 128 * 128 * columns + c // 4 * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        for r in range(shape[0])
        for c in range(shape[1])
    }
    linear = _scales(*shape)
    assert torch.equal(swizzle_blockscale(linear).data.flatten(), _place(linear, offset))


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_same_bytes_as_torchao(shape: tuple[int, int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype.mx_formats import utils

    linear = _scales(*shape)
    theirs = utils.to_blocked(linear)
    assert torch.equal(swizzle_blockscale(linear).data.flatten(), theirs)
    assert torch.equal(from_blocked(SwizzledScale.wrap(theirs, *shape)), linear)
    assert torch.equal(utils.from_blocked(to_blocked(linear).data.flatten(), *shape), linear)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_unswizzle_is_the_inverse(shape: tuple[int, int], dtype: torch.dtype) -> None:
    linear = _scales(2, *shape).view(dtype)
    swizzled = swizzle_blockscale(linear)
    assert (swizzled.rows, swizzled.cols) == shape
    assert swizzled.data.shape == (2, *_padded(*shape))
    assert swizzled.data.dtype == dtype
    assert torch.equal(unswizzle_blockscale(swizzled).view(torch.uint8), linear.view(torch.uint8))
    alone = swizzle_blockscale(linear[1])
    assert torch.equal(alone.data.view(torch.uint8), swizzled.data[1].view(torch.uint8))


def test_padding_is_zero() -> None:
    swizzled = swizzle_blockscale(torch.full((130, 5), 7, dtype=torch.uint8))
    assert int((swizzled.data == 7).sum()) == 130 * 5
    assert int((swizzled.data == 0).sum()) == 256 * 8 - 130 * 5


def test_a_non_contiguous_scale_is_read_as_it_looks() -> None:
    linear = _scales(8, 130).T
    assert torch.equal(unswizzle_blockscale(swizzle_blockscale(linear)), linear)


@pytest.mark.parametrize("layout", ["tile_128x4", "mn_major", "utccp"])
def test_a_swizzled_scale_cannot_enter_a_linear_decoder(layout: str) -> None:
    weight = torch.zeros(128, 64, dtype=torch.uint8)
    e4m3 = swizzle_blockscale(torch.ones(128, 8).to(torch.float8_e4m3fn), layout)
    with pytest.raises(LayoutError, match="unswizzle"):
        dequantize_nvfp4(weight, e4m3, torch.tensor(1.0))  # type: ignore[arg-type]
    e8m0 = swizzle_blockscale(torch.full((128, 4), 127, dtype=torch.uint8), layout)
    with pytest.raises(LayoutError, match="unswizzle"):
        dequantize_mxfp4(weight, e8m0)  # type: ignore[arg-type]
    with pytest.raises(LayoutError):
        swizzle_blockscale(e4m3)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"SwizzledScale\.wrap"):
        unswizzle_blockscale(torch.zeros(128, 4, dtype=torch.uint8))  # type: ignore[arg-type]


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    with pytest.raises(ShapeError, match="already swizzled"):
        swizzle_blockscale(torch.zeros(512, dtype=torch.uint8))
    with pytest.raises(DtypeError):
        swizzle_blockscale(torch.zeros(128, 4))
    with pytest.raises(LayoutError, match="expected 256 \\* 8"):
        SwizzledScale.wrap(torch.zeros(130 * 5, dtype=torch.uint8), 130, 5)
    swizzled = swizzle_blockscale(torch.zeros(130, 5, dtype=torch.uint8))
    with pytest.raises(LayoutError, match="256, 12"):
        dataclasses.replace(swizzled, cols=9)
    with pytest.raises(LayoutError, match="layout is 'other', expected one of: tile_128x4"):
        swizzle_blockscale(torch.zeros(128, 4, dtype=torch.uint8), "other")  # type: ignore[arg-type]


def test_declaring_a_scale_is_checked() -> None:
    data = torch.zeros(128, 4, dtype=torch.uint8)
    swizzled = swizzle_blockscale(data)
    for changes, message in (
        ({"layout": "foo"}, "layout is 'foo', expected one of: tile_128x4, mn_major, utccp"),
        ({"rows": -1}, "rows and cols are -1"),
        ({"cols": 4.0}, "rows and cols"),
        ({"dtype": torch.int32}, "one-byte"),
        ({"dtype": "uint8"}, "one-byte"),
        ({"data": [0]}, "data is a list"),
        ({"layout": "mn_major"}, "expected torch.int32"),
    ):
        with pytest.raises(LayoutError, match=message):
            dataclasses.replace(swizzled, **changes)
    with pytest.raises(LayoutError, match="one-byte"):
        SwizzledScale.wrap(data.float(), 128, 4)
    with pytest.raises(LayoutError, match="rows and cols"):
        SwizzledScale.wrap(data, -128, 4)
