"""The element formats E2M1, E4M3 and E8M0, by integer arithmetic on bit patterns.

Nothing here uses torch's own float8 or float4 casts: their rounding, saturation and NaN
handling changed between releases and differ between devices. Every function is a plain
formula on int32, so it gives the same bytes on every torch version and device.

Sources: OCP Microscaling Formats (MX) v1.0 for E2M1 and E8M0; OCP 8-bit Floating Point
Specification v1.0 for E4M3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

from .errors import CodecError, DtypeError, LosslessError

Rounding = Literal["nearest_even", "ties_to_zero", "ties_away", "toward_zero", "away"]
E8M0Mode = Literal["floor", "ceil", "nearest", "exact"]


@dataclass(frozen=True)
class ElementFormat:
    """A small binary floating-point format with a sign bit and no infinity.

    ``max_code`` is the largest finite magnitude code, ``nan_code`` the magnitude code of
    NaN (None: the format has no NaN).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    nan_code: int | None

    @property
    def sign_bit(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    def value(self, code: int) -> float:
        """The number a code stands for (exact; NaN for the NaN code)."""
        magnitude = code & (self.sign_bit - 1)
        if magnitude == self.nan_code:
            return float("nan")
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude % (1 << self.mantissa_bits)
        if exponent == 0:
            number = mantissa * 2.0 ** (1 - self.bias - self.mantissa_bits)
        else:
            significand = (1 << self.mantissa_bits) + mantissa
            number = significand * 2.0 ** (exponent - self.bias - self.mantissa_bits)
        return -number if code & self.sign_bit else number

    @property
    def max_value(self) -> float:
        return self.value(self.max_code)


E2M1 = ElementFormat("E2M1", 2, 1, bias=1, max_code=0x7, nan_code=None)
E4M3 = ElementFormat("E4M3", 4, 3, bias=7, max_code=0x7E, nan_code=0x7F)

E2M1_MAX = E2M1.max_value  # 6
E4M3_MAX = E4M3.max_value  # 448
E4M3_MIN_NORMAL = 2.0**-6
E4M3_MIN_SUBNORMAL = 2.0**-9


@cache
def _table(fmt: ElementFormat) -> Tensor:
    values = [fmt.value(code) for code in range(2 * fmt.sign_bit)]
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def decode_e2m1(codes: Tensor) -> Tensor:
    """Decode E2M1 codes (uint8 0..15, one per element, any shape) to float32; 8 is -0.0."""
    return _decode(codes, E2M1)


def decode_e4m3(codes: Tensor) -> Tensor:
    """Decode E4M3 bytes (uint8 or float8_e4m3fn, any shape) to float32; 0x7F and 0xFF are NaN."""
    return _decode(as_bytes(codes), E4M3)


def _decode(codes: Tensor, fmt: ElementFormat) -> Tensor:
    if codes.dtype != torch.uint8:
        raise DtypeError(f"{fmt.name} codes are {codes.dtype}, expected torch.uint8")
    return _table(fmt).to(codes.device)[codes.int()]


def encode_e2m1(
    x: Tensor,
    *,
    rounding: Rounding = "nearest_even",
    nan_code: int = 0x7,
    keep_negative_zero: bool = True,
) -> Tensor:
    """Encode float32 to E2M1 codes (uint8 0..15, same shape), saturating at +-6.

    E2M1 has no NaN: a NaN becomes ``nan_code``. A result of magnitude zero keeps the sign
    of the input; with ``keep_negative_zero=False`` an input of -0.0 gives code 0 (a
    negative number that rounds to zero still gives code 8).
    """
    magnitude, negative = _encode_magnitude(x, E2M1, rounding)
    if not keep_negative_zero:
        negative &= x != 0
    codes = magnitude.clamp(max=E2M1.max_code) | (negative.int() << 3)
    return torch.where(x.isnan(), nan_code, codes).to(torch.uint8)


def encode_e4m3(
    x: Tensor,
    *,
    rounding: Rounding = "nearest_even",
    overflow: Literal["saturate", "nan"] = "saturate",
) -> Tensor:
    """Encode float32 to E4M3 bytes (uint8, same shape).

    Magnitudes that round above 448 become 448, or NaN with ``overflow="nan"``. NaN keeps
    its sign: 0x7F or 0xFF.
    """
    if overflow not in ("saturate", "nan"):
        raise CodecError(f"overflow is {overflow!r}, expected 'saturate' or 'nan'")
    magnitude, negative = _encode_magnitude(x, E4M3, rounding)
    too_large = E4M3.max_code if overflow == "saturate" else 0x7F
    magnitude = torch.where(magnitude > E4M3.max_code, too_large, magnitude)
    magnitude = torch.where(x.isnan(), 0x7F, magnitude)
    return (magnitude | (negative.int() << 7)).to(torch.uint8)


def _encode_magnitude(x: Tensor, fmt: ElementFormat, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Round |x| to a magnitude code that may exceed fmt.max_code; also return the sign."""
    if x.dtype != torch.float32:
        raise DtypeError(f"the {fmt.name} encoder takes torch.float32, found {x.dtype}")
    bits = x.contiguous().view(torch.int32)
    negative = bits < 0
    exponent = (bits >> 23) & 0xFF
    significand = (bits & 0x7FFFFF) | ((exponent > 0).int() << 23)
    exponent = exponent.clamp(min=1) - 127  # value = significand * 2^(exponent - 23)
    smallest = 1 - fmt.bias
    target = exponent.clamp(min=smallest)
    # Below 2^smallest the target's grid stops shrinking; past 25 bits all of it is remainder.
    shift = (23 - fmt.mantissa_bits + target - exponent).clamp(max=25)
    kept = significand >> shift
    remainder = significand - (kept << shift)
    half = torch.ones_like(shift) << (shift - 1)
    if rounding == "nearest_even":
        up = (remainder > half) | ((remainder == half) & (kept & 1 == 1))
    elif rounding == "ties_to_zero":
        up = remainder > half
    elif rounding == "ties_away":
        up = remainder >= half
    elif rounding == "away":
        up = remainder > 0
    elif rounding == "toward_zero":
        up = torch.zeros_like(negative)
    else:
        raise CodecError(f"rounding is {rounding!r}, expected one of: {_names(Rounding)}")
    # A normal significand carries its implicit bit, which is exactly one exponent step.
    return ((target - smallest) << fmt.mantissa_bits) + kept + up.int(), negative


def e8m0_to_fp32(scale: Tensor) -> Tensor:
    """Decode E8M0 bytes (uint8 or float8_e8m0fnu) to float32: 2^(byte - 127).

    Byte 0 is 2^-127 (a float32 subnormal), byte 255 is NaN.
    """
    byte = as_bytes(scale).int()
    bits = torch.where(byte == 0, 0x00400000, byte << 23)
    bits = torch.where(byte == 255, 0x7FC00000, bits)
    return bits.to(torch.int32).view(torch.float32)


def fp32_to_e8m0(x: Tensor, mode: E8M0Mode = "exact") -> Tensor:
    """Encode positive float32 to E8M0 bytes (uint8, same shape).

    mode: "floor" and "ceil" round the exponent down or up, "nearest" rounds the value to
    the nearest power of two (a tie goes up), "exact" raises LosslessError unless every x
    is a power of two in range. Values outside 2^-127..2^127 saturate, except in "exact".
    Zero and negative numbers have no E8M0 form: "exact" refuses them, the other modes give
    byte 0. NaN and Inf become 255 (NaN).
    """
    if x.dtype != torch.float32:
        raise DtypeError(f"the E8M0 encoder takes torch.float32, found {x.dtype}")
    bits = x.contiguous().view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    if mode == "exact":
        power = (exponent > 0) & (exponent < 255) & (mantissa == 0) & (bits > 0)
        power |= bits == 0x00400000
        if not bool(power.all()):
            bad = x[~power].flatten()[0].item()
            raise LosslessError(
                f"{bad!r} is no power of two in 2^-127..2^127, so it has no exact E8M0 form "
                f"({int((~power).sum())} of {x.numel()} values); choose mode floor, ceil or "
                "nearest, and requantize the values it scales"
            )
        up = torch.zeros_like(power)
    elif mode == "floor":
        up = torch.zeros_like(bits, dtype=torch.bool)
    elif mode == "ceil":
        # A subnormal up to 2^-127 is byte 0; above it, byte 1.
        up = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    elif mode == "nearest":
        # Subnormals: the tie between 2^-127 and 2^-126 is at 1.5 * 2^-127.
        up = torch.where(exponent == 0, mantissa >= 0x600000, mantissa >= 0x400000)
    else:
        raise CodecError(f"mode is {mode!r}, expected one of: {_names(E8M0Mode)}")
    byte = (exponent + up.int()).clamp(max=254)
    byte = torch.where(bits <= 0, 0, byte)  # zero, and every negative number
    return torch.where(x.isnan() | x.isinf(), 255, byte).to(torch.uint8)


def _names(choices: object) -> str:
    return ", ".join(get_args(choices))


def as_bytes(x: Tensor) -> Tensor:
    """View a one-byte tensor (uint8, int8 or any float8) as uint8; refuse anything else."""
    if x.dtype == torch.uint8:
        return x
    if x.element_size() != 1 or x.dtype == torch.bool:
        raise DtypeError(f"expected a one-byte dtype (uint8 or float8), found {x.dtype}")
    return x.view(torch.uint8)
