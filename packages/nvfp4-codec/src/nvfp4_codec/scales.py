"""How scales follow from magnitudes: one profile per library whose bytes we can reproduce.

Libraries that all write "NVFP4" differ in the order of their float32 operations, in the
scale of an all-zero block, in the smallest scale and in what becomes of -0.0. A profile
fixes these choices; ``docs/formats.md`` has them side by side. The scales of MXFP4 and of
FP8 blocks are plain functions at the end.

Every operation here is one IEEE rounding. Constants are tensors on the operands' device
(``_constant``), because torch on CUDA turns a division by a Python number, or by a CPU
scalar, into a multiplication by its reciprocal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from .errors import CodecError
from .formats import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_MIN_NORMAL,
    E4M3_MIN_SUBNORMAL,
    decode_e4m3,
    e8m0_to_fp32,
    encode_e2m1,
    encode_e4m3,
    fp32_to_e8m0,
)
from .tensors import Divisor, GlobalScale

MXScaleMode = Literal["floor", "ceil", "rceil", "even"]

BLOCK_SIZE = 16
MX_BLOCK_SIZE = 32
AMAX_PER_SCALE = E2M1_MAX * E4M3_MAX  # 2688: the largest |value| at weight_scale_2 = 1


@dataclass(frozen=True)
class Profile:
    """The arithmetic of one NVFP4 quantizer: four steps, each of which a subclass may replace.

    The base class is ModelOpt's dynamic path. Steps get amax values in the input's dtype
    and work in float32, rounding after every operation, in the order written.
    """

    name: str
    zero_block_scale: float = 1.0
    """Scale, before clamping, of a block whose scale is zero."""
    min_scale: float = E4M3_MIN_SUBNORMAL
    keep_negative_zero: bool = False
    nan_code: int = 0x7
    """Code of 0 / 0: a zero in a block whose decoded scale underflows float32."""

    def global_scale(self, amax: Tensor) -> GlobalScale:
        """The tensor's global scale from its amax (0-dim, in the dtype of the input)."""
        return amax.float() / _constant(AMAX_PER_SCALE, amax)

    def typed_scale(self, value: Tensor) -> GlobalScale:
        """Give a global scale's float32 value the direction this profile uses."""
        return value

    def for_amax(self, amax: Tensor) -> Profile:
        """This profile for one tensor, whose global scale was derived from this amax."""
        return self

    def block_scale(self, block_amax: Tensor, global_scale: GlobalScale) -> Tensor:
        """E4M3 scale bytes (uint8) of blocks with these amax values (in the input's dtype)."""
        scale_2 = multiplier(global_scale)
        scale = block_amax.float() / (_constant(E2M1_MAX, scale_2) * scale_2)
        scale = torch.where(scale == 0, self.zero_block_scale, scale)
        return encode_e4m3(scale.clamp(self.min_scale, E4M3_MAX))

    def normalize(self, blocks: Tensor, scale: Tensor, global_scale: GlobalScale) -> Tensor:
        """Scale float32 blocks ``[..., 16]`` to E2M1's range by their scale bytes ``[...]``."""
        return blocks / (decode_e4m3(scale) * multiplier(global_scale)).unsqueeze(-1)

    def encode(self, normalized: Tensor) -> Tensor:
        """E2M1 codes of normalized values."""
        return encode_e2m1(
            normalized, nan_code=self.nan_code, keep_negative_zero=self.keep_negative_zero
        )


@dataclass(frozen=True)
class ModelOptStatic(Profile):
    """ModelOpt with calibrated amax: block scales relative to the tensor's amax.

    ModelOpt keeps the amax beside weight_scale_2. When only weight_scale_2 is given, the
    amax is recovered from it: exactly if it was a number of the input's dtype (bfloat16 or
    float16), within one float32 ulp otherwise.
    """

    amax: float | None = None

    def for_amax(self, amax: Tensor) -> Profile:
        return replace(self, amax=float(amax))

    def block_scale(self, block_amax: Tensor, global_scale: GlobalScale) -> Tensor:
        six = _constant(E2M1_MAX, block_amax)
        if self.amax is None:
            amax = _recover_amax(multiplier(global_scale), block_amax.dtype)
        else:
            amax = _constant(self.amax, block_amax)
        scale = block_amax.float() / six
        scale = torch.where(scale == 0, self.zero_block_scale, scale)
        scale = scale * _constant(E4M3_MAX, block_amax) / (amax / six)
        return encode_e4m3(scale.clamp(self.min_scale, E4M3_MAX))


@dataclass(frozen=True)
class CompressedTensors(Profile):
    """compressed-tensors: a divisor, computed like ``block_amax / 6`` in the input's dtype.

    ``2688 / amax`` is 2688 times a reciprocal that was rounded to that dtype first. Where it
    overflows the library takes 1, which in float16 is every amax below 0.041.
    """

    def global_scale(self, amax: Tensor) -> GlobalScale:
        inverse = (1 / amax.clamp(min=torch.finfo(amax.dtype).tiny).float()).to(amax.dtype)
        quotient = (inverse.float() * AMAX_PER_SCALE).to(amax.dtype).float()
        return Divisor(torch.where(quotient.isinf(), 1.0, quotient))

    def typed_scale(self, value: Tensor) -> GlobalScale:
        return Divisor(value)

    def block_scale(self, block_amax: Tensor, global_scale: GlobalScale) -> Tensor:
        scale = (block_amax.float() / _constant(E2M1_MAX, block_amax)).to(block_amax.dtype)
        byte = encode_e4m3((_value(global_scale) * scale.float()).clamp(max=E4M3_MAX))
        zero_block_byte = encode_e4m3(_constant(self.zero_block_scale, block_amax))
        return torch.where(byte == 0, zero_block_byte, byte)

    def normalize(self, blocks: Tensor, scale: Tensor, global_scale: GlobalScale) -> Tensor:
        return blocks / (decode_e4m3(scale) / _value(global_scale)).unsqueeze(-1)


@dataclass(frozen=True)
class TorchAO(Profile):
    """torchao: block scales kept normal (>= 2^-6), values multiplied by a reciprocal.

    Below weight_scale_2 = 2^-122 that reciprocal can overflow, and torchao's code for a
    zero is then whatever its encoder makes of NaN on the machine; ours is 0.
    """

    def block_scale(self, block_amax: Tensor, global_scale: GlobalScale) -> Tensor:
        scale = block_amax.float() / _constant(E2M1_MAX, block_amax)
        return encode_e4m3((scale / multiplier(global_scale)).clamp(self.min_scale, E4M3_MAX))

    def normalize(self, blocks: Tensor, scale: Tensor, global_scale: GlobalScale) -> Tensor:
        inverse = multiplier(global_scale).reciprocal() / decode_e4m3(scale)
        return blocks * inverse.unsqueeze(-1)


@dataclass(frozen=True)
class TransformerEngine(Profile):
    """TransformerEngine's Python reference (1x16 tiles, no Hadamard transform).

    TransformerEngine stores the amax; the global scale here is its encode scale, a divisor.
    """

    def global_scale(self, amax: Tensor) -> GlobalScale:
        return Divisor(_finite(_constant(AMAX_PER_SCALE, amax) / amax.float()))

    def typed_scale(self, value: Tensor) -> GlobalScale:
        return Divisor(value)

    def block_scale(self, block_amax: Tensor, global_scale: GlobalScale) -> Tensor:
        factor = _value(global_scale) * _constant(E2M1_MAX, block_amax).reciprocal()
        return encode_e4m3((block_amax.float() * factor).clamp(max=E4M3_MAX))

    def normalize(self, blocks: Tensor, scale: Tensor, global_scale: GlobalScale) -> Tensor:
        decoded = decode_e4m3(scale) * multiplier(global_scale)
        return blocks * _finite(decoded.reciprocal()).unsqueeze(-1)


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            Profile("modelopt"),
            ModelOptStatic("modelopt-static"),
            CompressedTensors("compressed-tensors", zero_block_scale=0.125, min_scale=0.0),
            TorchAO("torchao", min_scale=E4M3_MIN_NORMAL, keep_negative_zero=True, nan_code=0),
            TransformerEngine("te", zero_block_scale=0.0, min_scale=0.0),
            Profile("ieee", zero_block_scale=0.0, keep_negative_zero=True),
        )
    }
)


def get_profile(name: str) -> Profile:
    """Look a profile up by name; CodecError lists the names there are."""
    try:
        return PROFILES[name]
    except (KeyError, TypeError):
        known = ", ".join(PROFILES)
        raise CodecError(f"profile is {name!r}, expected one of: {known}") from None


PARAMETRIC_PROFILES = frozenset(
    name for name, profile in PROFILES.items() if type(profile) is Profile
)
"""Profiles that differ from ModelOpt's dynamic path in numbers only: fast kernels take those."""


def require_parametric(profile: Profile, backend: str) -> None:
    """Refuse a profile whose steps a kernel with ModelOpt's arithmetic does not follow."""
    if type(profile) is not Profile or profile.nan_code != 0x7:
        raise CodecError(
            f"profile {profile.name!r} has arithmetic of its own, the {backend} backend implements "
            f"{', '.join(sorted(PARAMETRIC_PROFILES))}; use backend='reference'"
        )


def multiplier(global_scale: GlobalScale) -> Tensor:
    """The float32 multiplier of a global scale."""
    return global_scale.to_multiplier() if isinstance(global_scale, Divisor) else global_scale


def mx_rounds_up_from(mode: MXScaleMode) -> int:
    """The least 23-bit mantissa of an amax for which the mode takes the larger scale."""
    try:
        return _MX_ROUNDS_UP_FROM[mode]
    except KeyError:
        known = ", ".join(_MX_ROUNDS_UP_FROM)
        raise CodecError(f"scale_mode is {mode!r}, expected one of: {known}") from None


_MX_ROUNDS_UP_FROM = {"floor": 0x800000, "ceil": 0x000001, "rceil": 0x400001, "even": 0x600000}


def mx_block_scale(block_amax: Tensor, mode: MXScaleMode) -> Tensor:
    """E8M0 scale bytes (uint8) of MXFP4 blocks with these float32 amax values.

    With amax = m * 2^e, 1 <= m < 2, the scale is 2^(e - 2), since 2^2 is E2M1's largest
    power of two, or twice that: "ceil" if m > 1, "rceil" if m > 1.5 (amax > 6 * scale),
    "even" if m >= 1.75 (rounding m to E2M1's one mantissa bit carries), "floor" never.
    Byte 0 is the smallest; blocks of zeros have it.

    Source: OCP MX v1.0 section 6.3 for "floor"; the others as in torchao.
    """
    bits = block_amax.float().contiguous().view(torch.int32)
    up = (bits & 0x7FFFFF) >= mx_rounds_up_from(mode)
    return ((bits >> 23) - 2 + up.int()).clamp(min=0).to(torch.uint8)


def fp8_block_scale(block_amax: Tensor, ue8m0: bool) -> Tensor:
    """Float32 scales of E4M3 blocks: amax / 448; with ue8m0, the next power of two from there.

    A quotient of zero (a block of zeros, or an amax below 448 * 2^-150) gives scale one.
    """
    scale = block_amax.float() / _constant(E4M3_MAX, block_amax)
    scale = torch.where(scale == 0, 1.0, scale)
    return e8m0_to_fp32(fp32_to_e8m0(scale, "ceil")) if ue8m0 else scale


def _constant(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _value(global_scale: GlobalScale) -> Tensor:
    return global_scale.value if isinstance(global_scale, Divisor) else global_scale


def _recover_amax(weight_scale_2: Tensor, dtype: torch.dtype) -> Tensor:
    divisor = _constant(AMAX_PER_SCALE, weight_scale_2)
    amax = _finite(weight_scale_2 * divisor)  # an infinite amax would make NaN scales
    rounded = _finite(amax.to(dtype).float())
    return torch.where(rounded / divisor == weight_scale_2, rounded, amax)


def _finite(x: Tensor) -> Tensor:
    return x.clamp(max=torch.finfo(torch.float32).max)
