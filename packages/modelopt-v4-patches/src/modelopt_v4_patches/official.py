"""The official mixed checkpoint, held against the model that its config.json describes.

FP8 in blocks of 128x128 for attention and shared experts, MXFP4 for routed experts, BF16 and
float32 for the rest. A tensor that the model does not have, one that is lacking, or one of another
shape is refused by name: what is skipped silently comes back as garbled text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvfp4_codec.checkpoint import Checkpoint, Family, TensorInfo, find_families
from nvfp4_codec.checkpoint.families import FLOATS
from nvfp4_codec.checkpoint.header import shown
from nvfp4_codec.checkpoint.rewrite import read_config
from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import Entry, ModelConfig, Schema, detect_scheme
from nvfp4_codec.schemas.deepseek_v4 import Report as Match

_SCALE_DTYPES = ("F8_E8M0", "F32")
_NAMED = 5


@dataclass(frozen=True)
class Official:
    """An open checkpoint; each family with the tensor of the model that it is."""

    source: Checkpoint
    config: Mapping[str, Any]
    schema: Schema
    families: tuple[tuple[Family, Entry], ...]


def open_official(folder: Path) -> Official:
    """Opens the folder. Raises CheckpointError unless it is exactly the official checkpoint.

    Scales may be E8M0 or float32, named ``scale`` or ``weight_scale_inv``, and lie in any shard.
    """
    source = Checkpoint.open(folder)
    try:
        if not source.is_folder:
            raise _refused(source, "one file was given; give the model's folder")
        config = read_config(source.root)
        if config is None:
            raise _refused(source, "no config.json beside the weights; fetch it, too")
        families = find_families(source.tensors)
        _check_format(source, families)
        schema = Schema(ModelConfig.from_dict(config))
        match = schema.match(source.tensors, "official", "official")
        if not match.ok:
            raise _refused(
                source,
                f"the tensors are not those of its config.json: {_listed(match)}. Files of "
                "different checkpoints, or an incomplete download: fetch it again",
            )
        pairs = []
        for family in families:
            entry = schema.find(family.weight.name)
            assert entry is not None  # matched
            _check_stored(source, schema, family, entry)
            pairs.append((family, entry))
        return Official(source, config, schema, tuple(pairs))
    except BaseException:
        source.close()
        raise


def _check_format(source: Checkpoint, families: list[Family]) -> None:
    """What people give instead of the official checkpoint, each with its own advice."""
    for family in families:
        if family.kind == "nvfp4":
            raise CheckpointError(
                "this weight is NVFP4: an export, not the official checkpoint. `nvfp4 convert "
                "--to bf16` dequantizes one.",
                file=shown(family.weight.file),
                tensor=shown(family.weight.name),
            )
    scheme = detect_scheme(source.tensors)
    if scheme != "official":
        raise _refused(
            source,
            f"the names are transformers' ({scheme}), not the official ones "
            "(layers.0.attn.wq_a.weight); give the checkpoint as DeepSeek published it",
        )
    if all(family.kind == "plain" for family in families):
        raise _refused(
            source,
            f"none of the {len(families)} weights is FP8 or MXFP4: it is dequantized already "
            "(BF16); give the checkpoint as DeepSeek published it",
        )


def _listed(match: Match) -> str:
    """The first names of each list, and how many there are of each kind."""
    lists = {"unknown": match.unknown, "missing": match.missing, "duplicate": match.duplicate}
    parts = []
    for what, names in lists.items():
        if not names:
            continue
        part = f"{len(names)} {what}: {', '.join(map(shown, names[:_NAMED]))}"
        if len(names) > _NAMED:
            kinds = match.summary()[what].items()
            part += f" ... ({', '.join(f'{count} x {shown(kind)}' for kind, count in kinds)})"
        parts.append(part)
    return "; ".join(parts)


def _check_stored(source: Checkpoint, schema: Schema, family: Family, entry: Entry) -> None:
    """Dtypes and shapes of a weight and its scales."""
    weight, *scales = schema.stored(entry)
    info = source.info(entry.name())  # not the family's: a scale is alone where nothing fits it
    both_floats = weight.dtype in FLOATS and info.dtype in FLOATS
    if info.shape != weight.shape or not (info.dtype == weight.dtype or both_floats):
        raise _other(info, f"{weight.dtype} {list(weight.shape)}")
    for scale in scales:
        found = family.scale or family.weight
        if found.shape != scale.shape or found.dtype not in _SCALE_DTYPES:
            raise _other(found, f"{' or '.join(_SCALE_DTYPES)} {list(scale.shape)}")


def _other(info: TensorInfo, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{info.dtype} {list(info.shape)}; config.json asks for {expected}. Files of different "
        "checkpoints: fetch them again.",
        file=shown(info.file),
        tensor=shown(info.name),
    )


def _refused(source: Checkpoint, why: str) -> CheckpointError:
    return CheckpointError(f"{why}.", file=shown(str(source.root)))
