"""Holds a checkpoint's tensors against the schema: each one's official name, or what is wrong.

``survey`` looks and tells; ``recognize`` takes exactly the given model, and refuses by name a
tensor that the model does not have, one that is lacking, and one of another shape or dtype than
its weight asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...checkpoint.header import shown, some_names
from ...checkpoint.reader import Checkpoint, TensorInfo
from ...errors import CheckpointError
from .config import ModelConfig
from .names import Scheme, detect_scheme, parse, to_official
from .report import Report
from .schema import Entry, Layout, Schema

_LAYOUTS: Mapping[str, Layout] = {"U8": "nvfp4", "F8_E4M3": "official", "I8": "official"}
# What transformers casts to the model's dtype while saving; loaders cast it back.
_FLOATS = {"BF16", "F16", "F32"}
_NAMED = 10


@dataclass(frozen=True)
class Survey:
    """What a checkpoint's headers say of a model.

    schema: of the model, without MTP blocks if the checkpoint has none. tensors: by official
    name, as far as their names are known; ``report`` says which are unknown, missing or double.
    """

    schema: Schema
    scheme: Scheme
    tensors: Mapping[str, TensorInfo]
    report: Report

    @property
    def has_mtp(self) -> bool:
        """Whether the MTP blocks are there."""
        return any(block.kind == "mtp" for block in self.schema.config.blocks)

    def layout(self, entry: Entry) -> Layout:
        """How a matrix is stored, by its dtype; "plain" also for one that is lacking."""
        return _layout(self.tensors, entry)


@dataclass(frozen=True)
class Recognized:
    """An export whose tensors are exactly those of ``schema``.

    names: stored name -> official name, of every tensor. tensors: the same tensors by official
    name. quantized, unquantized: official modules of the linears, by how they are stored.
    """

    schema: Schema
    scheme: Scheme
    names: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]
    quantized: frozenset[str]
    unquantized: frozenset[str]

    @property
    def has_mtp(self) -> bool:
        """Whether the MTP blocks are there."""
        return any(block.kind == "mtp" for block in self.schema.config.blocks)


def survey(tensors: Mapping[str, TensorInfo], config: ModelConfig) -> Survey:
    """Looks at the tensors of a checkpoint of ``config``'s model, whatever their names' scheme.

    The MTP blocks may be lacking altogether: transformers does not load them.
    Raises CheckpointError if no name is one of DeepSeek-V4's, or if schemes are mixed.
    """
    scheme = detect_scheme(tensors)
    official = {
        to_official(name, scheme): info
        for name, info in tensors.items()
        if parse(name, scheme) is not None
    }
    if not any(name.startswith("mtp.") for name in official):
        config = config.without_mtp()
    schema = Schema(config)
    report = schema.match(tensors, scheme, lambda entry: _layout(official, entry))
    return Survey(schema, scheme, official, report)


def recognize(source: Checkpoint, config: ModelConfig) -> Recognized:
    """The official names of an export's tensors; ``config`` is the official model's.

    Raises CheckpointError naming unknown, missing and misshapen tensors.
    """
    found = survey(source.tensors, config)
    if not found.report.ok:
        raise _refused(found.report)
    linears = [entry for entry in found.schema.entries() if entry.template.row.linear]
    quantized = frozenset(entry.module() for entry in linears if found.layout(entry) != "plain")
    _check_stored(found)
    return Recognized(
        found.schema,
        found.scheme,
        found.report.matched,
        found.tensors,
        quantized,
        frozenset(entry.module() for entry in linears) - quantized,
    )


def _layout(tensors: Mapping[str, TensorInfo], entry: Entry) -> Layout:
    info = tensors.get(entry.name())
    return "plain" if info is None else _LAYOUTS.get(info.dtype, "plain")


def _refused(match: Report) -> CheckpointError:
    """All three lists, each by its first names and then by kind."""
    lists = {
        "not in this model": match.unknown,
        "missing": match.missing,
        "there a second time": match.duplicate,
    }
    kinds = match.summary().values()
    found = "; ".join(
        f"{len(names)} {what}: {some_names(names, _NAMED)}"
        + ("" if len(names) <= _NAMED else f" ({_counted(counts)})")
        for (what, names), counts in zip(lists.items(), kinds, strict=True)
        if names
    )
    return CheckpointError(
        f"the tensors are not those of the reference config.json ({match.scheme} names): {found}. "
        "Give the config.json of the model that was exported; an incomplete export must be made "
        "again."
    )


def _counted(kinds: Mapping[str, int]) -> str:
    first = sorted(kinds.items(), key=lambda kind: -kind[1])[:_NAMED]
    return ", ".join(f"{count} x {shown(kind)}" for kind, count in first)


def _check_stored(found: Survey) -> None:
    """Shapes and dtypes; and scales beside a weight that is not stored so as to have them."""
    belonging = set()
    for entry in found.schema.entries():
        for spec in found.schema.stored(entry, found.layout(entry)):
            belonging.add(spec.name)
            info = found.tensors.get(spec.name)
            if info is None:  # input_scale of weight-only exports; the rest was matched
                continue
            same = info.dtype == spec.dtype or {info.dtype, spec.dtype} <= _FLOATS
            if spec.name.endswith("weight_scale_2") or spec.name.endswith("input_scale"):
                right = info.dtype == "F32" and info.nbytes == 4
            else:
                right = same and info.shape == spec.shape
            if not right:
                raise _wrong(
                    info,
                    f"{info.dtype} {list(info.shape)}; the reference config.json asks for "
                    f"{spec.dtype} {list(spec.shape)}. Give the config.json of this model",
                )
    for name, info in found.tensors.items():
        if name not in belonging and not name.endswith(("k_scale", "v_scale")):
            raise _wrong(
                info,
                "belongs to no weight that is stored with it. The export is broken: make it again",
            )


def _wrong(info: TensorInfo, message: str) -> CheckpointError:
    return CheckpointError(f"{message}.", file=shown(info.file), tensor=shown(info.name))
