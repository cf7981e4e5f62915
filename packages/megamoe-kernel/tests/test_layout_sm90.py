"""The register order of sm_90a, against CUTLASS's layout and by reading as a thread reads."""

from __future__ import annotations

import re
from importlib import metadata
from itertools import product
from pathlib import Path

import pytest
import torch
from pycute import Layout  # type: ignore[import-untyped]
from torch import Tensor

from megamoe_kernel import layout_sm90
from nvfp4_codec.formats import decode_e2m1
from nvfp4_codec.packing import pack_e2m1


def _random(experts: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + columns)
    codes = torch.randint(0, 16, (experts, rows, columns), generator=generator, dtype=torch.uint8)
    shape = (experts, rows, columns // 16)
    return codes, torch.randint(0, 127, shape, generator=generator, dtype=torch.uint8)


@pytest.fixture(scope="module")
def operand_a() -> Layout:
    """Where wgmma looks for A: (thread, value) to row + 64 * column of a 64x16 step.

    The shape and stride come from the header that CUTLASS's own kernels are compiled with.
    """
    files = metadata.distribution("nvidia-cutlass")
    header = next(
        Path(str(files.locate_file(file)))
        for file in files.files or ()
        if file.name == "mma_traits_sm90_gmma.hpp"
    )
    found = re.search(r"using ALayout_64x16 *= *(Layout<[^;]*>);", header.read_text())
    assert found is not None
    numbers = [int(n) for n in re.findall(r"\b_(\d+)", found[1])]
    assert found[1].count("<") == 7
    shape, stride = numbers[:6], numbers[6:]
    return Layout((tuple(shape[:3]), tuple(shape[3:])), (tuple(stride[:3]), tuple(stride[3:])))


def _column(place: int) -> int:
    """Which of 64 columns stands at a place: t, j, h, e instead of j, h, t, e."""
    j, h, t, e = place // 16, place // 8 % 2, place // 2 % 4, place % 2
    return 16 * t + 4 * j + 2 * h + e


@pytest.mark.parametrize("size", [(64, 128), (128, 384)], ids=str)
def test_a_thread_finds_the_operand_that_wgmma_wants(
    size: tuple[int, int], operand_a: Layout
) -> None:
    """Reads the tiles as the layout's description says, with its masks and shifts."""
    rows, columns = size
    codes, scale = _random(2, rows, columns)
    tiles = layout_sm90.to_tiles(pack_e2m1(codes), scale, gate_up=False)
    assert tiles.shape == (2, rows // 64, columns // 128, 4608)
    for expert, down, across in ((0, 0, 0), (1, rows // 64 - 1, columns // 128 - 1)):
        tile = tiles[expert, down, across]
        words = [word & 0xFFFFFFFF for word in tile[:4096].view(torch.int32).tolist()]
        values = decode_e2m1(codes[expert, 64 * down : 64 * down + 64])
        for thread, half, step in product(range(128), range(2), range(0, 4, 2)):
            at = 512 * half + 4 * thread + step
            registers = _as_the_kernel_unpacks(words[at], words[at + 1])
            for i, value in product(range(2), range(8)):
                place = operand_a(thread, value)
                column = 128 * across + 64 * half + _column(16 * (step + i) + place // 64)
                found = registers[i][value // 2] >> 16 * (value % 2) & 0xFFFF
                assert _bf16(found) * 2.0**126 == values[place % 64, column]


def _as_the_kernel_unpacks(w0: int, w1: int) -> list[list[int]]:
    mask, first = 0x81C081C0, 0x06030603

    def left(w: int, places: int) -> int:
        return (w << places | w >> (32 - places)) & mask

    z = w0 & first | w1 << 2 & 0xFFFFFFFF & ~first
    return [[left(w, 0), left(w, 4), left(w, 10), left(z, k)] for w, k in ((w0, 6), (w1, 12))]


def _bf16(bits: int) -> float:
    return float(torch.tensor([bits - (bits >> 15 << 16)], dtype=torch.int16).view(torch.bfloat16))


def test_a_thread_finds_its_scales_in_two_bytes() -> None:
    """All that a thread has of a row in one half of a tile is one block's: number t of four."""
    codes, scale = _random(1, 128, 256)
    tiles = layout_sm90.to_tiles(pack_e2m1(codes), scale, gate_up=False)
    for down, across, half, thread in product(range(2), range(2), range(2), range(128)):
        w, g, t = thread // 32, thread // 4 % 8, thread % 4
        block, row = 8 * across + 4 * half + t, 64 * down + 16 * w + g
        at = 4096 + 256 * half + 2 * thread
        found = tiles[0, down, across, at : at + 2]
        assert torch.equal(found, scale[0, [row, row + 8], block])
        columns = {_column(16 * j + 2 * t + k) for j in range(4) for k in (0, 1, 8, 9)}
        assert columns == set(range(16 * t, 16 * t + 16))


def test_gate_and_up_of_an_output_are_in_one_thread() -> None:
    """Rows g and g + 8 of a warp are one output's; outputs stand where l2 has them as columns."""
    codes, scale = _random(2, 256, 128)
    tiles = layout_sm90.to_tiles(pack_e2m1(codes), scale, gate_up=True)
    outputs = [64 * group + _column(place) for group in range(2) for place in range(64)]
    rows = torch.tensor(
        [part * 128 + outputs[8 * n + g] for n in range(16) for part in (0, 1) for g in range(8)]
    )
    expected = layout_sm90.to_tiles(pack_e2m1(codes[:, rows]), scale[:, rows], gate_up=False)
    assert torch.equal(tiles, expected)


@pytest.mark.parametrize("gate_up", [False, True], ids=["down", "gate and up"])
@pytest.mark.parametrize("size", [(1, 128, 128), (3, 256, 128), (2, 384, 640)], ids=str)
def test_every_bit_comes_back(size: tuple[int, int, int], gate_up: bool) -> None:
    codes, scale = _random(*size)
    weight = pack_e2m1(codes)
    tiles = layout_sm90.to_tiles(weight, scale, gate_up=gate_up)
    back, scale_back = layout_sm90.from_tiles(tiles, gate_up=gate_up)
    assert torch.equal(back, weight)
    assert torch.equal(scale_back, scale)
    assert tiles.numel() * 128 == 72 * codes.numel()


def test_experts_larger_than_a_part_come_back() -> None:
    """More than one slice of work per expert, and a last one that is smaller."""
    codes, scale = _random(2, 64 * 5, 128 * 64)
    words = layout_sm90._word_view(torch.empty(2, 5, 64, 4608, dtype=torch.uint8), False)
    assert [(e, part.start) for e, part in layout_sm90._parts(words)] == [
        (0, 0),
        (0, 4),
        (1, 0),
        (1, 4),
    ]
    weight = pack_e2m1(codes)
    back = layout_sm90.from_tiles(layout_sm90.to_tiles(weight, scale, gate_up=False), gate_up=False)
    assert torch.equal(back[0], weight)
    assert torch.equal(back[1], scale)
