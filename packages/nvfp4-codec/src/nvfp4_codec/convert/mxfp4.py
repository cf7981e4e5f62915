"""MXFP4 to NVFP4 by rewriting scales: the codes keep every bit.

Both formats hold E2M1 codes. An MXFP4 block has the scale 2^k (E8M0). E4M3 has the powers of
two 2^-9..2^8, so with weight_scale_2 = 2^m every block with m - 9 <= k <= m + 8 is expressed
exactly: an exponent spread of 17 fits. The default m puts the largest k at 2^8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..backends import BackendName
from ..checks import as_rows, check_choice, outputs, refuse_overlap
from ..errors import DtypeError, LosslessError, NonFiniteError, ShapeError
from ..formats import as_bytes, decode_e2m1, e8m0_to_fp32, encode_e2m1
from ..packing import pack_e2m1, unpack_e2m1
from ..scales import MX_BLOCK_SIZE
from ..tensors import Divisor, GlobalScale, dtype_of, global_scale_value
from .inputs import E8M0_DTYPES, mxfp4_bytes

OutsidePolicy = Literal["error", "requantize"]

E8M0_BIAS = 127
E8M0_NAN = 255
FLOOR_EXPONENT, TOP_EXPONENT = -9, 8  # E4M3's smallest and largest power of two
MIN_NORMAL_EXPONENT = -126  # of float32
MAX_SPREAD = TOP_EXPONENT - FLOOR_EXPONENT
_BYTES_PER_BLOCK = MX_BLOCK_SIZE // 2
_BLOCKS_PER_LOOK = 1 << 14


class NVFP4Cast(NamedTuple):
    """What mxfp4_to_nvfp4 returns.

    weight: uint8 ``[..., N, K/2]``; the input's own memory if no code changed and no
        ``out`` was given. weight_scale: float8_e4m3fn ``[..., N, K/16]``.
    weight_scale_2: float32 ``[]``, a power of two.
    lossless_mask: bool ``[..., N, K/32]``; False where a value of the block changed.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_scale_2: Tensor
    lossless_mask: Tensor


def mxfp4_to_nvfp4(
    weight: Tensor,
    weight_scale: Tensor,
    *,
    weight_scale_2: GlobalScale | None = None,
    outside: OutsidePolicy = "error",
    out: tuple[Tensor, Tensor] | None = None,
    backend: BackendName | None = None,
) -> NVFP4Cast:
    """Cast MXFP4 to NVFP4, keeping every nibble (-0 too) wherever the scales allow it.

    weight: packed E2M1, uint8 or int8 ``[..., N, K/2]``. weight_scale: float8_e8m0fnu or its
        bytes as uint8 ``[..., N, K/32]``.
    weight_scale_2: a power of two to use (see joint_weight_scale_2 for a w1/w3 pair); None
        puts the largest exponent that a non-zero block uses at E4M3's 2^8. Blocks of zeros
        never count: they keep their codes and get some legal scale.
    outside: a block too small for the window raises LosslessError, or ("requantize") is
        encoded again, to nearest, at E4M3's smallest scale 2^-9; blocks inside stay exact.
    out: preallocated ``(weight uint8, weight_scale float8_e4m3fn)``.
    Raises NonFiniteError for E8M0 byte 255 (NaN), LosslessError if weight_scale_2 is no
    power of two or too small for the largest block (that would saturate).
    """
    check_choice("outside", outside, OutsidePolicy)
    codes, scale = _checked(weight, weight_scale)
    if weight_scale_2 is None:
        exponent = _exponent_for([_extreme_used_byte(codes, scale, largest=True)])
    else:
        exponent = _power_of_two_exponent(weight_scale_2)
    _check_window(codes, scale, exponent, refuse_below=outside == "error")
    kernels = backends.select("mxfp4_to_nvfp4", codes.device, backend)

    new_codes, new_scale = _prepare_outputs(out, codes, scale)
    lossless = torch.empty(scale.shape, dtype=torch.bool, device=codes.device)
    num_lossy = kernels.mxfp4_to_nvfp4(
        as_rows(codes),
        as_rows(scale),
        E8M0_BIAS + exponent,
        as_rows(new_codes),
        as_rows(as_bytes(new_scale)),
        as_rows(lossless),
    )
    if num_lossy:
        if out is None:
            new_codes = codes.clone()  # until here it was the input's own memory
        _requantize_at_floor(new_codes, scale, exponent, lossless)
    return NVFP4Cast(new_codes, new_scale, _power_of_two(exponent, codes.device), lossless)


def joint_weight_scale_2(
    weight_scales: Sequence[Tensor], weights: Sequence[Tensor] | None = None
) -> Tensor:
    """The weight_scale_2 that tensors sharing one (w1 and w3, or w1/w2/w3) should be cast with.

    weight_scales: E8M0 scales ``[..., N, K/32]`` each. weights: their packed codes; without
        them every block counts, also one whose codes are all zero.
    Returns float32 ``[]``, the power of two that puts the largest exponent of all at 2^8.
    Raises NonFiniteError for E8M0 byte 255, DtypeError for anything but lists of tensors,
    ShapeError for lists of no or different length.
    """
    for name, given in (("weight_scales", weight_scales), ("weights", weights)):
        if not isinstance(given, Sequence) and (name == "weight_scales" or given is not None):
            raise DtypeError(
                f"{name} is a {type(given).__name__}, expected a list of tensors (one tensor "
                "alone: [tensor])"
            )
    if not weight_scales or (weights is not None and len(weights) != len(weight_scales)):
        num_weights = "no" if weights is None else len(weights)
        raise ShapeError(
            f"found {len(weight_scales)} weight_scales and {num_weights} weights, expected at "
            "least one scale tensor and as many weights as scales (or none)"
        )
    if weights is None:
        for scale in weight_scales:
            if dtype_of(scale) not in E8M0_DTYPES:
                raise DtypeError(f"a weight_scale is {dtype_of(scale)}, expected E8M0 bytes")
        largest = [_largest_byte(_refuse_nan(as_bytes(scale))) for scale in weight_scales]
    else:
        pairs = [_checked(w, s) for w, s in zip(weights, weight_scales, strict=True)]
        largest = [_extreme_used_byte(*pair, largest=True) for pair in pairs]
    return _power_of_two(_exponent_for(largest), weight_scales[0].device)


def _checked(weight: Tensor, weight_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and E8M0 bytes, contiguous, of matching shapes and without NaN scales."""
    codes, scale = mxfp4_bytes(weight, weight_scale)
    return codes, _refuse_nan(scale)


def _refuse_nan(scale: Tensor) -> Tensor:
    if _largest_byte(scale) == E8M0_NAN:
        raise NonFiniteError(
            f"weight_scale has {int((scale == E8M0_NAN).sum())} bytes 255 (NaN) of "
            f"{scale.numel()}, expected 0..254; repair or drop the blocks they scale"
        )
    return scale


def _largest_byte(scale: Tensor) -> int | None:
    return int(scale.max()) if scale.numel() else None


def _exponent_for(largest_bytes: Sequence[int | None]) -> int:
    """log2 of the weight_scale_2 that puts the largest block exponent at E4M3's 2^8."""
    largest = max((byte for byte in largest_bytes if byte is not None), default=None)
    if largest is None:
        return 0
    # Never a subnormal float32, which a GPU may flush; tiny blocks still lie in the window.
    return max(largest - E8M0_BIAS - TOP_EXPONENT, MIN_NORMAL_EXPONENT)


def _power_of_two(exponent: int, device: torch.device) -> Tensor:
    return torch.tensor(math.ldexp(1.0, exponent), dtype=torch.float32, device=device)


def _extreme_used_byte(codes: Tensor, scale: Tensor, *, largest: bool) -> int | None:
    """The largest or smallest E8M0 byte of a block with a non-zero code; None if there is none."""
    candidates = scale
    while candidates.numel():
        byte = int(candidates.max() if largest else candidates.min())
        # A few blocks usually decide: look at a part before looking at all of them.
        if any(used.any() for used in _used(codes, scale, byte, byte)):
            return byte
        candidates = candidates[candidates < byte if largest else candidates > byte]
    return None


def _used(codes: Tensor, scale: Tensor, low: int, high: int) -> Iterator[Tensor]:
    """Which blocks with scale bytes low..high hold a non-zero code, in parts of bounded size."""
    blocks, scale = codes.view(-1, _BYTES_PER_BLOCK), scale.view(-1)
    for start in range(0, scale.numel(), _BLOCKS_PER_LOOK):
        part = slice(start, start + _BLOCKS_PER_LOOK)
        chosen = (scale[part] >= low) & (scale[part] <= high)
        yield (blocks[part][chosen] & 0x77 != 0).any(-1)


def _count_used(codes: Tensor, scale: Tensor, low: int, high: int) -> int:
    return sum(int(used.sum()) for used in _used(codes, scale, low, high))


def _power_of_two_exponent(weight_scale_2: GlobalScale) -> int:
    if isinstance(weight_scale_2, Divisor):
        weight_scale_2 = weight_scale_2.to_multiplier()
    value, _ = global_scale_value(weight_scale_2)
    mantissa, exponent = math.frexp(value)
    if mantissa != 0.5:
        raise LosslessError(
            f"weight_scale_2 is {value!r}, expected a power of two: only then do power-of-two "
            "block scales stay exact; use joint_weight_scale_2, or dequantize and quantize"
        )
    return exponent - 1


def _check_window(codes: Tensor, scale: Tensor, exponent: int, *, refuse_below: bool) -> None:
    """Refuse used blocks above the window, and those below it if asked."""
    if not scale.numel():
        return
    floor, top = (E8M0_BIAS + exponent + e for e in (FLOOR_EXPONENT, TOP_EXPONENT))
    lowest, highest = (int(byte) for byte in scale.aminmax())
    num_above = _count_used(codes, scale, top + 1, 255) if highest > top else 0
    num_below = _count_used(codes, scale, 0, floor - 1) if lowest < floor and refuse_below else 0
    if not num_above and not num_below:
        return
    low, high = (
        (_extreme_used_byte(codes, scale, largest=largest) or 0) - E8M0_BIAS
        for largest in (False, True)
    )
    if num_above:
        raise LosslessError(
            f"weight_scale_2 is 2^{exponent}, too small: {num_above} of {scale.numel()} "
            f"blocks would saturate; the largest exponent, 2^{high}, needs at least "
            f"2^{high - TOP_EXPONENT} (leave weight_scale_2 out to get that)"
        )
    spread = high - low
    if spread > MAX_SPREAD:
        reason = f"they spread over {spread}, at most {MAX_SPREAD} fit"
    else:
        reason = f"the given weight_scale_2 2^{exponent} is too large for them"
    raise LosslessError(
        f"{num_below} of {scale.numel()} blocks lie below the exact window "
        f"2^{floor - E8M0_BIAS}..2^{top - E8M0_BIAS} (exponents 2^{low}..2^{high}: {reason}); "
        "pass outside='requantize' to encode these blocks again to nearest (lossless_mask "
        "tells which changed)"
    )


def _prepare_outputs(
    out: tuple[Tensor, Tensor] | None, codes: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    scale_shape = (*scale.shape[:-1], 2 * scale.shape[-1])
    if out is None:
        return codes, codes.new_empty(scale_shape).view(torch.float8_e4m3fn)
    specs = (
        ("weight", tuple(codes.shape), torch.uint8),
        ("weight_scale", scale_shape, torch.float8_e4m3fn),
    )
    checked = outputs(out, *specs, codes)
    names = ("out weight", "out weight_scale")
    refuse_overlap(dict(zip(names, checked, strict=True)), {"weight_scale": scale})
    return checked


def _requantize_at_floor(
    codes: Tensor, scale: Tensor, scale_2_exponent: int, lossless: Tensor
) -> None:
    """Encode the lossy blocks of codes again, in place, at the scale 2^-9 they were given.

    Every value of such a block is at most half of 6 * 2^-9, and the finest E4M3 scale has
    the finest grid there, so this is the nearest NVFP4 value. Blocks whose codes could just
    be shifted turn out exact: lossless is set again from the comparison.
    """
    where = (~lossless).flatten().nonzero().flatten()
    old = decode_e2m1(unpack_e2m1(codes.view(-1, _BYTES_PER_BLOCK)[where]))
    # Past 2^-16 everything rounds to zero; the clamp keeps the product from underflowing,
    # which would look exact.
    byte = scale.flatten()[where].int() - scale_2_exponent - FLOOR_EXPONENT
    target = old * e8m0_to_fp32(byte.clamp(min=E8M0_BIAS - 16).to(torch.uint8)).unsqueeze(-1)
    new = encode_e2m1(target)
    codes.view(-1, _BYTES_PER_BLOCK)[where] = pack_e2m1(new)
    lossless.view(-1)[where] = (decode_e2m1(new) == target).all(-1)
