"""sm_90a: weights in the order of the registers from which wgmma takes its operand A.

With the operands swapped, weights are operand A (M = 64 rows of N) and tokens operand B. A
warpgroup takes A from registers, so it can decode E2M1 x UE4M3 exactly to BF16 on the way, and
nothing is written back to shared memory. The weights lie in memory as the threads want them:

tiles uint8 ``[E, N / 64, K / 128, 4608]``: 64 rows by 128 columns in 4096 bytes of codes and 512
bytes of scales, 72 bytes for 128 values, one bulk copy. In a tile, thread ``i = 32 w + 4 g + t``
(warp w, 0 <= g < 8, 0 <= t < 4) holds the rows ``16 w + g`` and ``16 w + g + 8``. Its codes for the
step of K ``s = 4 c + j`` (columns 16 s to 16 s + 15) are the 32-bit word at byte
``2048 c + 16 i + 4 j``, so 16-byte loads fetch four steps. Register r of the step is a pair of
columns, ``column(s, r) = 16 s + 8 (r // 2) + 2 t`` and the next, of row ``16 w + g + 8 (r % 2)``;
the even column's code is in the low half of the word, the other's in the high half. Within a half
the magnitude is at bit ``3 r`` and the sign at bit 13, 12, 15, 14 for r = 0, 1, 2, 3. Then with

    mask 0x81C081C0:  r = 2: w & mask;  r = 1: (w << 3) & mask;
    r = 0: (w << 6) & 0x01C001C0 | (w << 2) & 0x80008000;
    r = 3: (w >> 3) & 0x01C001C0 | (w << 1) & 0x80008000

each register is a pair of BF16 numbers that are 2^-126 times the codes' values, for 7 integer
instructions per 8 values on the unit that has half the throughput; nibbles would take 10
(compiled for sm_90a with NVRTC 13.0).

The scale bytes of the rows 16 w + g and 16 w + g + 8 follow each other, 8 steps each, at byte
``4096 + 16 (8 w + g)``: one 16-byte load, the same for the four threads of a quad.

In l1 gate and up rows alternate in eights: a thread's two rows are gate and up of one output.

Sources: PTX ISA, "wgmma: register fragments for matrix A", m64k16; the tests hold the columns and
rows against CUTLASS's ``ALayout_64x16``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, reduce

import torch
from torch import Tensor

TILE_ROWS, TILE_COLUMNS = 64, 128
CODE_BYTES = TILE_ROWS * TILE_COLUMNS // 2
SCALE_BYTES = TILE_ROWS * TILE_COLUMNS // 16
TILE_BYTES = CODE_BYTES + SCALE_BYTES

_MAGNITUDE_BIT = (0, 3, 6, 9)
_SIGN_BIT = (13, 12, 15, 14)
_CPU_WORDS = 1 << 18  # in flight on a CPU, so that temporaries stay in its cache


def to_tiles(weight: Tensor, scale: Tensor, *, gate_up: bool) -> Tensor:
    """Pack codes uint8 ``[E, N, K/2]`` and scale bytes uint8 ``[E, N, K/16]`` into tiles.

    gate_up: the first N/2 rows are gate rows, the others up rows, to be interleaved.
    """
    experts, rows, half_columns = weight.shape
    down, across = rows // TILE_ROWS, 2 * half_columns // TILE_COLUMNS
    tiles = weight.new_empty(experts, down, across, TILE_BYTES)
    registers, words = _register_views(weight, gate_up), _word_view(tiles)
    encode = [table.to(weight.device) for table in _encode_tables()]
    for part in _parts(words):
        # Dimensions: ..., j, t.
        codes = [r[part].contiguous().view(torch.uint8).unflatten(-1, (4, 4)) for r in registers]
        bits = [_look_up(table, code) for table, code in zip(encode, codes, strict=True)]
        words[part] = reduce(Tensor.bitwise_or_, bits).mT
    # Dimensions: expert, tile of rows, tile of columns, w, g, row; eight bytes as one number.
    _scale_view(tiles)[:] = _row_view(scale, gate_up).permute(0, 1, 5, 2, 4, 3)
    return tiles


def from_tiles(tiles: Tensor, *, gate_up: bool) -> tuple[Tensor, Tensor]:
    """The inverse of to_tiles: codes and scale bytes in reading order."""
    experts, down, across, _ = tiles.shape
    rows, columns = down * TILE_ROWS, across * TILE_COLUMNS
    weight = tiles.new_empty(experts, rows, columns // 2)
    scale = tiles.new_empty(experts, rows, columns // 16)
    registers, words = _register_views(weight, gate_up), _word_view(tiles)
    decode = _decode_table().to(tiles.device)
    for part in _parts(words):
        word = words[part].mT.contiguous()  # by j, t
        # Byte r: register r's code of the even column, then of the odd one.
        pairs = _look_up(decode, word & 0xFFFF)
        pairs |= _look_up(decode, word >> 16 & 0xFFFF) << 4
        codes = pairs.view(torch.uint8).view(*word.shape, 4)
        for r, register in enumerate(registers):
            register[part] = codes[..., r].contiguous().view(torch.int32).squeeze(-1)
    _row_view(scale, gate_up)[:] = _scale_view(tiles).permute(0, 1, 3, 5, 4, 2)
    return weight, scale


def _row_view(x: Tensor, gate_up: bool) -> Tensor:
    """Rows ``[E, N, bytes]`` as int64 by expert, tile of rows, w, row, g, eight bytes."""
    experts, rows, _ = x.shape
    words = x.view(torch.int64)
    if gate_up:
        return words.view(experts, 2, rows // TILE_ROWS, 4, 8, -1).movedim(1, 3)
    return words.view(experts, rows // TILE_ROWS, 4, 2, 8, -1)


def _register_views(weight: Tensor, gate_up: bool) -> list[Tensor]:
    """Four views of the codes: what register 0..3 of the threads t = 0..3 takes, byte t of each.

    Dimensions: expert, tile of rows, tile of columns, c, w, g, j; int32.
    """
    steps = _row_view(weight, gate_up).view(torch.int32).unflatten(-1, (-1, 2, 4, 2))
    return [steps[:, :, :, r % 2, ..., r // 2].permute(0, 1, 4, 5, 2, 3, 6) for r in range(4)]


def _word_view(tiles: Tensor) -> Tensor:
    """The codes of tiles as int32 by expert, tile of rows, tile of columns, c, w, g, t, j."""
    words: Tensor = tiles.view(torch.int32)[..., : CODE_BYTES // 4].unflatten(-1, (2, 4, 8, 4, 4))
    return words


def _scale_view(tiles: Tensor) -> Tensor:
    """The scales of tiles as int64, eight steps each, by expert, the tiles, w, g, row."""
    steps: Tensor = tiles.view(torch.int64)[..., CODE_BYTES // 8 :].unflatten(-1, (4, 8, 2))
    return steps


def _parts(words: Tensor) -> Iterator[tuple[int, slice]]:
    """Slices of the first two dimensions: experts one by one, for a CPU in pieces."""
    experts, down, across = words.shape[:3]
    step = down if words.is_cuda else max(1, _CPU_WORDS * 4 // (across * CODE_BYTES))
    for expert in range(experts):
        for start in range(0, down, step):
            yield expert, slice(start, start + step)


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index.int().flatten()).view(index.shape)


@cache
def _encode_tables() -> list[Tensor]:
    """For each register, the bits of a word by a byte of two codes."""

    def bits(code: int, r: int) -> int:
        return (code & 7) << _MAGNITUDE_BIT[r] | (code >> 3) << _SIGN_BIT[r]

    return [
        _int32([bits(byte & 0xF, r) | bits(byte >> 4, r) << 16 for byte in range(256)])
        for r in range(4)
    ]


@cache
def _decode_table() -> Tensor:
    """The four codes of half a word, code r in the low half of byte r."""
    half = torch.arange(1 << 16, dtype=torch.int32, device="cpu")
    codes = torch.zeros_like(half)
    for r in range(4):
        code = half >> _MAGNITUDE_BIT[r] & 7 | (half >> _SIGN_BIT[r] & 1) << 3
        codes |= code << 8 * r
    return codes


def _int32(words: list[int]) -> Tensor:
    signed = [word - (word >> 31 << 32) for word in words]
    return torch.tensor(signed, dtype=torch.int32, device="cpu")
