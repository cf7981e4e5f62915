"""A list of names held against the schema: what is understood, unknown, missing or there twice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from .names import Scheme, Template, detect_scheme, module_of, parse

if TYPE_CHECKING:
    from .schema import Entry, Layout, Schema

    ChooseLayout: TypeAlias = Layout | Callable[[Entry], Layout] | None

Indices = tuple[str, ...]
Parts = tuple[str, ...]

_PLAIN = ("weight",)
_OFFICIAL = ("weight", "scale")
_NVFP4 = ("weight", "weight_scale", "weight_scale_2")
_ONLY_NVFP4 = {"weight_scale", "weight_scale_2", "input_scale"}
# Either spelling of an official scale satisfies the other.
_SAME = {"weight_scale_inv": "scale"}


@dataclass(frozen=True)
class Report:
    """A list of names held against the schema; every list is sorted.

    ``matched`` gives each understood name its official one. ``unknown`` are names that the model
    does not have, ``missing`` are absent ones (in the checkpoint's scheme), ``duplicate`` are
    second spellings of a tensor that is there already.
    """

    scheme: Scheme
    matched: dict[str, str]
    unknown: tuple[str, ...]
    missing: tuple[str, ...]
    duplicate: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the names are exactly those of the model."""
        return not (self.unknown or self.missing or self.duplicate)

    def summary(self) -> dict[str, dict[str, int]]:
        """Unknown, missing and duplicate names with their indices cut out, counted."""
        lists = {"unknown": self.unknown, "missing": self.missing, "duplicate": self.duplicate}
        return {
            kind: dict(Counter(re.sub(r"(?<=\.)[0-9]+(?=\.|$)", "#", name) for name in names))
            for kind, names in lists.items()
        }


def match_names(
    schema: Schema, names: Collection[str], scheme: Scheme | None, layout: ChooseLayout
) -> Report:
    """What `Schema.match` says it does."""
    if scheme is None:
        scheme = detect_scheme(names)
    matched: dict[str, str] = {}
    unknown, duplicate, missing = [], [], []
    have: dict[Template, dict[Indices, set[str]]] = {t: {} for t in schema.templates()}
    for name in names:
        parsed = parse(name, scheme)
        template = schema.own_template(parsed.template) if parsed and parsed.template else None
        if (
            parsed is None
            or parsed.part is None
            or template is None
            or not schema.has(template, parsed.indices)
        ):
            unknown.append(name)
            continue
        parts = have[template].setdefault(parsed.indices, set())
        part = _SAME.get(parsed.part, parsed.part)
        if part in parts:
            duplicate.append(name)
            continue
        parts.add(part)
        matched[name] = _tensor_name(template, "official", parsed.indices, parsed.part)
    for template, found in have.items():
        if template.row.optional and not found:
            continue
        required = _required(schema, template, found, layout)
        for indices in schema.all_indices(template):
            parts = found.get(indices, set())
            missing += [
                _tensor_name(template, scheme, indices, part)
                for part in required(indices, parts)
                if part not in parts
            ]
    lists = (tuple(sorted(found)) for found in (unknown, missing, duplicate))
    return Report(scheme, matched, *lists)


def _required(
    schema: Schema, template: Template, found: Mapping[Indices, set[str]], layout: ChooseLayout
) -> Callable[[Indices, set[str]], Parts]:
    """Which parts a template's tensor must have, as a function of its indices and its parts."""
    if not template.row.linear:
        own = template.parts[:1]
        return lambda indices, parts: own
    present: set[str] = set().union(*found.values())
    nvfp4 = (*_NVFP4, "input_scale") if "input_scale" in present else _NVFP4
    compressed = schema.official_format(template) in ("fp8_block", "mxfp4")

    def parts_of(layout: Layout) -> Parts:
        if layout == "nvfp4":
            return nvfp4
        return _OFFICIAL if layout == "official" and compressed else _PLAIN

    if isinstance(layout, str):
        given = parts_of(layout)
        return lambda indices, parts: given
    if layout is not None:
        choose = layout
        return lambda indices, parts: parts_of(choose(schema.entry_at(template, indices)))
    if "scale" not in present:
        common = nvfp4 if present & _ONLY_NVFP4 else _PLAIN
        return lambda indices, parts: common
    return lambda indices, parts: nvfp4 if parts & _ONLY_NVFP4 else _OFFICIAL


def _tensor_name(template: Template, scheme: Scheme, indices: Indices, part: str) -> str:
    module = module_of(template.name(scheme)).replace("#", "%s") % indices
    return f"{module}.{part}" if part else module
