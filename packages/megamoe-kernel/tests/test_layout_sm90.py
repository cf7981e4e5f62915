"""The register order of sm_90a, against CUTLASS's layout and by reading as a thread reads."""

from __future__ import annotations

import re
from importlib import metadata
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
        words = tile[:4096].view(torch.int32).tolist()
        values = decode_e2m1(codes[expert, 64 * down : 64 * down + 64])
        for thread in range(128):
            for step in range(8):
                word = words[512 * (step // 4) + 4 * thread + step % 4] & 0xFFFFFFFF
                registers = _as_the_kernel_unpacks(word)
                for value in range(8):
                    place = operand_a(thread, value)
                    row, column = place % 64, 128 * across + 16 * step + place // 64
                    half = registers[value // 2] >> 16 * (value % 2) & 0xFFFF
                    assert _bf16(half) * 2.0**126 == values[row, column]


def _as_the_kernel_unpacks(w: int) -> list[int]:
    mask, magnitude, sign = 0x81C081C0, 0x01C001C0, 0x80008000
    return [
        (w << 6) & magnitude | (w << 2) & sign,
        (w << 3) & mask,
        w & mask,
        (w >> 3) & magnitude | (w << 1) & sign,
    ]


def _bf16(bits: int) -> float:
    return float(torch.tensor([bits - (bits >> 15 << 16)], dtype=torch.int16).view(torch.bfloat16))


def test_a_quad_finds_its_scales_in_sixteen_bytes() -> None:
    codes, scale = _random(1, 128, 256)
    tiles = layout_sm90.to_tiles(pack_e2m1(codes), scale, gate_up=False)
    for down in range(2):
        for across in range(2):
            part = tiles[0, down, across, 4096:]
            steps = slice(8 * across, 8 * across + 8)
            for w in range(4):
                for g in range(8):
                    at = 16 * (8 * w + g)
                    row = 64 * down + 16 * w + g
                    assert torch.equal(part[at : at + 8], scale[0, row, steps])
                    assert torch.equal(part[at + 8 : at + 16], scale[0, row + 8, steps])


def test_gate_and_up_of_an_output_are_in_one_thread() -> None:
    """Rows g and g + 8 of a warp are gate and up of the same output."""
    codes, scale = _random(2, 256, 128)
    tiles = layout_sm90.to_tiles(pack_e2m1(codes), scale, gate_up=True)
    rows = torch.tensor(
        [part * 128 + 8 * pair + g for pair in range(16) for part in (0, 1) for g in range(8)]
    )
    expected = layout_sm90.to_tiles(pack_e2m1(codes[:, rows]), scale[:, rows], gate_up=False)
    assert torch.equal(tiles, expected)


@pytest.mark.parametrize("gate_up", [False, True], ids=["down", "gate and up"])
@pytest.mark.parametrize("size", [(1, 64, 128), (3, 128, 128), (2, 192, 640)], ids=str)
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
    words = layout_sm90._word_view(torch.empty(2, 5, 64, 4608, dtype=torch.uint8))
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
