"""sm_90a: weights in the order of the registers from which wgmma takes its operand A.

With the operands swapped, weights are operand A (M = 64 rows of N) and tokens operand B. A
warpgroup takes A from registers, so it can decode E2M1 x UE4M3 exactly to BF16 on the way, and
nothing is written back to shared memory. The weights lie in memory as the threads want them:

tiles uint8 ``[E, N / 64, K / 128, 4608]``: 64 rows by 128 columns in 4096 bytes of codes and 512
bytes of scales, 72 bytes for 128 values, one bulk copy. In a tile, thread ``i = 32 w + 4 g + t``
(warp w, 0 <= g < 8, 0 <= t < 4) holds the rows ``16 w + g`` and ``16 w + g + 8``.

**Columns.** wgmma gives a thread four values of a row in each step of 16 columns. So that these are
one block's, and a thread needs one scale where it would need four, the columns of K are taken in
another order than they have in the weights, within every 64: at place ``16 j + 8 h + 2 t + e`` of
the 64 is column ``16 t + 4 j + 2 h + e`` (0 <= j < 4, 0 <= h, e < 2). Step j of a half c of the
tile multiplies the places 16 j to 16 j + 15. Tokens come into that order when they are fetched
(stages/place_order.hpp), the intermediate because l1's outputs have it: the 64 outputs that are 64
columns of l2 stand in the tiles in the order of their places.

**Codes.** Register r of the step is a pair of columns, e = 0 and 1, of row ``16 w + g + 8 (r % 2)``
with ``h = r // 2``. As BF16 in the register (sign at bits 15 and 31, magnitude at 8 to 6 and 24 to
22) the bits of a code are 2^-126 times its value. Two steps j = 0, 1 or 2, 3 are two 32-bit words:

    w0 = R0 | R1 >> 4 | R2 >> 10 | Z & 0x06030603          of the first step's registers R0 to R2
    w1 = R0 | R1 >> 4 | R2 >> 10 | (Z & 0x180C180C) >> 2   of the second's
    Z = R3 >> 6 of the first step | R3 >> 12 of the second

with rotations to the right; all bits find room. Rotating back and masking with 0x81C081C0 is 8
masks, 7 shifts and one selection for 16 values. Step j is at byte ``2048 c + 16 i + 4 j``.

**Scales.** Thread i's two rows have the bytes ``4096 + 256 c + 2 i`` and the next.

In l1 gate and up rows alternate in eights: a thread's two rows are gate and up of one output.

Sources: PTX ISA, "wgmma: register fragments for matrix A", m64k16; the tests hold the columns and
rows against CUTLASS's ``ALayout_64x16``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

TILE_ROWS, TILE_COLUMNS = 64, 128
CODE_BYTES = TILE_ROWS * TILE_COLUMNS // 2
SCALE_BYTES = TILE_ROWS * TILE_COLUMNS // 16
TILE_BYTES = CODE_BYTES + SCALE_BYTES

_ROTATED, _Z_ROTATED = (0, 4, 10), (6, 12)  # R0 to R2 in a word, the two R3 in Z
_Z_FIRST, _Z_SECOND, _Z_SHIFT = 0x06030603, 0x180C180C, 2  # Z's bits in the two words
_CPU_WORDS = 1 << 18  # in flight on a CPU, so that temporaries stay in its cache


def to_tiles(weight: Tensor, scale: Tensor, *, gate_up: bool) -> Tensor:
    """Pack codes uint8 ``[E, N, K/2]`` and scale bytes uint8 ``[E, N, K/16]`` into tiles.

    gate_up: the first N/2 rows are gate rows, the others up rows, to be interleaved; N is then a
    multiple of 128, otherwise of 64.
    """
    experts, rows, half_columns = weight.shape
    down, across = rows // TILE_ROWS, 2 * half_columns // TILE_COLUMNS
    tiles = weight.new_empty(experts, down, across, TILE_BYTES)
    low, high = _code_views(weight, gate_up)
    words = _word_view(tiles, gate_up)
    tables = [table.to(weight.device) for table in _encode_tables()]
    for part in _parts(words):
        upper = high[part].contiguous()
        first, second = upper[..., 0::2], upper[..., 1::2]
        whole = _look_up(tables[0], low[part].contiguous())
        whole[..., 0::2] |= _look_up(tables[1], first) | _look_up(tables[2], second)
        whole[..., 1::2] |= _look_up(tables[3], first) | _look_up(tables[4], second)
        words[part] = whole
    _scale_view(tiles, gate_up)[:] = _scale_rows(scale, gate_up)
    return tiles


def from_tiles(tiles: Tensor, *, gate_up: bool) -> tuple[Tensor, Tensor]:
    """The inverse of to_tiles: codes and scale bytes in reading order."""
    experts, down, across, _ = tiles.shape
    rows, columns = down * TILE_ROWS, across * TILE_COLUMNS
    weight = tiles.new_empty(experts, rows, columns // 2)
    scale = tiles.new_empty(experts, rows, columns // 16)
    low, high = _code_views(weight, gate_up)
    words = _word_view(tiles, gate_up)
    for part in _parts(words):
        whole = words[part].contiguous()
        first, second = whole[..., 0::2], whole[..., 1::2]
        z = first & _Z_FIRST | (second & _Z_SECOND >> _Z_SHIFT) << _Z_SHIFT
        r0, r1, r2 = (_codes(whole, places) for places in _ROTATED)
        r3 = torch.stack([_codes(z, places) for places in _Z_ROTATED], dim=-1).flatten(-2)
        low[part] = (r0 | r2 << 8).short()
        high[part] = (r1 | r3 << 8).short()
    _scale_rows(scale, gate_up)[:] = _scale_view(tiles, gate_up)
    return weight, scale


def _row_view(x: Tensor, gate_up: bool) -> Tensor:
    """Rows ``[E, N, X]`` by expert, tile of rows, w, g, row of the thread, X.

    Tiles of rows are two dimensions, pairs with gate_up, where 64 outputs are in the order of
    places (see the module); g is two dimensions too.
    """
    experts, rows, _ = x.shape
    if gate_up:  # by expert, gate or up, 64 outputs, t, the halves of j and h, e
        outputs = x.view(experts, 2, rows // (2 * TILE_ROWS), 4, 2, 4, 2, -1)
        return outputs.permute(0, 2, 4, 5, 3, 6, 1, 7)
    return x.view(experts, rows // TILE_ROWS, 1, 4, 2, 4, 2, -1).movedim(4, 6)


def _code_views(weight: Tensor, gate_up: bool) -> tuple[Tensor, Tensor]:
    """Four codes of h = 0, 1 as int16, of each thread's lower and upper row.

    Dimensions: expert, tile of rows, tile of columns, c, w, g, t, j.
    """
    codes = _row_view(weight.view(torch.int16), gate_up).unflatten(-1, (-1, 2, 4, 4))
    lower, upper = codes.permute(6, 0, 1, 2, 7, 8, 3, 4, 5, 9, 10)
    return lower, upper


def _word_view(tiles: Tensor, gate_up: bool) -> Tensor:
    """The codes of tiles as int32, in the dimensions of _code_views."""
    words = tiles.view(torch.int32)[..., : CODE_BYTES // 4].unflatten(-1, (2, 4, 4, 2, 4, 4))
    view: Tensor = words.unflatten(1, (-1, 2 if gate_up else 1))
    return view


def _scale_rows(scale: Tensor, gate_up: bool) -> Tensor:
    """Scale bytes by expert, tile of rows, tile of columns, c, w, g, t, row of the thread."""
    blocks = _row_view(scale, gate_up).unflatten(-1, (-1, 2, 4))
    view: Tensor = blocks.permute(0, 1, 2, 7, 8, 3, 4, 5, 9, 6)
    return view


def _scale_view(tiles: Tensor, gate_up: bool) -> Tensor:
    """The scales of tiles, in the dimensions of _scale_rows."""
    scales = tiles[..., CODE_BYTES:].unflatten(-1, (2, 4, 4, 2, 4, 2))
    view: Tensor = scales.unflatten(1, (-1, 2 if gate_up else 1))
    return view


def _parts(words: Tensor) -> Iterator[tuple[int, slice]]:
    """Slices of the first two dimensions: experts one by one, for a CPU in pieces."""
    experts, down, tiles, across = words.shape[:4]
    step = down if words.is_cuda else max(1, _CPU_WORDS * 4 // (tiles * across * CODE_BYTES))
    for expert in range(experts):
        for start in range(0, down, step):
            yield expert, slice(start, start + step)


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, (index.int() & 0xFFFF).flatten()).view(index.shape)


def _codes(words: Tensor, places: int) -> Tensor:
    """Two codes in a byte, of the register that is the words rotated to the left."""
    register = words << places | words >> (32 - places) & (1 << places) - 1 if places else words
    return (
        register >> 6 & 0x07 | register >> 12 & 0x08 | register >> 18 & 0x70 | register >> 24 & 0x80
    )


@cache
def _encode_tables() -> list[Tensor]:
    """Bits of words by four codes: of the lower row; of the upper row in the words of two steps.

    The latter are: the first word's from the first step, and from the second; the second's.
    """
    codes = torch.arange(1 << 16, dtype=torch.int64, device="cpu")

    def register(pair: Tensor, places: int) -> Tensor:
        """Of a byte of two codes, rotated to the right."""
        even, odd = pair & 0xF, pair >> 4 & 0xF
        bits = (even & 7) << 6 | even >> 3 << 15 | (odd & 7) << 22 | odd >> 3 << 31
        return (bits >> places | bits << (32 - places)) & 0xFFFFFFFF

    r0, r1 = (register(codes, places) for places in _ROTATED[:2])
    first_z, second_z = (register(codes >> 8, places) for places in _Z_ROTATED)
    tables = (
        r0 | register(codes >> 8, _ROTATED[2]),
        r1 | first_z & _Z_FIRST,
        second_z & _Z_FIRST,
        (first_z & _Z_SECOND) >> _Z_SHIFT,
        r1 | (second_z & _Z_SECOND) >> _Z_SHIFT,
    )
    return [(table - (table >> 31 << 32)).int() for table in tables]
