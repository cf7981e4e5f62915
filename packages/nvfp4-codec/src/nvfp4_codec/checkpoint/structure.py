"""What a header alone shows to be wrong with a family: absent scales, dtypes, shapes."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import CheckpointError
from .families import Family
from .header import shown


@dataclass(frozen=True, slots=True)
class Problem:
    """A finding's code, what was found and expected, what to do."""

    code: str
    found: str
    expected: str
    fix: str

    def __str__(self) -> str:
        return f"{self.code}: found {self.found}, expected {self.expected}. {self.fix}"


def located(error: Exception, family: Family, advice: str = "") -> CheckpointError:
    """The error with the family's file and tensor in front, and more advice behind."""
    return CheckpointError(
        f"{error}. {advice}" if advice else str(error),
        file=shown(family.weight.file),
        tensor=shown(family.weight.name),
    )


def check_complete(family: Family) -> None:
    """CheckpointError if a scale is absent, or has another dtype or shape than expected."""
    for problem in problems(family):
        raise CheckpointError(
            str(problem), file=shown(family.weight.file), tensor=shown(family.weight.name)
        )


def problems(family: Family) -> list[Problem]:
    """Everything that is wrong with a quantized family's dtypes and shapes."""
    if family.kind == "plain":
        return []
    found: list[Problem] = []
    packed = family.weight.name.endswith("_packed")
    if family.kind == "nvfp4" and family.global_scale is None:
        found.append(
            Problem(
                "missing-weight-scale-2",
                "no global scale beside the weight",
                f"one F32 value named {'weight_global_scale' if packed else 'weight_scale_2'}",
                "Without it every value is off by one factor: take it from the quantizer's output.",
            )
        )
    if family.global_scale is not None and (
        family.global_scale.dtype != "F32" or family.global_scale.nbytes != 4
    ):
        found.append(
            Problem(
                "shape-mismatch",
                f"{shown(family.global_scale.name)} {family.global_scale.dtype} "
                f"{list(family.global_scale.shape)}",
                "one F32 value",
                "NVFP4 has one global scale per tensor: write it again.",
            )
        )
    if family.scale is None:
        found.append(
            Problem(
                "missing-weight-scale",
                "no block scale beside the weight",
                f"shape {list(family.scale_shape or ())}",
                "Take it from the quantizer's output.",
            )
        )
        return found
    return found + _scale_dtype(family, family.scale.dtype) + _scale_shape(family)


def _scale_dtype(family: Family, dtype: str) -> list[Problem]:
    if family.kind == "nvfp4" and dtype != "F8_E4M3":
        return [
            Problem(
                "e8m0-read-as-e4m3" if dtype == "F8_E8M0" else "scale-dtype",
                f"scale dtype {dtype}",
                "F8_E4M3, one per 16 values",
                "If the bytes are E8M0 they are exponents: convert the weight from MXFP4. "
                "If they are E4M3, relabel them.",
            )
        ]
    if family.kind == "mxfp4" and dtype == "F8_E4M3":
        return [
            Problem(
                "e8m0-read-as-e4m3",
                "scale dtype F8_E4M3, one per 32 values, no global scale",
                "F8_E8M0: that is MXFP4",
                "Relabel the scale bytes, do not convert them.",
            )
        ]
    return []


def _scale_shape(family: Family) -> list[Problem]:
    assert family.scale is not None
    expected, found = family.scale_shape or (), family.scale.shape
    if found == expected or (family.kind == "fp8-block" and _squeeze(found) == _squeeze(expected)):
        return []
    if family.kind != "fp8-block" and _is_swizzled(found, expected):
        return [
            Problem(
                "swizzled-scale",
                f"{shown(family.scale.name)} of shape {list(found)}, the padded size of a "
                "128x4-swizzled scale",
                f"linear, shape {list(expected)}",
                "Unswizzle it before it is stored; a checkpoint holds linear scales.",
            )
        ]
    return [
        Problem(
            "shape-mismatch",
            f"{shown(family.scale.name)} of shape {list(found)}",
            f"shape {list(expected)} for a weight of logical shape {list(family.shape)}",
            "Weight and scale belong to different quantizations: write both again.",
        )
    ]


def _squeeze(shape: tuple[int, ...]) -> tuple[int, ...]:
    """One scale per tensor or per row is written with or without its unit dimensions."""
    return tuple(dim for dim in shape if dim != 1)


def _is_swizzled(found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    if len(expected) < 2:
        return False
    padded = (*expected[:-2], -(-expected[-2] // 128) * 128, -(-expected[-1] // 4) * 4)
    count = 1
    for dim in padded:
        count *= dim
    return found == padded or found == (count,)
