"""Which tensors belong together: a weight, its block scales and its global scale.

A family is recognised by name suffix and dtype, never by the file it lies in: scales may
be in another shard than their weight. The names come from the writers in use:

- ModelOpt NVFP4: X.weight U8, X.weight_scale F8_E4M3, X.weight_scale_2
- compressed-tensors NVFP4: X.weight_packed U8, X.weight_scale F8_E4M3, and
  X.weight_global_scale, a divisor
- DeepSeek MXFP4: X.weight I8, X.scale F8_E8M0
- compressed-tensors MXFP4: X.weight_packed U8, X.weight_scale U8
- gpt-oss MXFP4: X_blocks U8 [.., K/32, 16], X_scales U8
- FP8 in blocks, per row or per tensor: X.weight F8_E4M3 and one of X.scale,
  X.weight_scale, X.weight_scale_inv; all three multiply
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from .reader import TensorInfo

Kind = Literal["nvfp4", "mxfp4", "fp8-block", "plain"]

_PACKED: Final = ("U8", "I8", "F4")
_SCALE_DTYPES: Final = ("F8_E4M3", "F8_E8M0", "U8")
_FP8_SCALE_DTYPES: Final = ("F32", "BF16", "F16", "F8_E8M0")
FLOATS: Final = ("F32", "BF16", "F16")

#: weight suffix -> the suffixes its block scale may have, in order of preference
_SUFFIXES: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    (".weight_packed", (".weight_scale",)),
    (".weight", (".weight_scale", ".weight_scale_inv", ".scale", ".scales")),
    ("_blocks", ("_scales",)),
    ("", ("_weight_scale", "_scale_inv", "_weight_scale_inv", "_scale")),
)
_GLOBAL: Final = (("weight_scale_2", False), ("weight_global_scale", True))
_EXTRAS: Final = ("input_scale", "input_global_scale", "weight_shape")

#: Projections that loaders fuse into one matrix, which then has one global scale.
_FUSED: Final = (
    ("w1", "w3"),
    ("gate_proj", "up_proj"),
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
)


@dataclass(frozen=True, slots=True)
class Family:
    """A weight with what is needed to read it.

    shape: the logical shape (unpacked). ``divides``: the global scale is a divisor.
    ``block``: values per scale as (rows, columns); (1, 16) for NVFP4, (1, 32) for MXFP4.
    """

    kind: Kind
    module: str
    shape: tuple[int, ...]
    weight: TensorInfo
    scale: TensorInfo | None = None
    global_scale: TensorInfo | None = None
    divides: bool = False
    extras: tuple[TensorInfo, ...] = ()
    block: tuple[int, int] | None = None

    @property
    def members(self) -> tuple[TensorInfo, ...]:
        """All tensors of the family, the weight first."""
        rest = (self.scale, self.global_scale, *self.extras)
        return (self.weight, *(info for info in rest if info is not None))

    @property
    def nbytes(self) -> int:
        """Bytes of all members."""
        return sum(info.nbytes for info in self.members)

    @property
    def numel(self) -> int:
        """Number of logical values."""
        count = 1
        for dim in self.shape:
            count *= dim
        return count

    @property
    def scale_shape(self) -> tuple[int, ...] | None:
        """The shape a linear block scale must have, None for plain tensors."""
        if self.block is None:
            return None
        rows, columns = self.block
        if self.kind == "fp8-block":
            *lead, n, k = self.shape
            return (*lead, -(-n // rows), -(-k // columns))
        return (*self.shape[:-1], -(-self.shape[-1] // columns))


def find_families(tensors: Mapping[str, TensorInfo]) -> list[Family]:
    """Groups all tensors into families; each tensor is in exactly one. Sorted by module."""
    claimed: set[str] = set()
    families: list[Family] = []
    for weight_suffix, scale_suffixes in _SUFFIXES:
        for name, info in tensors.items():
            if name in claimed or not name.endswith(weight_suffix):
                continue
            module = name[: len(name) - len(weight_suffix)]
            joint = "." if weight_suffix.startswith(".") else "_"
            names = [module + suffix for suffix in scale_suffixes]
            scale = next((tensors[n] for n in names if n in tensors and n != name), None)
            family = _quantized(tensors, module, info, scale, joint)
            if family is not None:
                families.append(family)
                claimed.update(member.name for member in family.members)
    for name, info in tensors.items():
        if name not in claimed:
            module = name.removesuffix(".weight")
            families.append(Family("plain", module, info.shape, info))
    return sorted(families, key=lambda family: natural_key(family.weight.name))


def _quantized(
    tensors: Mapping[str, TensorInfo],
    module: str,
    weight: TensorInfo,
    scale: TensorInfo | None,
    joint: str,
) -> Family | None:
    """The family of a quantized weight; None if it is not one."""
    if not weight.shape:
        return None
    extras = tuple(tensors[n] for n in (module + joint + e for e in _EXTRAS) if n in tensors)
    found = [(tensors.get(f"{module}{joint}{suffix}"), divides) for suffix, divides in _GLOBAL]
    global_scale, divides = next(((t, d) for t, d in found if t is not None), (None, False))
    if weight.dtype == "F8_E4M3" and len(weight.shape) >= 2:
        if scale is None or scale.dtype not in _FP8_SCALE_DTYPES:
            return None
        block = fp8_block(weight.shape, scale.shape)
        return Family("fp8-block", module, weight.shape, weight, scale, None, False, extras, block)
    if weight.dtype not in _PACKED:
        return None
    if scale is None and global_scale is None:
        return None
    if scale is not None and scale.dtype not in _SCALE_DTYPES:
        return None
    shape = logical_shape(weight)
    kind = _packed_kind(shape, scale, global_scale)
    return Family(
        kind, module, shape, weight, scale, global_scale, divides, extras,
        (1, 16) if kind == "nvfp4" else (1, 32),
    )  # fmt: skip


def _packed_kind(
    shape: tuple[int, ...], scale: TensorInfo | None, global_scale: TensorInfo | None
) -> Kind:
    """E8M0 per 32 or E4M3 per 16: the dtype decides, the number of scales where it cannot."""
    if global_scale is not None or scale is None:
        return "nvfp4"
    per_32 = scale.shape == (*shape[:-1], -(-shape[-1] // 32))
    if scale.dtype == "F8_E8M0":
        return "mxfp4"
    return "mxfp4" if per_32 and shape[-1] > 16 else "nvfp4"


def logical_shape(weight: TensorInfo) -> tuple[int, ...]:
    """The unpacked shape of E2M1 codes; gpt-oss splits K into blocks of 16 bytes."""
    if weight.dtype == "F4" or not weight.shape:
        return weight.shape
    if weight.name.endswith("_blocks") and len(weight.shape) >= 3:
        return (*weight.shape[:-2], 2 * weight.shape[-2] * weight.shape[-1])
    return (*weight.shape[:-1], 2 * weight.shape[-1])


def fp8_block(weight: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, int]:
    """The block that a scale's shape implies: one per tensor, per row, 128x128, or the tightest.

    A shape that fits nothing gives (128, 128); the caller compares shapes and reports.
    """
    n, k = weight[-2:]
    scale = scale[len(weight) - 2 :] if len(scale) == len(weight) else scale
    count = 1
    for dim in scale:
        count *= dim
    if count == 1:
        return max(n, 1), max(k, 1)
    if scale in ((n,), (n, 1)):
        return 1, max(k, 1)
    if len(scale) != 2 or 0 in scale or scale == (-(-n // 128), -(-k // 128)):
        return 128, 128
    rows, columns = (max(-(-size // blocks), 1) for size, blocks in zip((n, k), scale, strict=True))
    rounded = (_power_of_two(rows), _power_of_two(columns))
    for block in (rounded, (rows, columns)):
        if (-(-n // block[0]), -(-k // block[1])) == scale:
            return block
    return 128, 128


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def fused_group(module: str) -> tuple[str, str] | None:
    """(parent, group) of a projection that loaders fuse with siblings, else None."""
    parent, _, last = module.rpartition(".")
    for group in _FUSED:
        if last in group:
            return parent, "/".join(group)
    return None


def fused_groups(families: Iterable[Family]) -> list[list[Family]]:
    """Families that share one global scale once fused: lists of two or more."""
    groups: dict[tuple[str, str], list[Family]] = {}
    for family in families:
        key = fused_group(family.module)
        if key is not None:
            groups.setdefault(key, []).append(family)
    return [group for group in groups.values() if len(group) > 1]


_DIGITS = re.compile(r"([0-9]+)")


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Sorts layer 2 before layer 10."""
    parts = _DIGITS.split(name)
    # by length, then digits: int() refuses thousands of digits
    numbers = (part.lstrip("0") if i % 2 else part for i, part in enumerate(parts))
    return tuple((len(p) if i % 2 else -1, p) for i, p in enumerate(numbers))


def pattern(module: str) -> str:
    """The module with every number replaced by ``*``: the row it belongs to in a table."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))
