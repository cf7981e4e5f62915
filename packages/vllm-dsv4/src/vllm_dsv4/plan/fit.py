"""One plan: the fullest GPU's memory, and what is left for the KV cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Final

from nvfp4_codec.checkpoint.header import shown
from nvfp4_codec.schemas.deepseek_v4 import Schema

from ..errors import PlanError
from ..gpus import Gpus
from ..options import Options, runtime_formats
from ..stored import Format, Stored
from .buffers import Limits, buffers
from .deployment import FP4, Deployment, expert_formats
from .kv_cache import KVCache, kv_cache
from .weights import Part, weights

#: A context below this is no use: the model fits on paper only.
LEAST_CONTEXT = 4096
#: The context for which tables say how many requests are served at once.
USUAL_CONTEXT = 8192
#: Of a number in config.json, which vLLM keeps in 32 bits.
_MOST: Final = 2**31


@dataclass(frozen=True)
class Plan:
    """Memory of the fullest GPU, in bytes.

    on_disk: the whole checkpoint's weights, MTP included where it has them. weights, buffers: on
    this GPU, by part. usable: what vLLM takes of the GPU. cache: the KV cache's layout; in_flight:
    see `Limits.in_flight`.
    """

    gpus: Gpus
    deployment: Deployment
    limits: Limits
    on_disk: Mapping[Part, int]
    weights: Mapping[Part, int]
    buffers: Mapping[str, int]
    cache: KVCache = field(repr=False)
    in_flight: int = 0

    @property
    def usable(self) -> int:
        """Memory that vLLM takes of one GPU."""
        return int(self.gpus.memory * self.limits.gpu_memory_utilization)

    @property
    def kv_memory(self) -> int:
        """What is left for the KV cache; negative where the rest does not fit."""
        return self.usable - sum(self.weights.values()) - sum(self.buffers.values())

    @property
    def longest(self) -> int:
        """The longest context, in tokens, that a request may have; 0 if none."""
        return self.cache.longest(max(0, self.kv_memory), self.in_flight, self.limits.max_model_len)

    @property
    def concurrent(self) -> float:
        """Requests of the longest context that fit, over all data parallel ranks."""
        if not self.longest:
            return 0.0
        one = self.cache.concurrent(self.kv_memory, self.longest, self.in_flight)
        return one * self.deployment.data_parallel

    @property
    def generating(self) -> int:
        """Requests of `USUAL_CONTEXT` tokens that generate at once, over all data parallel ranks.

        Not more than a step may have.
        """
        context = min(USUAL_CONTEXT, self.limits.max_model_len)
        found = self.cache.generating(max(0, self.kv_memory), context, self.in_flight)
        return min(found, self.limits.step_requests(self.gpus)) * self.deployment.data_parallel

    @property
    def fits(self) -> bool:
        """Whether a context of some use is left room for."""
        return self.longest >= min(LEAST_CONTEXT, self.limits.max_model_len)

    def as_json(self) -> dict[str, Any]:
        """One object of plain values."""
        parallel = self.deployment
        return {
            "gpus": {
                "kind": self.gpus.kind,
                "per_node": self.gpus.count,
                "nodes": self.gpus.nodes,
                "memory": self.gpus.memory,
                "usable": self.usable,
            },
            "tensor_parallel": parallel.tensor_parallel,
            "pipeline_parallel": parallel.pipeline_parallel,
            "data_parallel": parallel.data_parallel,
            "expert_parallel": parallel.expert_parallel,
            "mega_moe": parallel.mega_moe,
            "mtp": self.limits.mtp,
            "checkpoint_bytes": sum(self.on_disk.values()),
            "checkpoint_bytes_without_mtp": sum(
                size for part, size in self.on_disk.items() if part != "MTP"
            ),
            "weights": dict(self.weights),
            "buffers": dict(self.buffers),
            "kv_memory": self.kv_memory,
            "kv_block_bytes": self.cache.block_bytes,
            "kv_bytes_per_token": self.cache.token_bytes,
            "kv_bytes_per_token_and_layer": {
                str(ratio): {"entries": entries, "indexer": indexer}
                for ratio, entries, indexer in self.cache.per_layer
            },
            "max_num_batched_tokens": self.limits.step_tokens(self.gpus),
            "max_model_len": self.limits.max_model_len,
            "longest_context": self.longest,
            "requests_of_that": round(self.concurrent, 2),
            "requests_of_8192": self.generating,
            "fits": self.fits,
        }


def plan(
    stored: Stored,
    gpus: Gpus,
    deployment: Deployment,
    limits: Limits,
    options: Options | None = None,
) -> Plan:
    """What a checkpoint takes on these GPUs, weights in the formats that vLLM will run.

    Raises PlanError for a division that vLLM refuses, OptionError as `runtime_formats` does.
    """
    config, options = stored.schema.config, options or Options()
    deployment.check(config)
    if deployment.mega_moe and gpus.family != "blackwell" and options.moe_kernel is None:
        raise PlanError(
            f"deep_gemm_mega_moe runs on Blackwell of the data center only, not on {gpus.kind}: "
            "leave --moe-backend to vLLM, or name a --moe-kernel that runs there."
        )
    if deployment.mega_moe:
        _check_experts(stored, options.moe_kernel)
    if deployment.gpus > gpus.total:
        raise PlanError(
            f"parallel sizes of {deployment.gpus} GPUs in all, on {gpus}: choose smaller ones."
        )
    formats = runtime_formats(stored, options)
    stages = range(deployment.pipeline_parallel)
    plans = [_stage(stored, formats, gpus, deployment, limits, stage) for stage in stages]
    return min(plans, key=lambda found: found.kv_memory / max(1, found.cache.block_bytes))


def _check_experts(stored: Stored, moe_kernel: str | None) -> None:
    """Source: vLLM 0.33.0, layers/fused_moe/deep_gemm_mega_moe.py (its two weight formats)."""
    takes: AbstractSet[Format] = FP4 if moe_kernel is None else {"nvfp4"}
    if other := sorted(expert_formats(stored) - takes):
        name = f"--moe-kernel {moe_kernel}" if moe_kernel else "MegaMoE (deep_gemm_mega_moe)"
        raise PlanError(
            f"the routed experts are stored as {' and '.join(other)}, and {name} takes "
            f"{' and '.join(sorted(takes))} only: leave it away, and vLLM chooses a kernel."
        )


def parameters(schema: Schema) -> tuple[int, int]:
    """Numbers in all of the model's tensors, scales not counted: without MTP blocks, and with."""
    counts = [0, 0]
    for entry in schema.entries():
        counts[entry.in_mtp] += math.prod(entry.shape)
    return counts[0], sum(counts)


def whole(stored: Stored, formats: Mapping[str, Format] | None = None) -> dict[Part, int]:
    """Bytes of a checkpoint's weights, MTP included, by part."""
    return weights(stored, formats or stored.formats, Deployment())


def _stage(
    stored: Stored,
    formats: Mapping[str, Format],
    gpus: Gpus,
    deployment: Deployment,
    limits: Limits,
    stage: int,
) -> Plan:
    config = stored.schema.config
    return Plan(
        gpus=gpus,
        deployment=deployment,
        limits=limits,
        on_disk=whole(stored),
        weights=weights(stored, formats, deployment, stage=stage, mtp=limits.mtp),
        buffers=buffers(config, gpus, deployment, limits, _integer(stored, "index_topk", 2048)),
        cache=kv_cache(
            config,
            _integer(stored, "sliding_window", 128),
            mtp=limits.mtp,
            here=deployment.layers(config, stage),
        ),
        in_flight=limits.in_flight(gpus, deployment),
    )


def context_of(stored: Stored) -> int:
    """The model's own longest context; raises PlanError where config.json does not say."""
    found = _integer(stored, "max_position_embeddings", 0)
    if found == 0:
        raise PlanError(
            "config.json has no max_position_embeddings: take it from the official checkpoint, or "
            "give --max-model-len."
        )
    return found


def _integer(stored: Stored, key: str, default: int) -> int:
    """A number of config.json, or the default if there is none; raises PlanError for no number."""
    value = stored.config.get(key)
    if value is None:
        return default
    if type(value) is not int or not 0 < value <= _MOST:
        raise PlanError(
            f"config.json: {key} is {shown(repr(value))}; a positive whole number is needed. Take "
            "it from the official config.json."
        )
    return value
