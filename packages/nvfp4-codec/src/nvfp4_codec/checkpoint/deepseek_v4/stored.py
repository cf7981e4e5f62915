"""A DeepSeek-V4 checkpoint as it lies on disk, sorted into the schema by header alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...schemas.deepseek_v4 import Entry, Layout, Schema, Scheme, Template, detect_scheme
from ...schemas.deepseek_v4.names import parse
from ..families import Family, find_families
from ..header import shown
from ..reader import Checkpoint, TensorInfo
from ..rewrite import read_config
from ..verify import Confidence, Finding
from .structure import Structure, model_config

Parts = dict[str, TensorInfo]
Indices = tuple[str, ...]

_NVFP4_PARTS = {"weight_scale", "weight_scale_2"}
_FORMATS = {"F8_E4M3": "FP8", "I8": "MXFP4"}


def fault(
    at: TensorInfo,
    code: str,
    found: str,
    expected: str,
    fix: str,
    confidence: Confidence = "certain",
) -> Finding:
    """A finding about one tensor."""
    return Finding(code, shown(at.name), shown(at.file), found, expected, fix, confidence)


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of the model as stored: ``parts`` holds it and its scales by suffix."""

    entry: Entry
    layout: Layout
    parts: Parts

    @property
    def first(self) -> TensorInfo:
        """The weight, or what is there of it."""
        return next(iter(self.parts.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(info.nbytes for info in self.parts.values())

    @property
    def format(self) -> str:
        """The layout as a person calls it: NVFP4, FP8, MXFP4, or a plain dtype."""
        if self.layout == "nvfp4":
            return "NVFP4"
        return _FORMATS.get(self.first.dtype, self.first.dtype)


@dataclass
class Model:
    """An opened checkpoint with its schema; a context manager.

    ``findings`` are those of config.json's structure, made on the way to the schema.
    """

    checkpoint: Checkpoint
    config: dict[str, Any]
    scheme: Scheme
    schema: Schema
    tensors: dict[str, Stored]
    findings: list[Finding] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path) -> Model:
        """Opens a checkpoint folder. Raises CheckpointError if there is no DeepSeek-V4 in it."""
        checkpoint = Checkpoint.open(path)
        try:
            return cls.of(checkpoint)
        except BaseException:
            checkpoint.close()
            raise

    @classmethod
    def of(cls, checkpoint: Checkpoint, scheme: Scheme | None = None) -> Model:
        """Sorts an open checkpoint, which the model closes in the end.

        ``scheme``: None detects it; given, names of other schemes are unknown ones. Raises
        CheckpointError as ``open`` does, and for names in no scheme or in two.
        """
        root = shown(str(checkpoint.root))
        config = read_config(checkpoint.root) if checkpoint.is_folder else None
        if config is None:
            raise CheckpointError(
                "has no config.json, which says what tensors there must be. Give the folder of a "
                "whole checkpoint, or copy the source's config.json into it.",
                file=root,
            )
        quantization = config.get("quantization_config") or {}
        if not isinstance(quantization, dict):
            raise CheckpointError(
                "quantization_config is no object; repair it.", file="config.json"
            )
        if quantization.get("quant_method") == "compressed-tensors":
            raise CheckpointError(
                "is in compressed-tensors' names. `nvfp4 convert --to nvfp4` translates them.",
                file=root,
            )
        scheme = scheme or detect_scheme(checkpoint.tensors)
        raw: dict[tuple[Template, Indices], Parts] = {}
        for info in checkpoint:
            parsed = parse(info.name, scheme)
            if parsed is not None and parsed.template is not None and parsed.part is not None:
                raw.setdefault((parsed.template, parsed.indices), {})[parsed.part] = info
        made, findings = model_config(config, Structure.of(raw))
        schema = Schema(made)
        return cls(checkpoint, config, scheme, schema, dict(_tensors(schema, raw)), findings)

    @property
    def quantization(self) -> dict[str, Any] | None:
        """config.json's quantization_config, None if there is none."""
        return self.config.get("quantization_config") or None

    @cached_property
    def families(self) -> dict[str, Family]:
        """The codec's view of the same tensors, by the name of the weight."""
        return {family.weight.name: family for family in find_families(self.checkpoint.tensors)}

    def layout(self, entry: Entry) -> Layout:
        """How an entry is stored; plain if it is not."""
        stored = self.tensors.get(entry.name())
        return "plain" if stored is None else stored.layout

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.checkpoint.close()


def _tensors(
    schema: Schema, raw: Mapping[tuple[Template, Indices], Parts]
) -> Iterator[tuple[str, Stored]]:
    """What the model has, by official name."""
    for (template, indices), parts in raw.items():
        own = schema.own_template(template)
        if own is None or not schema.has(own, indices):
            continue
        entry = schema.entry_at(own, indices)
        ordered = {part: parts[part] for part in own.parts if part in parts}
        yield entry.name(), Stored(entry, _layout(entry, ordered), ordered)


def _layout(entry: Entry, parts: Parts) -> Layout:
    """The weight's dtype decides; its scales do where it is absent or could be either."""
    if not entry.template.row.linear:
        return "plain"
    weight = parts.get("weight")
    dtype = None if weight is None else weight.dtype
    if dtype == "U8" or (dtype in ("I8", None) and _NVFP4_PARTS & parts.keys()):
        return "nvfp4"
    if dtype in ("I8", "F8_E4M3") or (dtype is None and parts.keys() & {"scale"}):
        return "official"
    return "plain"
