"""Find what is wrong with a quantized checkpoint, each fault by name.

Some faults are certain from a header or a byte. Others only leave a statistical trace; a
finding says how sure it is. Two cannot be seen at all without a reference: nibbles swapped
in every tensor alike, or in one that is not fused with others, and a factor common to all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal

import numpy as np

from . import heuristics
from .contrast import can_contrast, contrast
from .families import Family, find_families, fused_group, fused_groups
from .header import shown
from .loose import loose_problems
from .reader import Bytes, Checkpoint
from .structure import problems
from .writer import Advance, no_advance

Confidence = Literal["certain", "high", "medium", "low"]

_CHUNK: Final = 1 << 26
_RUNS: Final = 16  # of a weight that is not read as a whole
_ONE_E4M3, _ONE_E8M0 = 0x38, 127
#: Of MXFP4 weights; rows of very different size pass 1e4 and are no fault by themselves.
_LARGEST_MXFP4: Final = 1e6
_ZEROS: Final = 1000  # one zero scale in so many blocks is no fault


@dataclass(frozen=True)
class Finding:
    """One fault: what was found where, what was expected, what to do, and how sure it is."""

    code: str
    tensor: str
    file: str
    found: str
    expected: str
    fix: str
    confidence: Confidence = "certain"

    def to_json(self) -> dict[str, str]:
        """The fields as a JSON object."""
        return asdict(self)


def verify_checkpoint(
    source: Checkpoint, reference: Checkpoint | None = None, *, advance: Advance = no_advance
) -> list[Finding]:
    """All findings, by tensor. ``reference``: the checkpoint this one was made from, by value.

    Reads every tensor once, one at a time. Raises CheckpointError if a file cannot be read.
    """
    families = find_families(source.tensors)
    findings: list[Finding] = []
    for family in families:
        findings += verify_family(source, family)
        advance(family.nbytes)
    findings += [
        _finding(family, p.code, p.found, p.expected, p.fix)
        for family, p in loose_problems(families)
    ]
    for group in fused_groups(family for family in families if not problems(family)):
        findings += verify_fused(source, group, findings)
    if reference is not None:
        from .against import compare_with_reference, merged

        compared = compare_with_reference(source, families, reference, findings)
        findings = merged(findings, compared)
    return findings


def verify_family(source: Checkpoint, family: Family, limit: int | None = None) -> list[Finding]:
    """What is wrong with one weight by itself; reads each of its tensors once.

    ``limit``: bytes of FP8 and plain values to look at, spread evenly; None is all of them.
    """
    structural = [_finding(family, p.code, p.found, p.expected, p.fix) for p in problems(family)]
    if family.kind == "plain":
        return structural + _plain(source, family, limit)
    if family.kind == "fp8-block":
        return structural or _fp8(source, family, limit)
    findings = structural
    # a scale of another dtype or shape tells nothing more by its bytes
    codes = {problem.code for problem in structural}
    raw = None if family.scale is None else source.read(family.scale.name)
    if raw is not None and not codes - {"missing-weight-scale-2"}:
        findings = findings + _block_scales(source, family, raw)
    if family.global_scale is not None and "shape-mismatch" not in codes:
        findings = findings + verify_global_scale(source, family, raw)
    return findings


def verify_fused(
    source: Checkpoint, group: Sequence[Family], known: Iterable[Finding] = ()
) -> list[Finding]:
    """What is wrong between sound weights that a loader fuses: global scales, then columns.

    ``known``: findings already made; a global scale that is one of them is not compared.
    """
    findings = verify_fused_scales(source, group, known)
    if sum(family.kind == "nvfp4" and family.global_scale is not None for family in group) > 1:
        findings += _swapped(source, group)
    return findings


def _finding(
    family: Family,
    code: str,
    found: str,
    expected: str,
    fix: str,
    confidence: Confidence = "certain",
) -> Finding:
    return Finding(
        code, shown(family.weight.name), shown(family.weight.file), found, expected, fix, confidence
    )


def _plain(source: Checkpoint, family: Family, limit: int | None) -> list[Finding]:
    """NaN and Inf in float tensors."""
    masks: dict[str, tuple[type[np.unsignedinteger], int]] = {
        "BF16": (np.uint16, 0x7F80),
        "F16": (np.uint16, 0x7C00),
        "F32": (np.uint32, 0x7F800000),
        "F64": (np.uint64, 0x7FF0000000000000),
    }
    if family.weight.dtype not in masks:
        return []
    dtype, mask = masks[family.weight.dtype]
    bad = seen = 0
    for chunk in _chunks(source, family.weight.name, family.weight.nbytes, limit):
        exponent = chunk.view(dtype) & dtype(mask)
        bad += int((exponent == dtype(mask)).sum())
        seen += exponent.size
    if not bad:
        return []
    return [
        _finding(
            family,
            "nonfinite-weight",
            f"{bad} of {seen} values are NaN or Inf",
            "finite values",
            "Fetch the file again; if it is so at the source, the model is damaged.",
        )
    ]


def _chunks(
    source: Checkpoint, name: str, nbytes: int, limit: int | None = None
) -> Iterable[Bytes]:
    """All bytes of a tensor, or ``limit`` of them in runs from its start to its end."""
    if limit is None or nbytes <= limit:
        places = [(start, min(_CHUNK, nbytes - start)) for start in range(0, nbytes, _CHUNK)]
    else:
        size = max(limit // _RUNS // 8 * 8, 8)  # a multiple of every dtype's size
        places = [(i * (nbytes - size) // (_RUNS - 1) // 8 * 8, size) for i in range(_RUNS)]
    for start, size in places:
        chunk: Bytes = np.empty(size, dtype=np.uint8)
        source.read_into(name, chunk, start)
        yield chunk


def _fp8(source: Checkpoint, family: Family, limit: int | None) -> list[Finding]:
    assert family.scale is not None
    findings: list[Finding] = []
    nans = seen = 0
    for chunk in _chunks(source, family.weight.name, family.weight.nbytes, limit):
        nans += int(((chunk & 0x7F) == 0x7F).sum())
        seen += chunk.size
    if nans:
        findings.append(
            _finding(
                family,
                "nonfinite-weight",
                f"{nans} of {seen} E4M3 bytes are NaN",
                "finite values",
                "A cast overflowed: quantize the weight again, saturating.",
            )
        )
    raw = source.read(family.scale.name)
    if family.scale.dtype == "F8_E8M0":
        return findings + _e8m0_bytes(source, family, raw)
    scales = heuristics.float_values(raw, family.scale.dtype)
    bad = int((~(np.isfinite(scales) & (scales > 0))).sum())
    if bad:
        findings.append(
            _finding(
                family,
                "nan-scale" if np.isnan(scales).any() else "bad-scale",
                f"{bad} of {scales.size} scales are not positive and finite",
                "positive finite scales",
                "Quantize the weight again.",
            )
        )
    elif scales.size > 1 and (scales == 1).all():
        findings.append(_all_ones(family, scales.size, "medium"))
    elif scales.size:
        findings += _implausible(source, family, float(scales.max()), scales)
    return findings


def _implausible(
    source: Checkpoint, family: Family, scale: float, scales: heuristics.Floats | None = None
) -> list[Finding]:
    """A largest block scale that makes weights of no network, larger than any or next to zero.

    ``scales``: all of them where they are floats; E8M0 bytes read as E4M3 give too large ones.
    """
    code, limit = (
        (448, heuristics.LARGEST_WEIGHT) if family.kind == "fp8-block" else (6, _LARGEST_MXFP4)
    )
    largest = code * scale
    too_large = largest > limit
    # codes of zero mean zero under any scale
    if not too_large and (
        largest >= heuristics.SMALLEST_WEIGHT or not _has_nonzero_code(source, family)
    ):
        return []
    misread = (
        too_large and scales is not None and bool(np.isin(scales, heuristics.e4m3_table()).all())
    )
    return [
        _finding(
            family,
            "e8m0-read-as-e4m3" if misread else "bad-scale",
            f"block scales up to {scale:g}, which make weights of up to {largest:.3g}",
            f"scales near amax / {code}",
            "The values are those of E8M0 bytes read as E4M3: a byte b means 2^(b - 127)."
            if misread
            else "The scales are damaged or of another convention: quantize the weight again.",
            "high",
        )
    ]


def _all_ones(family: Family, count: int, confidence: Confidence) -> Finding:
    return _finding(
        family,
        "scales-all-ones",
        f"all {count} block scales are exactly 1.0",
        "scales that follow the weight's magnitude",
        "The real scales were lost, as when a loader fills absent ones: take them from the "
        "quantizer's output.",
        confidence,
    )


def _block_scales(source: Checkpoint, family: Family, raw: Bytes) -> list[Finding]:
    if not raw.size:
        return []
    if family.kind == "mxfp4":
        return _e8m0_bytes(source, family, raw)
    findings: list[Finding] = []
    counts = np.bincount(raw, minlength=256)
    nans = int(counts[0x7F] + counts[0xFF])
    if nans:
        findings.append(
            _finding(
                family,
                "nan-scale",
                f"{nans} of {raw.size} scale bytes are NaN (0x7F or 0xFF)",
                "finite E4M3 scales",
                "An all-zero block was rescaled past 448, or E8M0 bytes were stored: quantize "
                "again, clamping to 448.",
            )
        )
    negative = int(counts[0x80:0xFF].sum())
    if negative:
        findings.append(
            _finding(
                family,
                "negative-scale",
                f"{negative} of {raw.size} scale bytes have the sign bit set",
                "scales >= 0",
                "The bytes are no E4M3 magnitudes, or the file is damaged: write them again.",
            )
        )
    if raw.size > 1 and counts[_ONE_E4M3] == raw.size and _has_nonzero_code(source, family):
        findings.append(_all_ones(family, raw.size, "high" if raw.size >= 16 else "medium"))
    findings += _zeros(source, family, raw, int(counts[0]))
    if not findings:
        alone = fused_group(family.module) is None
        look = heuristics.looks_like_e8m0(raw, counts, own_range=alone)
        if look is not None:
            findings.append(
                _finding(
                    family,
                    "e8m0-read-as-e4m3",
                    look[0],
                    "E4M3 bytes, which differ from block to block in their mantissa",
                    "The bytes look like E8M0 exponents stored as F8_E4M3: convert the weight from "
                    "MXFP4 instead of relabelling it.",
                    "medium" if look[1] else "low",
                )
            )
        else:
            findings += _swizzled(family, raw)
    return findings


def _zeros(source: Checkpoint, family: Family, raw: Bytes, count: int) -> list[Finding]:
    """Scales of zero over codes that are not; a few come of rounding and lose next to nothing."""
    if count * _ZEROS <= raw.size or family.shape[-1] % 16:
        return []
    lost = done = 0
    for chunk in _chunks(source, family.weight.name, family.weight.nbytes):
        codes = (chunk.reshape(-1, 8) & 0x77).any(axis=1)
        lost += int((codes & (raw[done : done + codes.size] == 0)).sum())
        done += codes.size
    if lost * _ZEROS <= raw.size:
        return []
    return [
        _finding(
            family,
            "zero-scale",
            f"{lost} of {raw.size} block scales are 0 over codes that are not",
            "scales that follow the weight's magnitude",
            "The real scales were lost: take them from the quantizer's output.",
        )
    ]


def _swizzled(family: Family, raw: Bytes) -> list[Finding]:
    assert family.scale_shape is not None
    rows, columns = (1, *family.scale_shape)[-2:]
    verdict = heuristics.swizzle_evidence(raw.reshape(-1, rows, columns))
    if verdict is None:
        return []
    return [
        _finding(
            family,
            "swizzled-scale",
            f"rows or columns of scales agree {verdict:.1f} times better after a 128x4 unswizzle",
            "linear scales, one row of them per row of the weight",
            "Unswizzle the scale before it is stored; a checkpoint holds linear scales.",
            "high" if verdict > 3 else "medium",
        )
    ]


def _e8m0_bytes(source: Checkpoint, family: Family, raw: Bytes) -> list[Finding]:
    counts = np.bincount(raw, minlength=256)
    if counts[255]:
        return [
            _finding(
                family,
                "nan-scale",
                f"{int(counts[255])} of {raw.size} E8M0 bytes are 255, which is NaN",
                "0..254",
                "The bytes are no exponents, or the weight had NaN: quantize it again.",
            )
        ]
    if (
        raw.size > 1
        and counts[_ONE_E8M0] == raw.size
        and (family.kind == "fp8-block" or _has_nonzero_code(source, family))
    ):
        return [_all_ones(family, raw.size, "medium")]
    spread = heuristics.exponent_spread(counts)
    if family.kind == "mxfp4" and spread > heuristics.LARGEST_SPREAD:
        return [
            _finding(
                family,
                "e4m3-read-as-e8m0",
                f"the middle 98 % of the exponents spread over {spread}",
                f"at most {heuristics.LARGEST_SPREAD} within one weight",
                "The bytes look like E4M3 scales stored as E8M0: relabel them.",
                "medium",
            )
        ]
    return _implausible(source, family, 2.0 ** (int(raw.max()) - 127)) if raw.size else []


def _has_nonzero_code(source: Checkpoint, family: Family) -> bool:
    """Whether a value is not 0 or -0; ends at the first chunk that has one."""
    magnitude = 0x7F if family.kind == "fp8-block" else 0x77
    return any(
        bool((chunk & magnitude).any())
        for chunk in _chunks(source, family.weight.name, family.weight.nbytes)
    )


def global_value(source: Checkpoint, family: Family) -> float:
    """The stored global scale, whichever direction it has."""
    assert family.global_scale is not None
    return float(source.read(family.global_scale.name).view(np.float32)[0])


def verify_global_scale(
    source: Checkpoint, family: Family, raw: Bytes | None = None
) -> list[Finding]:
    """What is wrong with a global scale; more of it shows with the block scales' bytes ``raw``."""
    value = global_value(source, family)
    name = "weight_global_scale" if family.divides else "weight_scale_2"
    if not (np.isfinite(value) and value > 0):
        return [
            _finding(
                family,
                "bad-global-scale",
                f"{name} is {value:g}",
                "a positive finite number",
                "The tensor was all zero or not calibrated: quantize it again.",
            )
        ]
    if raw is None or family.scale is None or family.scale.dtype != "F8_E4M3":
        return []
    largest = heuristics.largest_e4m3(raw)
    multiplier = 1 / value if family.divides else value
    implied, inverted = 6 * largest * multiplier, 6 * largest / multiplier
    if largest > 0 and implied < heuristics.SMALLEST_WEIGHT:
        return [
            _finding(
                family,
                "bad-global-scale",
                f"{name} {value:g} makes the largest weight {implied:.3g}",
                "a value near amax / 2688",
                "The bytes are damaged or of another dtype: take it from the quantizer's output.",
                "high",
            )
        ]
    if implied > heuristics.LARGEST_WEIGHT and inverted < heuristics.LARGEST_WEIGHT:
        return [
            _finding(
                family,
                "reciprocal-global-scale",
                f"{name} {value:g} makes the largest weight {implied:.3g}",
                f"about {1 / value:.6g}, which makes it {inverted:.3g}",
                "It is the reciprocal: compressed-tensors' weight_global_scale divides, "
                "weight_scale_2 multiplies. Store 1 / value, or use the other name.",
                "high",
            )
        ]
    if value == 1.0 and largest == 448.0 and (raw != raw[0]).any():
        return [
            _finding(
                family,
                "weight-scale-2-is-one",
                f"{name} is exactly 1 while block scales reach 448: weights up to 2688",
                "a value near amax / 2688",
                "The real one was lost, as when a loader fills an absent one: take it from the "
                "quantizer's output.",
                "high",
            )
        ]
    return []


def verify_fused_scales(
    source: Checkpoint, group: Sequence[Family], known: Iterable[Finding] = ()
) -> list[Finding]:
    """The finding that weights which a loader fuses have different global scales."""
    odd = {f.tensor for f in known if f.code in ("bad-global-scale", "reciprocal-global-scale")}
    sound = [
        family
        for family in group
        if family.kind == "nvfp4"
        and family.global_scale is not None
        and shown(family.weight.name) not in odd
    ]
    values = {family.module: global_value(source, family) for family in sound}
    if len(set(values.values())) < 2:
        return []
    listed = ", ".join(f"{shown(f.module)}: {values[f.module]:g}" for f in sound)
    return [
        _finding(
            sound[0],
            "fused-scale-mismatch",
            listed,
            "one value: loaders fuse these projections and keep a single weight_scale_2",
            "Rescale the block scales to the larger value (unify_weight_scale_2), or quantize "
            "again with `nvfp4 quantize`.",
        )
    ]


def _swapped(source: Checkpoint, group: Sequence[Family]) -> list[Finding]:
    """One of two matrices that read the same input has even and odd columns exchanged."""
    # Trained q and k, or gate and up, weigh their inputs alike; v does not follow them.
    names = ("w1", "w3", "gate_proj", "up_proj", "q_proj", "k_proj", "query", "key")
    members = [f for f in group if f.module.rpartition(".")[2] in names]
    profiles = [(family, contrast(source, family)) for family in members if can_contrast(family)]
    for i, (first, a) in enumerate(profiles):
        for second, b in profiles[i + 1 :]:
            score = heuristics.opposed(a, b)
            if score is not None:
                return [
                    _finding(
                        first,
                        "swapped-nibbles",
                        "neighbouring columns are exchanged between this weight and "
                        f"{shown(second.module)} (correlation {score:.2f})",
                        "the same columns large in both, as both read the same input",
                        "One of the two has its nibbles swapped; even k belongs in the low nibble. "
                        "--reference tells which.",
                        "low" if score > -0.5 else "medium",
                    )
                ]
    return []
