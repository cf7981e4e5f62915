"""What a checkpoint holds: every linear's format, from headers and config.json only.

The dtypes of the stored tensors decide, not the config: exports list modules as quantized that
are not, and the other way round. ``promised`` reads the config alone, for a model whose weights
are not at hand yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from nvfp4_codec.checkpoint.header import shown
from nvfp4_codec.checkpoint.reader import Checkpoint, TensorInfo
from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import (
    SCHEMES,
    Entry,
    ModelConfig,
    Schema,
    Scheme,
    parse,
)
from nvfp4_codec.schemas.deepseek_v4.recognize import Survey, survey

from .config_file import config_of
from .stored_config import complete_config, is_ours, promised_formats

__all__ = [
    "EXPERTS",
    "Format",
    "Stored",
    "complete_config",
    "is_ours",
    "promised",
    "read_stored",
    "stored_in",
]

#: How a linear is stored, or runs. fp8_block is E4M3 with one scale for each 128x128 block.
Format = Literal["nvfp4", "fp8_block", "mxfp4", "bf16"]

#: All routed experts of a block go by the name of their list.
EXPERTS: Final = ".ffn.experts"

_FLOATS: Final = ("BF16", "F16", "F32")


@dataclass(frozen=True, eq=False)
class Stored:
    """A DeepSeek-V4 checkpoint.

    config: config.json, its gaps filled (`complete_config`); notes: a sentence for each gap.
    formats: official module name of every linear -> its format; a block's routed experts together
        go by ``layers.3.ffn.experts``. A linear whose weight is missing is not in it.
    weight_only: those of them that are NVFP4 and lack an ``input_scale``.
    unknown, missing: names, in the checkpoint's own scheme, that the model does not have, and that
        it should have. MTP blocks that are absent altogether are not missing: has_mtp is False.
    """

    config: Mapping[str, Any]
    schema: Schema
    scheme: Scheme
    formats: Mapping[str, Format]
    has_mtp: bool
    unknown: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    weight_only: frozenset[str] = frozenset()
    notes: tuple[str, ...] = field(default=())


def read_stored(folder: Path) -> Stored:
    """What a checkpoint folder holds; reads headers only, whatever the names' scheme.

    Unknown and missing tensors are listed, not refused. Raises CheckpointError for a folder that
    is no DeepSeek-V4 checkpoint, and naming the tensor for names of two schemes and for a weight of
    an unknown dtype.
    """
    config = config_of(folder)
    with Checkpoint.open(folder) as source:
        return stored_in(source, config)


def stored_in(source: Checkpoint, config: Mapping[str, Any]) -> Stored:
    """What an open checkpoint with this config.json holds; raises as `read_stored` does."""
    complete, notes = complete_config(config)
    found = _survey(source, ModelConfig.from_dict(complete))
    formats, weight_only = _formats(found)
    report = found.report
    return Stored(
        config=complete,
        schema=found.schema,
        scheme=found.scheme,
        formats=formats,
        has_mtp=found.has_mtp,
        unknown=(*report.unknown, *report.duplicate),
        missing=report.missing,
        weight_only=weight_only,
        notes=tuple(notes),
    )


def promised(config: Mapping[str, Any]) -> Stored:
    """What a config.json says that the checkpoint holds, by its quantized_layers and ignore.

    MTP blocks are taken as official unless they are listed: tools copy them. Raises
    CheckpointError for a config of another model, StoredError for an algorithm that is not ours.
    """
    complete, notes = complete_config(config)
    schema = Schema(ModelConfig.from_dict(complete))
    scheme, formats, weight_only = promised_formats(complete, schema, linears(schema))
    return Stored(
        config=complete,
        schema=schema,
        scheme=scheme,
        formats=formats,
        has_mtp=any(block.kind == "mtp" for block in schema.config.blocks),
        weight_only=weight_only,
        notes=tuple(notes),
    )


def linears(schema: Schema) -> Iterator[tuple[str, Entry]]:
    """Every linear of the model by module name; a block's routed experts once, by their list."""
    for entry in schema.entries():
        if not entry.template.row.linear:
            continue
        if entry.role != "routed_expert":
            yield entry.module(), entry
        elif entry.indices[1] == "0" and entry.template.official.endswith(".w1.weight"):
            yield list_of_experts(entry.module()), entry


def list_of_experts(module: str) -> str:
    """``layers.3.ffn.experts`` of ``layers.3.ffn.experts.17.w1``; other names as they are."""
    head, found, _ = module.partition(f"{EXPERTS}.")
    return head + EXPERTS if found else module


def _survey(source: Checkpoint, config: ModelConfig) -> Survey:
    try:
        return survey(source.tensors, config)
    except CheckpointError as error:
        odd = _odd_name(source)
        if odd is None:
            raise CheckpointError(
                f"{error}. Give the folder of a DeepSeek-V4 checkpoint.",
                file=shown(str(source.root)),
            ) from None
        raise CheckpointError(
            f"{error}. Two exports lie in one folder, or one was renamed in part: export again "
            "into a new one.",
            file=shown(odd.file),
            tensor=shown(odd.name),
        ) from None


def _odd_name(source: Checkpoint) -> TensorInfo | None:
    """The first tensor whose name is in no scheme that fits all names before it."""
    fitting = set(SCHEMES)
    for name, info in source.tensors.items():
        own = {scheme for scheme in SCHEMES if parse(name, scheme) is not None}
        if own and not fitting & own:
            return info
        fitting &= own or fitting
    return None


def _formats(found: Survey) -> tuple[dict[str, Format], frozenset[str]]:
    formats: dict[str, Format] = {}
    weight_only: set[str] = set()
    for entry in found.schema.entries():
        info = found.tensors.get(entry.name())
        if info is None or not entry.template.row.linear:
            continue
        module = entry.module()
        name = list_of_experts(module)
        own = _format(info, module, found.tensors)
        if formats.setdefault(name, own) != own:
            raise CheckpointError(
                f"stored as {own}, other experts of this block as {formats[name]}; a block has one "
                "format. Quantize the experts again.",
                file=shown(info.file),
                tensor=shown(info.name),
            )
        if own == "nvfp4" and f"{module}.input_scale" not in found.tensors:
            weight_only.add(name)
    return formats, frozenset(weight_only)


def _format(info: TensorInfo, module: str, tensors: Mapping[str, TensorInfo]) -> Format:
    """By the weight's dtype; packed codes are MXFP4 if they have DeepSeek's E8M0 scale only."""
    if info.dtype in ("U8", "I8"):
        has_nvfp4 = any(
            f"{module}.{part}" in tensors for part in ("weight_scale", "weight_scale_2")
        )
        if info.dtype == "U8" and not (f"{module}.scale" in tensors and not has_nvfp4):
            return "nvfp4"
        return "mxfp4"
    if info.dtype == "F8_E4M3":
        return "fp8_block"
    if info.dtype in _FLOATS:
        return "bf16"
    raise CheckpointError(
        f"a weight of dtype {info.dtype}; known are U8 (NVFP4), F8_E4M3 (FP8), I8 (MXFP4) and "
        "BF16. Quantize it again.",
        file=shown(info.file),
        tensor=shown(info.name),
    )
