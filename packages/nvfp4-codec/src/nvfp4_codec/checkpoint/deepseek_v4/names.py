"""Names, shapes and dtypes against the schema: everything that headers show, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from typing import Final

from ...schemas.deepseek_v4 import Report, Template, fused_with
from ..header import shown
from ..loose import loose_problems
from ..structure import problems
from ..verify import Finding
from .stored import Model, Stored, fault

_FLOATS: Final = ("BF16", "F32", "F16")
_NAMED: Final = 3

_ADVICE: Final = {
    "missing-tensor": "Export again; if the model is damaged at the source, fetch that again.",
    "unknown-tensor": "It belongs to another model or version: remove it, or correct config.json.",
    "duplicate-tensor": "Loaders take whichever comes last: remove one of the two.",
}


def check_packing(model: Model) -> dict[str, list[Finding]]:
    """What is wrong inside quantized weights by the codec's own rules, by official module."""
    families = model.families.values()
    found = [(family, problem) for family in families for problem in problems(family)]
    told: dict[str, list[Finding]] = {}
    for family, p in (*found, *loose_problems(families)):
        stored = model.schema.find(family.weight.name, model.scheme)
        if stored is not None:
            finding = fault(family.weight, p.code, p.found, p.expected, p.fix)
            told.setdefault(stored.module(), []).append(finding)
    return told


def match(model: Model) -> Report:
    """All names held against the schema, each matrix as it is stored."""
    return model.schema.match(model.checkpoint.tensors, model.scheme, model.layout)


def check_names(model: Model, told: Container[str], report: Report) -> list[Finding]:
    """Unknown, missing and duplicate names, one finding for each kind of tensor.

    ``told``: modules whose absent parts are findings already.
    """
    missing = [name for name in report.missing if _module(name, model) not in told]
    lists = {
        "missing-tensor": (missing, "absent", "this tensor, which config.json asks for"),
        "unknown-tensor": (report.unknown, "stored", "only tensors that the model has"),
        "duplicate-tensor": (report.duplicate, "a second spelling", "each tensor once"),
    }
    findings = []
    for code, (names, found, expected) in lists.items():
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(re.sub(r"(?<=\.)[0-9]+(?=\.|$)", "#", name), []).append(name)
        for pattern, members in groups.items():
            text = found
            if len(members) > 1:
                first = ", ".join(shown(name) for name in members[:_NAMED])
                text = f"{found}: {len(members)} of {shown(pattern)}, the first {first}"
            info = model.checkpoint.tensors.get(members[0])
            file = model.checkpoint.root if info is None else info.file
            findings.append(
                Finding(code, shown(members[0]), shown(str(file)), text, expected, _ADVICE[code])
            )
    return findings


def _module(name: str, model: Model) -> str:
    entry = model.schema.find(name, model.scheme)
    return "" if entry is None else entry.module()


def check_headers(model: Model, told: Container[str]) -> list[Finding]:
    """Shapes and dtypes of every part, and fused projections stored in two formats.

    ``told``: modules whose scales are findings already.
    """
    findings: list[Finding] = []
    expected: dict[tuple[Template, int, str], dict[str, tuple[str, tuple[int, ...]]]] = {}
    for stored in model.tensors.values():
        entry = stored.entry
        if entry.module() in told:
            continue
        key = (entry.template, entry.block.ratio if entry.block else 0, stored.layout)
        if key not in expected:
            module = entry.module()
            expected[key] = {
                spec.name.removeprefix(module).lstrip("."): (spec.dtype, spec.shape)
                for spec in model.schema.stored(entry, stored.layout)
            }
        findings += _check_parts(stored, expected[key])
    return findings + [finding for group in fused_groups(model) for finding in _formats(group)]


def _check_parts(
    stored: Stored, expected: dict[str, tuple[str, tuple[int, ...]]]
) -> Iterator[Finding]:
    for part, info in stored.parts.items():
        wanted = expected.get("scale" if part == "weight_scale_inv" else part)
        if wanted is None:
            yield fault(
                info,
                "unexpected-scale",
                f"beside a weight stored as {stored.format}",
                "no such scale: the format has none",
                "Loaders would apply it, or stop at it: remove it, or store the weight as it says.",
            )
            continue
        dtype, shape = wanted
        single = part in ("weight_scale_2", "input_scale") and info.shape in ((), (1,))
        if info.shape != shape and not single:
            yield fault(
                info,
                "shape-mismatch",
                f"shape {list(info.shape)}",
                f"{list(shape)}, which config.json gives for {stored.format}",
                "The tensor belongs to another model, or was packed otherwise: export it again.",
            )
        if not _fits(info.dtype, dtype, stored, part):
            yield fault(
                info,
                _dtype_code(info.dtype, dtype, part),
                f"dtype {info.dtype}",
                dtype,
                "Loaders read the bytes as the expected dtype: export the tensor again.",
            )


def _dtype_code(found: str, expected: str, part: str) -> str:
    if (found, expected) == ("F8_E4M3", "F8_E8M0"):
        return "e8m0-read-as-e4m3"
    return "scale-dtype" if "scale" in part else "dtype-mismatch"


def _fits(found: str, expected: str, stored: Stored, part: str) -> bool:
    if found == expected:
        return True
    if stored.layout == "plain" and part in ("", "weight", "bias"):
        # loaders cast floats; what that lost shows against the source
        return found in _FLOATS if expected in _FLOATS else found == "I32" and expected == "I64"
    return part == "weight" and {found, expected} == {"U8", "I8"}  # packed codes either way


def fused_groups(model: Model) -> Iterator[tuple[Stored, ...]]:
    """Stored matrices that loaders make one of, two or more at a time."""
    for stored in model.tensors.values():
        module = stored.entry.module()
        modules = fused_with(module)
        if len(modules) > 1 and module == modules[0]:
            found = (model.tensors.get(f"{name}.weight") for name in modules)
            group = tuple(member for member in found if member is not None)
            if len(group) > 1:
                yield group


def _formats(group: tuple[Stored, ...]) -> Iterator[Finding]:
    first = group[0]
    for other in group[1:]:
        if first.format != other.format and (first.layout, other.layout) != ("plain", "plain"):
            yield fault(
                first.first,
                "fused-format-mismatch",
                f"{first.format}, and {other.format} in {shown(other.first.name)}",
                "one format: loaders fuse the two and read both alike",
                "Store both in one format: export again.",
            )
