# Kernels are written in Triton's language, whose tensors and tuples mypy cannot see through.
# mypy: ignore-errors
# ruff: noqa: RUF005

"""Triton kernels that turn packed codes and scales into floats.

Each thread takes one word of codes, loaded as an integer, and writes its values with one store
of 8 or 16 bytes; consecutive threads write consecutive addresses. ``UNROLL`` words per thread
are loaded before the first is used, which hides latency and shares the address arithmetic.
Offsets inside a program are 32-bit; where a program starts is 64-bit.

Decoding is two multiplications. A code moved under float32's exponent and mantissa reads as
value * 2^-126 (E2M1) or value * 2^-120 (E4M3), subnormals included, so multiplying by that
power of two is exact; the second multiplication is the one that rounds. None of this may
flush subnormals, which Triton does not ask for.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TWO_POW_126 = tl.constexpr(2.0**126)
_TWO_POW_120 = tl.constexpr(2.0**120)


@triton.jit
def decode_e4m3(byte):
    """E4M3 bytes (any integer type, 0..255) to float32."""
    code = byte.to(tl.int32)
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * _TWO_POW_120
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _store(pointers, value, mask):
    """Round float32 to the output's dtype and store it, every NaN as the canonical one.

    The GPU makes a NaN of all mantissa bits and no sign (PTX ISA: mul, cvt), which as an
    integer is above every number. One signed minimum, which works on pairs of 16 bits,
    therefore replaces a comparison and a selection per value.
    """
    dtype: tl.constexpr = pointers.dtype.element_ty
    if dtype == tl.float32:
        bits = tl.minimum(value.to(tl.int32, bitcast=True), 0x7FC00000)
    else:
        canonical: tl.constexpr = 0x7FC0 if dtype == tl.bfloat16 else 0x7E00
        bits = value.to(dtype).to(tl.int16, bitcast=True)
        bits = tl.minimum(bits, tl.full(bits.shape, canonical, tl.int16))
    tl.store(pointers, bits.to(dtype, bitcast=True), mask=mask)


@triton.jit(do_not_specialize=["num_words", "global_scale_bits"])
def dequantize_e2m1(
    weight_ptr,
    scale_ptr,
    out_ptr,
    num_words,
    global_scale_bits,
    SCALE: tl.constexpr,
    WORDS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Words of E2M1 codes: int32 of eight, or int16 of four (a float32 output's 16 bytes).

    SCALE is "multiply" or "divide" (by the global scale, E4M3 bytes) or "e8m0". The global
    scale comes as float32 bits: a subnormal would not pass as a number everywhere.
    """
    codes: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 4
    words_per_scale: tl.constexpr = (32 if SCALE == "e8m0" else 16) // codes
    first = tl.program_id(0).to(tl.int64) * (WORDS * UNROLL)
    weight_ptr += first
    scale_ptr += first // words_per_scale
    out_ptr += first * codes
    count = tl.minimum(num_words - first, WORDS * UNROLL).to(tl.int32)
    global_scale = global_scale_bits.to(tl.float32, bitcast=True)
    lane = tl.arange(0, WORDS)
    nibble = tl.arange(0, codes)

    words = ()
    scales = ()
    for i in tl.static_range(UNROLL):
        index = i * WORDS + lane
        words = words + (tl.load(weight_ptr + index, mask=index < count, other=0),)
        scale = tl.load(scale_ptr + index // words_per_scale, mask=index < count, other=0)
        scales = scales + (scale,)
    for i in tl.static_range(UNROLL):
        if SCALE == "e8m0":
            byte = scales[i].to(tl.int32)
            bits = tl.where(byte == 0, 0x00400000, byte << 23)
            factor = tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
        elif SCALE == "divide":
            factor = tl.div_rn(decode_e4m3(scales[i]), global_scale)
        else:
            factor = decode_e4m3(scales[i]) * global_scale
        # The nibble to the top, then an arithmetic shift: the sign stays where float32 has it.
        top = words[i].to(tl.int32)[:, None] << (28 - 4 * nibble)[None, :]
        bits = (top >> 6) & -0x7E400000  # 0x81C00000: sign, low exponent bits, first mantissa bit
        value = bits.to(tl.float32, bitcast=True) * _TWO_POW_126 * factor[:, None]
        index = i * WORDS + lane
        _store(
            out_ptr + index[:, None] * codes + nibble[None, :], value, mask=(index < count)[:, None]
        )


@triton.jit(do_not_specialize=["rows", "columns"])
def dequantize_e4m3_words(
    weight_ptr,
    scale_ptr,
    out_ptr,
    rows,
    columns,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """A matrix of int32 words of four E4M3; columns and block width are counted in words."""
    # One scale for the whole tile (the usual 128x128) is a scalar load; otherwise one per word.
    one_scale: tl.constexpr = BLOCK_ROWS % (ROWS * UNROLL) == 0 and BLOCK_WORDS % WORDS == 0
    column_tiles = tl.cdiv(columns, WORDS)
    tile = tl.program_id(0)
    first_row = (tile // column_tiles) * (ROWS * UNROLL)
    first_column = (tile % column_tiles) * WORDS
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, WORDS)
    scale_columns = tl.cdiv(columns, BLOCK_WORDS)
    element = tl.arange(0, 4)

    words = ()
    scales = ()
    if one_scale:
        block = (first_row // BLOCK_ROWS).to(tl.int64) * scale_columns + first_column // BLOCK_WORDS
        tile_scale = tl.load(scale_ptr + block)
    for i in tl.static_range(UNROLL):
        r = row + i * ROWS
        mask = (r < rows)[:, None] & (column < columns)[None, :]
        offset = r.to(tl.int64)[:, None] * columns + column[None, :]
        words = words + (tl.load(weight_ptr + offset, mask=mask, other=0),)
        if not one_scale:
            block = (r // BLOCK_ROWS).to(tl.int64)[:, None] * scale_columns
            block += (column // BLOCK_WORDS)[None, :]
            scales = scales + (tl.load(scale_ptr + block, mask=mask, other=0.0),)
    for i in tl.static_range(UNROLL):
        r = row + i * ROWS
        top = words[i][:, :, None] << (24 - 8 * element)[None, None, :]
        bits = (top >> 4) & -0x78100000  # 0x87F00000: sign, low exponent bits, three mantissa bits
        value = bits.to(tl.float32, bitcast=True) * _TWO_POW_120
        value = tl.where(tl.abs(value) > 448.0, float("nan"), value)  # 0x7F and 0xFF read as 480
        value = value * (tile_scale if one_scale else scales[i][:, :, None])
        # As a matrix, so that the compiler sees rows of contiguous values.
        c = first_column * 4 + tl.arange(0, WORDS * 4)
        mask = (r < rows)[:, None] & (c < columns * 4)[None, :]
        offset = r.to(tl.int64)[:, None] * (columns * 4) + c[None, :]
        _store(out_ptr + offset, tl.reshape(value, (ROWS, WORDS * 4)), mask=mask)


@triton.jit(do_not_specialize=["rows", "columns"])
def dequantize_e4m3_bytes(
    weight_ptr,
    scale_ptr,
    out_ptr,
    rows,
    columns,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The same for widths, blocks and alignments that do not fit words: byte by byte."""
    column_tiles = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0)
    row = (tile // column_tiles) * ROWS + tl.arange(0, ROWS)
    column = (tile % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    offset = row.to(tl.int64)[:, None] * columns + column[None, :]
    block = (row // BLOCK_ROWS).to(tl.int64)[:, None] * tl.cdiv(columns, BLOCK_COLUMNS)
    block += (column // BLOCK_COLUMNS)[None, :]
    value = decode_e4m3(tl.load(weight_ptr + offset, mask=mask, other=0))
    scale = tl.load(scale_ptr + block, mask=mask, other=0.0)
    _store(out_ptr + offset, value * scale, mask=mask)
