"""DeepGEMM's packed scales, against an oracle that computes every byte's address."""

from __future__ import annotations

import pytest
import torch
from pycute import Layout
from torch import Tensor

from nvfp4_codec import (
    DtypeError,
    LosslessError,
    ShapeError,
    e8m0_to_fp32,
    from_utccp_order,
    get_mn_major_tma_aligned_packed_ue4m3_tensor,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
    swizzle_blockscale,
    to_utccp_order,
    unswizzle_blockscale,
)

SHAPES = [(1, 1), (4, 4), (5, 3), (7, 9), (128, 8), (130, 56), (256, 448)]
IDS = [f"{rows}x{cols}" for rows, cols in SHAPES]


def _scales(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 255, shape, generator=generator, dtype=torch.uint8)


def _memory(words: Tensor) -> bytes:
    """The bytes of a packed matrix's memory, from its first word to its last."""
    size = words.stride(1) * words.shape[1]
    flat = words.as_strided((size,), (1,), words.storage_offset())
    return flat.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_every_byte_is_at_its_address(shape: tuple[int, int]) -> None:
    """Column-major words of four consecutive K, rows aligned to 16 bytes, zeros elsewhere."""
    rows, cols = shape
    linear = _scales(rows, cols)
    packed = get_mn_major_tma_aligned_packed_ue8m0_tensor(linear)
    aligned = (rows + 3) // 4 * 4
    assert packed.shape == (rows, (cols + 3) // 4)
    assert packed.stride() == (1, aligned)
    expected = bytearray(aligned * packed.shape[1] * 4)
    for row in range(rows):
        for col in range(cols):
            expected[(col // 4 * aligned + row) * 4 + col % 4] = int(linear[row, col])
    assert _memory(packed) == bytes(expected)


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_low_byte_is_the_first_of_four(shape: tuple[int, int]) -> None:
    linear = _scales(*shape).view(torch.float8_e4m3fn)
    packed = get_mn_major_tma_aligned_packed_ue4m3_tensor(linear)
    raw = linear.view(torch.uint8)
    for col in range(shape[1]):
        byte = packed[:, col // 4].long() >> 8 * (col % 4) & 0xFF
        assert torch.equal(byte, raw[:, col].long())


@pytest.mark.parametrize("layout", ["mn_major", "utccp"])
@pytest.mark.parametrize("shape", [(128, 1), (128, 8), (256, 449)], ids=str)
def test_unswizzle_is_the_inverse(shape: tuple[int, int], layout: str) -> None:
    linear = _scales(3, *shape).view(torch.float8_e4m3fn)
    swizzled = swizzle_blockscale(linear, layout)
    assert swizzled.data.dtype == torch.int32
    assert torch.equal(unswizzle_blockscale(swizzled).view(torch.uint8), linear.view(torch.uint8))


def test_float32_powers_of_two_pack_as_their_exponents() -> None:
    byte = torch.arange(255, dtype=torch.uint8).view(5, 51)
    packed = get_mn_major_tma_aligned_packed_ue8m0_tensor(e8m0_to_fp32(byte))
    assert torch.equal(packed, get_mn_major_tma_aligned_packed_ue8m0_tensor(byte))
    assert torch.equal(
        packed, get_mn_major_tma_aligned_packed_ue8m0_tensor(byte.view(torch.float8_e8m0fnu))
    )


@pytest.mark.parametrize("scale", [0.003, 1.5, 1.0000001, 0.0, -1.0, float("inf"), float("nan")])
def test_other_float32_are_refused_never_truncated(scale: float) -> None:
    with pytest.raises(
        LosslessError, match="16 of 16 scales are no powers .*requantize.*scale_fmt='ue8m0'"
    ):
        get_mn_major_tma_aligned_packed_ue8m0_tensor(torch.full((4, 4), scale))


def test_the_two_formats_are_not_confused() -> None:
    with pytest.raises(DtypeError):
        get_mn_major_tma_aligned_packed_ue8m0_tensor(torch.ones(4, 4).to(torch.float8_e4m3fn))
    with pytest.raises(DtypeError):
        get_mn_major_tma_aligned_packed_ue4m3_tensor(torch.ones(4, 4))


def test_utccp_order_is_the_scale_atoms_order() -> None:
    """One atom is 128 words; word m of the copy's source is row m of the tile."""
    atom = Layout(((32, 4), (16, 4)), ((16, 4), (0, 1)))
    words = torch.arange(256, dtype=torch.int32).view(256, 1)
    ordered = to_utccp_order(words)
    for row in range(128):
        assert atom(row, 0) == 4 * (row % 32 * 4 + row // 32)
        place = atom(row, 0) // 4
        assert int(ordered[place, 0]) == row
        assert int(ordered[128 + place, 0]) == 128 + row


def test_utccp_bytes_are_the_128x4_tile_in_memory() -> None:
    linear = _scales(128, 4)
    utccp = swizzle_blockscale(linear, "utccp").data
    tile = swizzle_blockscale(linear).data
    assert _memory(utccp) == tile.numpy().tobytes()


def test_utccp_keeps_the_strides_and_refuses_partial_tiles() -> None:
    packed = get_mn_major_tma_aligned_packed_ue8m0_tensor(_scales(2, 256, 12))
    ordered = to_utccp_order(packed)
    assert ordered.stride() == packed.stride()
    assert torch.equal(from_utccp_order(ordered), packed)
    with pytest.raises(ShapeError, match="multiple of 128"):
        to_utccp_order(packed[:, :100])
    with pytest.raises(DtypeError):
        to_utccp_order(_scales(128, 4))
