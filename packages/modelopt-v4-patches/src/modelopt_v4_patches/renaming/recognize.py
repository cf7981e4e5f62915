"""Holds an exported checkpoint against the schema: each tensor's official name, or a refusal.

Nothing is skipped: a tensor that the model does not have, one that is lacking, and one of another
shape or dtype than its weight asks for are all refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nvfp4_codec.checkpoint import Checkpoint, TensorInfo
from nvfp4_codec.checkpoint.header import shown
from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import (
    Entry,
    Layout,
    ModelConfig,
    Schema,
    Scheme,
    detect_scheme,
    parse,
    to_official,
)
from nvfp4_codec.schemas.deepseek_v4 import Report as Match

from ..errors import some_names

_LAYOUTS: Mapping[str, Layout] = {"U8": "nvfp4", "F8_E4M3": "official", "I8": "official"}
# What transformers casts to the model's dtype while saving; loaders cast it back.
_FLOATS = {"BF16", "F16", "F32"}
_NAMED = 10


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


def recognize(source: Checkpoint, config: ModelConfig) -> Recognized:
    """The official names of an export's tensors; ``config`` is the official model's.

    The MTP blocks may be lacking altogether: transformers does not load them.
    Raises CheckpointError naming unknown, missing and misshapen tensors.
    """
    scheme = detect_scheme(source.tensors)
    tensors = {
        to_official(name, scheme): info
        for name, info in source.tensors.items()
        if parse(name, scheme) is not None
    }
    if not any(name.startswith("mtp.") for name in tensors):
        config = config.without_mtp()
    schema = Schema(config)

    def layout(entry: Entry) -> Layout:
        info = tensors.get(entry.name())
        return "plain" if info is None else _LAYOUTS.get(info.dtype, "plain")

    match = schema.match(source.tensors, scheme, layout)
    if not match.ok:
        raise _refused(match)
    linears = [entry for entry in schema.entries() if entry.template.row.linear]
    quantized = frozenset(entry.module() for entry in linears if layout(entry) != "plain")
    _check_stored(schema, layout, tensors)
    return Recognized(
        schema,
        scheme,
        match.matched,
        tensors,
        quantized,
        frozenset(entry.module() for entry in linears) - quantized,
    )


def _refused(match: Match) -> CheckpointError:
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


def _check_stored(
    schema: Schema, layout: Callable[[Entry], Layout], tensors: Mapping[str, TensorInfo]
) -> None:
    """Shapes and dtypes; and scales beside a weight that is not stored so as to have them."""
    belonging = set()
    for entry in schema.entries():
        for spec in schema.stored(entry, layout(entry)):
            belonging.add(spec.name)
            info = tensors.get(spec.name)
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
    for name, info in tensors.items():
        if name not in belonging and not name.endswith(("k_scale", "v_scale")):
            raise _wrong(
                info,
                "belongs to no weight that is stored with it. The export is broken: make it again",
            )


def _wrong(info: TensorInfo, message: str) -> CheckpointError:
    return CheckpointError(f"{message}.", file=shown(info.file), tensor=shown(info.name))
