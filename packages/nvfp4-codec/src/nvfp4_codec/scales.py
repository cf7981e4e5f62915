"""How scales follow from magnitudes: one profile per library whose bytes we can reproduce.

Libraries that all write "NVFP4" differ in the order of their float32 operations, in the
scale of an all-zero block, in the smallest scale and in what becomes of -0.0. A profile
fixes these choices; ``docs/formats.md`` has them side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from .errors import CodecError
from .formats import E2M1_MAX, E4M3_MAX, E4M3_MIN_SUBNORMAL, decode_e4m3, encode_e2m1, encode_e4m3
from .tensors import Divisor, GlobalScale

BLOCK_SIZE = 16
AMAX_PER_SCALE = E2M1_MAX * E4M3_MAX  # 2688: the largest |value| at weight_scale_2 = 1


@dataclass(frozen=True)
class Profile:
    """The arithmetic of one NVFP4 quantizer; this base class is ModelOpt's dynamic path.

    All methods work in float32 and round after every operation, in the order written.
    """

    name: str
    zero_block_scale: float
    """Scale of a block whose amax is zero, before clamping to [min_scale, 448]."""
    min_scale: float
    keep_negative_zero: bool

    def global_scale(self, amax: Tensor) -> GlobalScale:
        """The tensor's global scale from its amax (0-dim, in the dtype of the input)."""
        return amax.float() / AMAX_PER_SCALE

    def typed_scale(self, value: Tensor) -> GlobalScale:
        """Give a global scale's float32 value the direction this profile uses."""
        return value

    def block_scale(self, block_amax: Tensor, global_scale: GlobalScale) -> Tensor:
        """E4M3 scale bytes (uint8) of blocks with these float32 amax values."""
        scale = block_amax / (E2M1_MAX * multiplier(global_scale))
        scale = torch.where(block_amax == 0, self.zero_block_scale, scale)
        return encode_e4m3(scale.clamp(self.min_scale, E4M3_MAX))

    def normalize(self, blocks: Tensor, scale: Tensor, global_scale: GlobalScale) -> Tensor:
        """Scale float32 blocks ``[..., 16]`` to E2M1's range by their scale bytes ``[...]``."""
        return blocks / (decode_e4m3(scale) * multiplier(global_scale)).unsqueeze(-1)

    def encode(self, normalized: Tensor) -> Tensor:
        """E2M1 codes of normalized values."""
        return encode_e2m1(normalized, keep_negative_zero=self.keep_negative_zero)


def multiplier(global_scale: GlobalScale) -> Tensor:
    """The float32 multiplier of a global scale."""
    return global_scale.to_multiplier() if isinstance(global_scale, Divisor) else global_scale


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            Profile("modelopt", 1.0, E4M3_MIN_SUBNORMAL, keep_negative_zero=False),
            Profile("ieee", 0.0, E4M3_MIN_SUBNORMAL, keep_negative_zero=True),
        )
    }
)


def get_profile(name: str) -> Profile:
    """Look a profile up by name; CodecError lists the names there are."""
    try:
        return PROFILES[name]
    except KeyError:
        known = ", ".join(PROFILES)
        raise CodecError(f"profile is {name!r}, expected one of: {known}") from None
