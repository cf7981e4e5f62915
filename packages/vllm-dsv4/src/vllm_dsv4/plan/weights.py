"""Memory of the weights: every tensor's size, and on how many GPUs each is divided.

Sources: shapes from the codec's schema; what is divided from vLLM 0.33.0,
models/deepseek_v4/nvidia/model.py, attention.py and mtp.py (which linears are column or row
parallel, which are replicated).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, Literal

from nvfp4_codec.schemas.deepseek_v4 import Entry, Role, Schema

from ..stored import Format, Stored, list_of_experts
from .deployment import Deployment

#: How tables group tensors.
Part = Literal["routed experts", "shared experts", "attention", "compressors and indexer",
               "embeddings and head", "gates, norms, streams", "MTP"]  # fmt: skip

_PARTS: Final[Mapping[Role, Part]] = {
    "routed_expert": "routed experts",
    "shared_expert": "shared experts",
    "wq_a": "attention", "wq_b": "attention", "wkv": "attention", "wo_a": "attention",
    "wo_b": "attention", "sink": "attention",
    "compressor": "compressors and indexer", "position_bias": "compressors and indexer",
    "indexer_wq_b": "compressors and indexer", "indexer_weights": "compressors and indexer",
    "embed": "embeddings and head", "head": "embeddings and head",
}  # fmt: skip
_BY_HEADS: Final[tuple[Role, ...]] = ("wq_b", "wo_a", "wo_b", "embed", "head")
_PLAIN: Final[Mapping[str, int]] = {"fp32": 4, "int64": 8}
_SCALE: Final[Mapping[str, int]] = {"F8_E8M0": 1, "F32": 4}


def linear_bytes(
    format: Format, rows: int, columns: int, *, scale: int = 1, block: tuple[int, int] = (128, 128)
) -> int:
    """Bytes of one matrix [rows, columns] with its scales.

    nvfp4: half a byte for each value, one E4M3 for 16 columns, and two float32 (weight_scale_2,
    input_scale). mxfp4: half a byte, one E8M0 for 32 columns. fp8_block: a byte for each value and
    ``scale`` bytes for each ``block``. bf16: two bytes.
    """
    values = rows * columns
    match format:
        case "nvfp4":
            return values // 2 + values // 16 + 8
        case "mxfp4":
            return values // 2 + values // 32
        case "fp8_block":
            return values + scale * math.ceil(rows / block[0]) * math.ceil(columns / block[1])
        case "bf16":
            return 2 * values


def weights(
    stored: Stored,
    formats: Mapping[str, Format],
    deployment: Deployment,
    *,
    stage: int = 0,
    mtp: bool = True,
) -> dict[Part, int]:
    """Bytes of the weights on one GPU of a pipeline stage, by part.

    formats: of every linear, as `Stored.formats` (what is on disk) or `runtime_formats` gives
    them. Without ``mtp`` its blocks are left out: vLLM loads them for speculative decoding only.
    On disk: the deployment of one GPU.
    """
    found: dict[Part, int] = {}
    first, last = deployment.layers(stored.schema.config, stage)
    for entry, count in _entries(stored.schema):
        if entry.in_mtp:
            here = mtp and stage == deployment.pipeline_parallel - 1
        elif entry.block is None:
            here = _at_the_root(entry, stage, deployment)
        else:
            here = first <= entry.block.index < last
        if here:
            part: Part = "MTP" if entry.in_mtp else _PARTS.get(entry.role, "gates, norms, streams")
            size = count * _bytes(stored, entry, formats)
            found[part] = found.get(part, 0) + math.ceil(size / _divided(entry, deployment))
    return found


@lru_cache(maxsize=2)
def _entries(schema: Schema) -> tuple[tuple[Entry, int], ...]:
    """Every tensor, and how often it is there: the first expert stands for all of its block."""
    return tuple(
        (entry, schema.config.num_experts if entry.role == "routed_expert" else 1)
        for entry in schema.entries()
        if entry.role != "routed_expert" or entry.indices[1] == "0"
    )


def _at_the_root(entry: Entry, stage: int, deployment: Deployment) -> bool:
    """Embeddings are on the first stage, the head and the last norm on the last."""
    if entry.role == "embed":
        return stage == 0
    return stage == deployment.pipeline_parallel - 1


def _bytes(stored: Stored, entry: Entry, formats: Mapping[str, Format]) -> int:
    if not entry.template.row.linear:
        return math.prod(entry.shape) * _PLAIN.get(entry.format, 2)
    module = entry.module()
    name = list_of_experts(module) if entry.role == "routed_expert" else module
    if name not in formats:  # a checkpoint that lacks it: MTP, mostly
        return 0
    rows, columns = entry.shape
    config = stored.schema.config
    scale = _SCALE[config.scale_dtype]
    size = linear_bytes(formats[name], rows, columns, scale=scale, block=config.fp8_block)
    return size - 4 if formats[name] == "nvfp4" and name in stored.weight_only else size


def _divided(entry: Entry, deployment: Deployment) -> int:
    if entry.role == "routed_expert":
        return deployment.experts_divided
    if entry.role == "shared_expert":
        return 1 if deployment.shared_replicated else deployment.tensor_parallel
    return deployment.tensor_parallel if entry.role in _BY_HEADS else 1
