"""Names that are almost right: of another scheme, at another place, spelled otherwise.

The schema knows which tensors there must be. A name that it does not know is held against those
that are missing in the same block, by shape and by the last word; what fits is named for what it
is, instead of as one unknown and one missing tensor.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from nvfp4_codec.checkpoint.deepseek_v4.names import check_names, match
from nvfp4_codec.checkpoint.deepseek_v4.stored import Model
from nvfp4_codec.checkpoint.families import logical_shape, pattern
from nvfp4_codec.checkpoint.header import shown
from nvfp4_codec.checkpoint.reader import Checkpoint, TensorInfo
from nvfp4_codec.checkpoint.verify import Finding
from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import (
    SCHEMES,
    Entry,
    Report,
    Scheme,
    detect_scheme,
    to_official,
)
from nvfp4_codec.schemas.deepseek_v4.names import COMPANIONS, module_of, parse
from nvfp4_codec.schemas.deepseek_v4.table import BLOCK, DSPARK, MTP, ROOT

_PARTS: Final = ("weight", *COMPANIONS)
_CONTAINERS: Final = {"self_attn": "attn", "mlp": "ffn"}
_NAMED: Final = 3


@dataclass(frozen=True)
class Misplaced:
    """A module as it is stored, with its tensors, and the tensor of the model that it must be."""

    module: str
    tensors: tuple[TensorInfo, ...]
    entry: Entry
    code: str


def sort_names(checkpoint: Checkpoint) -> Model:
    """The checkpoint's tensors by the schema, in the scheme that most of its names are in."""
    try:
        scheme = detect_scheme(checkpoint.tensors)
    except CheckpointError:
        scheme = _most_common(checkpoint.tensors)
    return Model.of(checkpoint, scheme)


def _most_common(names: Iterable[str]) -> Scheme:
    kinds: dict[str, tuple[str, int]] = {}
    for name in names:
        first, count = kinds.get(pattern(name), (name, 0))
        kinds[pattern(name)] = first, count + 1
    counts = dict.fromkeys(SCHEMES, 0)
    for name, count in kinds.values():
        known = [scheme for scheme in SCHEMES if parse(name, scheme) is not None]
        for scheme in known if len(known) < len(SCHEMES) else ():
            counts[scheme] += count
    return max(SCHEMES, key=lambda scheme: counts[scheme])


def look_at_names(model: Model, told: Container[str]) -> list[Finding]:
    """What is wrong with the names. ``told``: modules whose absent parts are findings already."""
    report = match(model)
    foreign = {name: known for name in report.unknown if (known := _foreign(name, model.scheme))}
    report = _without(report, model, foreign, foreign.values())
    placed = misplaced(model, report)
    names = [info.name for found in placed for info in found.tensors]
    report = _without(report, model, names, (found.entry.module() for found in placed))
    findings = _findings(model, placed) + check_names(model, told, report)
    return findings + ([_mixed(model, list(foreign))] if foreign else [])


def _without(
    report: Report, model: Model, unknown: Iterable[str], arrived: Iterable[str]
) -> Report:
    """The report less names that are explained, and less what they stand for (official modules)."""
    gone, there = set(unknown), set(arrived)

    def absent(name: str) -> bool:
        entry = model.schema.find(name, model.scheme)
        return entry is None or entry.module() not in there

    return replace(
        report,
        unknown=tuple(name for name in report.unknown if name not in gone),
        missing=tuple(name for name in report.missing if absent(name)),
    )


def _foreign(name: str, own: Scheme) -> str | None:
    """The official module of a name that is one in another scheme only, else None.

    MTP blocks go by official names in all schemes, but for one norm.
    """
    for scheme in SCHEMES if not name.startswith("mtp.") else ():
        if scheme != own and parse(name, scheme) is not None:
            official = to_official(name, scheme)
            found = parse(official, "official")
            if found is None or found.template is None:
                return official
            return module_of(found.template.official).replace("#", "%s") % found.indices
    return None


def misplaced(model: Model, report: Report) -> list[Misplaced]:
    """The unknown names that must be missing tensors of the model."""
    stored: dict[str, list[TensorInfo]] = {}
    for name in report.unknown:
        stored.setdefault(_split(name)[0], []).append(model.checkpoint.info(name))
    wanted: dict[tuple[str, ...], dict[str, Entry]] = {}
    for name in report.missing:
        entry = model.schema.find(name, model.scheme)
        if entry is not None:
            wanted.setdefault(_place(entry.module()), {})[entry.module()] = entry
    found = []
    for module, tensors in stored.items():
        candidates = wanted.get(_place(module), {})
        shape = next((_shape(info) for info in tensors if _split(info.name)[1] == "weight"), None)
        if shape is None and len(tensors) == 1:
            shape = tensors[0].shape
        fitting = [e for e in candidates.values() if e.shape == shape and _alike(module, e)]
        if fitting:
            entry = max(fitting, key=lambda e: len(_words(e.module()) & _words(module)))
            del candidates[entry.module()]
            tensors.sort(key=lambda info: not info.name.endswith("weight"))
            found.append(
                Misplaced(module, tuple(tensors), entry, _code(module, entry, model.scheme))
            )
    return found


def _split(name: str) -> tuple[str, str]:
    """A tensor's module and part; a tensor that is no part of a module is both."""
    module, _, part = name.rpartition(".")
    return (module, part) if part in _PARTS else (name, "")


def _shape(info: TensorInfo) -> tuple[int, ...]:
    return logical_shape(info) if info.dtype in ("U8", "I8") and info.shape else info.shape


def _place(module: str) -> tuple[str, ...]:
    """The block and the expert, which no tool confuses."""
    words = module.removeprefix("model.").split(".")
    place = words[:2] if words[0] in ("layers", "mtp") else []
    if "experts" in words[:-1]:
        place.append(words[words.index("experts") + 1])
    elif "shared_experts" in words:
        place.append("shared")
    return tuple(place)


def _words(module: str) -> set[str]:
    return {_CONTAINERS.get(word, word) for word in module.split(".")}


def _related() -> Mapping[str, frozenset[str]]:
    """Last words of names -> those that mean the same in some scheme."""
    related: dict[str, set[str]] = {}
    for row in (*ROOT, *BLOCK, *MTP, *DSPARK):
        names = (row.official, row.hf, row.half, row.hf_also, row.half_also)
        leaves = {_split(name)[0].rpartition(".")[2] for name in names if name is not None}
        for leaf in leaves:
            related.setdefault(leaf, set()).update(leaves)
    return {leaf: frozenset(others) for leaf, others in related.items()}


_RELATED: Final = _related()


def _alike(module: str, entry: Entry) -> bool:
    leaf, wanted = module.rpartition(".")[2], entry.module().rpartition(".")[2]
    return leaf == wanted or wanted in _RELATED.get(leaf, ())


def _code(module: str, entry: Entry, own: Scheme) -> str:
    official = entry.module()
    if ".indexer." in official and entry.role in ("compressor", "position_bias", "norm"):
        return "indexer-compressor-path"
    if _is_norm(official):
        return "kv-norm-name"
    ours, wanted = (name.removeprefix("model.").split(".") for name in (module, entry.module(own)))
    if entry.role in ("routed_expert", "shared_expert") and ours[-1] != wanted[-1]:
        return "expert-names"
    return "block-names" if ours[2:3] != wanted[2:3] else "misplaced-tensor"


def _is_norm(official: str) -> bool:
    return official.endswith((".kv_norm", "compressor.norm"))


def _findings(model: Model, placed: Iterable[Misplaced]) -> list[Finding]:
    """One for each kind of name."""
    groups: dict[tuple[str, str, str], list[Misplaced]] = {}
    for found in placed:
        key = found.code, pattern(found.module), pattern(found.entry.module())
        groups.setdefault(key, []).append(found)
    findings = []
    for (code, _, _), members in groups.items():
        first = members[0]
        name = first.entry.name(model.scheme)
        text = f"a {first.entry.role.replace('_', ' ')} under a name that the model does not have"
        if len(members) > 1:
            text += f", as {len(members)} of its kind"
        findings.append(
            Finding(
                code,
                shown(first.tensors[0].name),
                shown(first.tensors[0].file),
                text,
                f"{name}, as the other names are spelled ({model.scheme})",
                "Rename it: `dsv4-quantize finalize` gives an export the official names.",
            )
        )
    return findings


def _mixed(model: Model, names: list[str]) -> Finding:
    first = ", ".join(shown(name) for name in names[:_NAMED])
    info = model.checkpoint.info(names[0])
    return Finding(
        "mixed-names",
        shown(info.name),
        shown(info.file),
        f"{len(names)} names of another scheme, the first {first}",
        f"one scheme; most names are {model.scheme}",
        "Two exports lie in one folder, or one was renamed in part: export again into a new one.",
    )
