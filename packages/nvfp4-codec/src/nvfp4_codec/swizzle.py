"""Memory layouts that GPU kernels want block scales in, as a type of their own.

A linear scale tensor ``[..., rows, cols]`` holds one byte per block in reading order; that is
what checkpoints store and what every decoder here takes. A rearranged one has the same bytes
and often the same shape, and decodes to plausible garbage. So it is wrapped in SwizzledScale,
which no decoder accepts. A stack (leading dimensions) is rearranged matrix by matrix.

What is refused where linear scales are expected: a SwizzledScale, a 1-D tensor, and (where
the shape of the weights is known) a padded shape. What cannot be: a bare tensor whose shape
is a multiple of 128 x 4, such as ``SwizzledScale.data``. Nothing in it tells that its bytes were
rearranged; only statistics do (``nvfp4 verify``, explain_diff).

Layouts, with r the row (N) and c the scale column (K / block size):

"tile_128x4" (cuBLAS and CUTLASS block scaling): rows padded to 128, columns to 4; with
    R = r % 128 the byte offset is
    ``(r // 128) * 128 * cols_padded + (c // 4) * 512 + (R % 32) * 16 + (R // 32) * 4 + c % 4``
"mn_major" (DeepGEMM): int32 words of 4 consecutive c, lowest in the low byte; logical
    ``[rows, ceil(cols / 4)]`` with strides ``(1, rows aligned to 4)``, so that TMA can load
    a column of 16-byte multiples
"utccp" (DeepGEMM's operands of tcgen05.cp 32x128b): the same words, and within 128 rows the word
    of row m moves to ``(m % 32) * 4 + m // 32``

Sources: cuBLAS documentation, "1D block scaling factors layout"; CUTLASS
``sm100_blockscaled_layout.hpp`` (the atom ``((32,4),(V,4)):((16,4),(0,1))``); DeepGEMM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .errors import DtypeError, LayoutError, LosslessError, ShapeError
from .formats import as_bytes, e8m0_to_fp32, fp32_to_e8m0
from .tensors import dtype_of

ScaleLayout = Literal["tile_128x4", "mn_major", "utccp"]

_TILE_ROWS, _TILE_COLS = 128, 4
_WORD = 4  # scale bytes in an int32
_TMA_WORDS = 4  # TMA wants strides that are multiples of 16 bytes


@dataclass(frozen=True, eq=False)
class SwizzledScale:
    """Block scales in a kernel's memory layout.

    data: ``[..., rows padded to 128, cols padded to 4]`` of dtype for "tile_128x4"; int32
        ``[..., rows, ceil(cols / 4)]`` for "mn_major" and "utccp".
    rows, cols: the linear shape of one matrix, without padding.
    dtype: of one scale, a one-byte dtype such as float8_e4m3fn.
    Raises LayoutError for an unknown layout, a negative size, a dtype of more than one byte, or
    data of another shape or dtype.
    """

    data: Tensor
    rows: int
    cols: int
    layout: ScaleLayout
    dtype: torch.dtype

    def __post_init__(self) -> None:
        _check_layout(self.layout)
        _check_size(self.rows, self.cols)
        if not isinstance(self.dtype, torch.dtype) or self.dtype.itemsize != 1:
            raise LayoutError(f"dtype is {self.dtype}, expected a one-byte torch.dtype")
        if not isinstance(self.data, Tensor):
            raise LayoutError(f"data is a {type(self.data).__name__}, expected a tensor")
        if self.layout == "tile_128x4":
            expected = (_align(self.rows, _TILE_ROWS), _align(self.cols, _TILE_COLS))
            dtype = self.dtype
        else:
            expected = (self.rows, -(-self.cols // _WORD))
            dtype = torch.int32
        if tuple(self.data.shape[-2:]) != expected or self.data.dtype != dtype:
            raise LayoutError(
                f"data is {self.data.dtype} {tuple(self.data.shape)}, expected {dtype} "
                f"[..., {expected[0]}, {expected[1]}] for {self.rows}x{self.cols} scales in "
                f"layout {self.layout!r}; SwizzledScale.wrap takes a flat tile_128x4 tensor"
            )

    @classmethod
    def wrap(cls, data: Tensor, rows: int, cols: int) -> SwizzledScale:
        """Declare that another program's tensor of any shape holds one "tile_128x4" matrix.

        Raises LayoutError if its size is not that of the padded matrix, or its dtype not one byte.
        """
        _check_size(rows, cols)
        if not isinstance(data, Tensor):
            raise LayoutError(f"data is a {type(data).__name__}, expected a tensor")
        padded = (_align(rows, _TILE_ROWS), _align(cols, _TILE_COLS))
        if data.numel() != padded[0] * padded[1]:
            raise LayoutError(
                f"data has {data.numel()} bytes, expected {padded[0]} * {padded[1]} for "
                f"{rows}x{cols} scales padded to {_TILE_ROWS}x{_TILE_COLS} tiles"
            )
        return cls(data.reshape(padded), rows, cols, "tile_128x4", data.dtype)


def swizzle_blockscale(scale: Tensor, layout: ScaleLayout = "tile_128x4") -> SwizzledScale:
    """Rearrange linear scales ``[..., rows, cols]`` (any one-byte dtype); padding is zero bytes.

    Raises LayoutError for a SwizzledScale or an unknown layout; ShapeError for a 1-D tensor, and
    for "utccp" if rows is no multiple of 128; DtypeError for scales that are not one byte each.
    A bare tensor that is swizzled already (``swizzled.data``, or another program's in 2-D) looks
    like a linear one and is swizzled a second time: keep it in a SwizzledScale. ``nvfp4 verify``
    and explain_diff find such scales by their statistics.
    """
    _check_layout(layout)
    if not isinstance(scale, Tensor):
        raise LayoutError(f"scale is a {type(scale).__name__}, expected a linear scale tensor")
    if scale.ndim < 2:
        raise ShapeError(
            f"scale has shape {tuple(scale.shape)}, expected linear scales [..., rows, cols]; "
            "a 1-D tensor is already swizzled (SwizzledScale.wrap)"
        )
    rows, cols = scale.shape[-2:]
    raw = as_bytes(scale)
    if layout == "tile_128x4":
        data = _tile(raw).view(scale.dtype)
    elif layout == "mn_major":
        data = _pack_words(raw)
    else:
        data = to_utccp_order(_pack_words(raw))
    return SwizzledScale(data, rows, cols, layout, scale.dtype)


def unswizzle_blockscale(scale: SwizzledScale) -> Tensor:
    """The linear scales ``[..., rows, cols]`` of any SwizzledScale, in its dtype, contiguous."""
    if not isinstance(scale, SwizzledScale):
        raise LayoutError(
            f"scale is a {type(scale).__name__}, expected a SwizzledScale; wrap a foreign "
            "tensor with SwizzledScale.wrap(data, rows, cols)"
        )
    if scale.layout == "tile_128x4":
        raw = _untile(as_bytes(scale.data))[..., : scale.rows, : scale.cols]
    else:
        words = from_utccp_order(scale.data) if scale.layout == "utccp" else scale.data
        # The extra dimension has stride 1 even where there is one word per row.
        raw = words.unsqueeze(-1).contiguous().view(torch.uint8).flatten(-2)[..., : scale.cols]
    return raw.contiguous().view(scale.dtype)


to_blocked = swizzle_blockscale
from_blocked = unswizzle_blockscale


def get_mn_major_tma_aligned_packed_ue8m0_tensor(scale: Tensor) -> Tensor:
    """DeepGEMM's packed E8M0 scales: int32 ``[..., mn, ceil(k / 4)]``, mn-major.

    scale: ``[..., mn, k]`` E8M0 (float8_e8m0fnu or uint8), or float32 that are exact powers
    of two. Raises LosslessError for any other float32: keeping only its exponent would change
    the weights by up to a factor of two; quantize them again with scale_fmt="ue8m0".
    """
    if dtype_of(scale) == torch.float32:
        exponents = fp32_to_e8m0(scale, "floor")
        inexact = scale[e8m0_to_fp32(exponents) != scale]
        if inexact.numel():
            raise LosslessError(
                f"{inexact.numel()} of {scale.numel()} scales are no powers of two in "
                f"2^-127..2^127 (one is {inexact[0].item()!r}), expected only such; requantize the "
                "weights to power-of-two scales: quantize_fp8_block(scale_fmt='ue8m0')"
            )
        scale = exponents
    elif dtype_of(scale) not in (torch.float8_e8m0fnu, torch.uint8):
        raise DtypeError(f"scale is {dtype_of(scale)}, expected float8_e8m0fnu, uint8 or float32")
    return swizzle_blockscale(scale, "mn_major").data


def get_mn_major_tma_aligned_packed_ue4m3_tensor(scale: Tensor) -> Tensor:
    """NVFP4's E4M3 scales in the same layout: int32 ``[..., mn, ceil(k / 4)]``, mn-major.

    scale: float8_e4m3fn or its bytes as uint8, ``[..., mn, k]``.
    """
    if dtype_of(scale) not in (torch.float8_e4m3fn, torch.uint8):
        raise DtypeError(f"scale is {dtype_of(scale)}, expected float8_e4m3fn or uint8")
    return swizzle_blockscale(scale, "mn_major").data


def to_utccp_order(words: Tensor) -> Tensor:
    """Permute packed words ``[..., mn, w]`` within each 128 rows for UTCCP; keeps the strides."""
    return _permute_rows(words, 4, 32)


def from_utccp_order(words: Tensor) -> Tensor:
    """The inverse of to_utccp_order."""
    return _permute_rows(words, 32, 4)


def _permute_rows(words: Tensor, outer: int, inner: int) -> Tensor:
    if dtype_of(words) != torch.int32:
        raise DtypeError(f"words are {dtype_of(words)}, expected packed scales as int32")
    if words.ndim < 2 or words.shape[-2] % _TILE_ROWS:
        raise ShapeError(
            f"words have shape {tuple(words.shape)}, expected [..., mn, w] with mn a multiple "
            f"of {_TILE_ROWS}; pad the rows first"
        )
    *batch, rows, width = words.shape
    grid = words.reshape(*batch, rows // _TILE_ROWS, outer, inner, width)
    return torch.empty_like(words).copy_(grid.transpose(-3, -2).reshape(words.shape))


def _tile(raw: Tensor) -> Tensor:
    padding = (0, -raw.shape[-1] % _TILE_COLS, 0, -raw.shape[-2] % _TILE_ROWS)
    padded = torch.nn.functional.pad(raw, padding)
    *batch, rows, cols = padded.shape
    grid = padded.view(*batch, rows // 128, 4, 32, cols // 4, 4)
    return _reorder(grid, (0, 3, 2, 1, 4)).reshape(padded.shape)


def _untile(raw: Tensor) -> Tensor:
    *batch, rows, cols = raw.shape
    grid = raw.reshape(*batch, rows // 128, cols // 4, 32, 4, 4)
    return _reorder(grid, (0, 3, 2, 1, 4)).reshape(raw.shape)


def _reorder(grid: Tensor, order: tuple[int, ...]) -> Tensor:
    """Permute the last dimensions, leaving the leading ones in place."""
    first = grid.ndim - len(order)
    return grid.permute(*range(first), *(first + dim for dim in order))


def _pack_words(raw: Tensor) -> Tensor:
    *batch, rows, cols = raw.shape
    num_words = -(-cols // _WORD)
    padded = torch.nn.functional.pad(raw, (0, num_words * _WORD - cols))
    memory = raw.new_zeros(*batch, num_words, _align(rows, _TMA_WORDS), _WORD)
    memory[..., :rows, :] = padded.view(*batch, rows, num_words, _WORD).transpose(-3, -2)
    # Little-endian, like every machine that torch and CUDA run on: byte 0 is the low one.
    return memory.view(torch.int32).squeeze(-1).mT[..., :rows, :]


def _check_layout(layout: str) -> None:
    if layout not in get_args(ScaleLayout):
        raise LayoutError(
            f"layout is {layout!r}, expected one of: {', '.join(get_args(ScaleLayout))}"
        )


def _check_size(rows: int, cols: int) -> None:
    if not (isinstance(rows, int) and isinstance(cols, int) and rows >= 0 and cols >= 0):
        raise LayoutError(f"rows and cols are {rows!r} and {cols!r}, expected integers from 0 on")


def _align(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
