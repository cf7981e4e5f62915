"""The layouts of sm_100a, against CUTLASS's scale atom and the epilogue's view of a warp."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from pycute import Layout  # type: ignore[import-untyped]
from torch import Tensor

from megamoe_kernel import (
    DtypeError,
    RecipeError,
    ShapeError,
    layout_sm100,
    pack_ue4m3_to_int32,
    transform_sf_into_required_layout,
)
from nvfp4_codec import swizzle_blockscale


def _scales(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 127, shape, generator=generator, dtype=torch.uint8)


def _memory(words: Tensor) -> Tensor:
    """The bytes of one matrix in memory order."""
    flat = words.as_strided((words.numel(),), (1,), words.storage_offset())
    return flat.contiguous().view(torch.uint8)


@pytest.fixture(scope="module")
def scale_atom() -> Layout:
    """CUTLASS's atom of 128 rows and 4 scales, from the header its kernels are compiled with."""
    files = metadata.distribution("nvidia-cutlass")
    header = next(
        Path(str(files.locate_file(file)))
        for file in files.files or ()
        if file.name == "sm100_blockscaled_layout.hpp"
    )
    found = re.search(r"using SfKMajorAtom *= *Layout<([^;]*)>;", header.read_text())
    assert found is not None
    text = found[1].replace("Int<SFVecSize>", "_16")
    a, b, c, d, e, f, g, h = (int(n) for n in re.findall(r"\b_(\d+)", text))
    return Layout(((a, b), (c, d)), ((e, f), (g, h)))


@pytest.mark.parametrize("size", [(128, 128), (256, 384), (384, 256)], ids=str)
def test_scales_lie_where_cutlass_looks_for_them(size: tuple[int, int], scale_atom: Layout) -> None:
    """Atoms follow each other along N, then along K: a TMA box takes the words of one MMA."""
    rows, columns = size
    scale = _scales(1, rows, columns // 16)
    words = layout_sm100.to_scale_words(scale)
    assert words.shape == (1, rows, columns // 64)
    assert words.stride()[1:] == (1, rows)
    memory = _memory(words[0])
    for row in range(rows):
        for k in range(0, columns, 16):
            atom = (k // 64) * (rows // 128) + row // 128
            offset = 512 * atom + scale_atom(row % 128, k % 64)
            assert memory[offset] == scale[0, row, k // 16]


def test_scales_come_back() -> None:
    scale = _scales(3, 256, 24)
    assert torch.equal(layout_sm100.from_scale_words(layout_sm100.to_scale_words(scale)), scale)


def test_a_warp_has_both_projections_of_a_block() -> None:
    """tcgen05.ld 16x256b gives thread 4 g + t the rows g, g + 8, g + 16, g + 24 of its warp."""
    intermediate = 96
    rows = torch.arange(2 * intermediate).view(1, -1, 1)  # gate j is row j, up j is row 96 + j
    moved = layout_sm100.interleave_gate_up(rows).view(-1)
    for warp in range(2 * intermediate // 32):
        own = moved[32 * warp : 32 * warp + 32]
        for g in range(8):
            first = 16 * warp + 2 * g  # the outputs whose codes make one byte
            expected = [first, intermediate + first, first + 1, intermediate + first + 1]
            assert own[g::8].tolist() == expected


@pytest.mark.parametrize("shape", [(1, 256, 64), (3, 128, 16), (2, 96, 1)], ids=str)
def test_rows_come_back(shape: tuple[int, int, int]) -> None:
    rows = _scales(*shape)
    moved = layout_sm100.interleave_gate_up(rows)
    assert not torch.equal(moved, rows)
    assert torch.equal(layout_sm100.separate_gate_up(moved), rows)


def test_four_scales_make_a_word_low_byte_first() -> None:
    scale = torch.tensor([[0x01, 0x02, 0x03, 0x7E, 0x38, 0, 0, 0xFF]], dtype=torch.uint8)
    words = pack_ue4m3_to_int32(scale.view(torch.float8_e4m3fn))
    assert words.dtype == torch.int32
    assert [word & 0xFFFFFFFF for word in words[0].tolist()] == [0x7E030201, 0xFF000038]
    assert torch.equal(pack_ue4m3_to_int32(scale), words)
    every_other = torch.stack((scale, scale), -1)[..., 0]
    assert torch.equal(pack_ue4m3_to_int32(every_other), words)
    with pytest.raises(ShapeError, match="multiple of 4"):
        pack_ue4m3_to_int32(scale[:, :6])
    with pytest.raises(DtypeError, match="torch.float32"):
        pack_ue4m3_to_int32(scale.float())


@pytest.mark.parametrize("order", [None, "mn_major", "utccp"])
def test_strides_do_not_matter(order: Any) -> None:
    scale = _scales(128, 8)
    wide = torch.stack((scale, scale), -1)
    spellings = {
        "transposed": scale.mT.contiguous().mT,
        "every other column": wide[..., 0],
        "flipped twice": scale.flip(0, 1).flip(0, 1),
        "an odd address": torch.cat((scale.new_zeros(1), scale.flatten()))[1:].view(128, 8),
        "inner rows": torch.cat((scale, scale, scale))[128:256],
    }
    expected = _pack(scale, order)
    for name, spelling in spellings.items():
        for form in (spelling, spelling.view(torch.float8_e4m3fn)):
            assert torch.equal(_pack(form, order), expected), name
    row = scale[:1].expand(128, 8)
    assert torch.equal(_pack(row, order), _pack(row.contiguous(), order))


@pytest.mark.parametrize("order", [None, "mn_major", "utccp"])
@pytest.mark.parametrize("shape", [(0, 8), (128, 0), (0, 128, 8), (2, 128, 0)], ids=str)
def test_nothing_makes_no_words(shape: tuple[int, ...], order: Any) -> None:
    words = _pack(torch.empty(shape, dtype=torch.uint8), order)
    assert words.shape == (*shape[:-1], shape[-1] // 4)
    assert words.dtype == torch.int32


@pytest.mark.parametrize("order", [None, "mn_major", "utccp"])
@pytest.mark.parametrize(
    ("scale", "error", "match"),
    [
        (None, DtypeError, "is NoneType, expected torch.float8_e4m3fn or torch.uint8"),
        ([[1, 2, 3, 4]], DtypeError, "is list"),
        (torch.zeros(128, 8, dtype=torch.int64), DtypeError, "is torch.int64"),
        (torch.zeros(128, 8, dtype=torch.bool), DtypeError, "is torch.bool"),
        (torch.zeros(128, 8).to(torch.float8_e5m2), DtypeError, "is torch.float8_e5m2"),
        (torch.zeros(128, 8, dtype=torch.uint8).to_sparse(), DtypeError, "torch.sparse_coo"),
        (torch.tensor(1, dtype=torch.uint8), ShapeError, r"has shape \(\), expected \[\.\.\., "),
        (torch.zeros(128, 6, dtype=torch.uint8), ShapeError, "multiple of 4; pad it with zero"),
    ],
    ids=["None", "list", "int64", "bool", "e5m2", "sparse", "0-dim", "6 columns"],
)
def test_what_are_no_scales(scale: Any, error: type[Exception], match: str, order: Any) -> None:
    with pytest.raises(error, match=match):
        _pack(scale, order)


def test_a_layout_has_rows() -> None:
    for scale in (_scales(8), torch.tensor(1, dtype=torch.int32)):
        with pytest.raises(ShapeError, match=r"expected \[\.\.\., N, K/16\]"):
            transform_sf_into_required_layout(scale)
    with pytest.raises(ShapeError, match="sf has 96 rows, expected a multiple of 128"):
        transform_sf_into_required_layout(_scales(96, 8), order="utccp")
    assert transform_sf_into_required_layout(_scales(97, 8)).stride() == (1, 100)


def _pack(scale: Any, order: Any) -> Tensor:
    """With pack_ue4m3_to_int32, or into a layout."""
    if order is None:
        return pack_ue4m3_to_int32(scale)
    return transform_sf_into_required_layout(scale, order=order)


@pytest.mark.parametrize("order", ["mn_major", "utccp"])
def test_required_layout_from_bytes_or_words(order: str) -> None:
    scale = _scales(2, 128, 8).view(torch.float8_e4m3fn)
    expected = swizzle_blockscale(scale, order).data  # type: ignore[arg-type]
    for form in (scale, scale.view(torch.uint8), pack_ue4m3_to_int32(scale)):
        words = transform_sf_into_required_layout(form, order=order)  # type: ignore[arg-type]
        assert torch.equal(words, expected)
        assert words.stride() == expected.stride()


def test_other_granularities_are_refused() -> None:
    scale = _scales(128, 8)
    with pytest.raises(RecipeError, match="gran_k is 32, expected 16.*ue8m0"):
        transform_sf_into_required_layout(scale, gran_k=32)
    with pytest.raises(RecipeError, match="gran_k is '16', expected 16"):
        transform_sf_into_required_layout(scale, gran_k="16")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="order is 'k_major'"):
        transform_sf_into_required_layout(scale, order="k_major")  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="float8_e8m0fnu"):
        transform_sf_into_required_layout(scale.view(torch.float8_e8m0fnu))
