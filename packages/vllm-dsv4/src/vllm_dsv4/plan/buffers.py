"""Memory besides weights and KV cache: activations, workspaces, buffers that ranks share.

vLLM measures this itself when it starts, by a run with as many tokens as a step may have; here the
large terms of that run are added up. What cannot be computed is an allowance, by its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nvfp4_codec.schemas.deepseek_v4 import ModelConfig

from ..gpus import GIB, Gpus
from .deployment import Deployment

BF16, FP32, INT32 = 2, 4, 4
#: CUDA context, NCCL, captured CUDA graphs, fragmentation: an assumption, not a formula.
ALLOWANCE: Final = 4 * GIB


@dataclass(frozen=True)
class Limits:
    """What a server allows; vLLM's defaults where nothing is given.

    max_model_len: tokens of a context. max_num_batched_tokens: of a step on one rank;
    max_num_seqs: requests of a step; None are vLLM's defaults for the GPU.
    gpu_memory_utilization: the part of a GPU that vLLM takes. mtp: speculative decoding with the
    MTP blocks.
    """

    max_model_len: int
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float = 0.92
    mtp: bool = False

    def step_tokens(self, gpus: Gpus) -> int:
        """Tokens of a step. Source: vLLM 0.33.0, engine/arg_utils.py `get_batch_defaults`."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        if gpus.memory >= 160 * GIB:
            return 16384
        return 8192 if gpus.memory >= 70 * GIB else 2048

    def step_requests(self, gpus: Gpus) -> int:
        """Requests of a step. Source: as for `step_tokens`."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        return 1024 if gpus.memory >= 70 * GIB else 256

    def in_flight(self, gpus: Gpus, deployment: Deployment) -> int:
        """Tokens of all steps that overlap: one for each pipeline stage, and the next one.

        Source: vLLM 0.33.0, config/vllm.py `max_in_flight_tokens`, with asynchronous scheduling.
        """
        return (deployment.pipeline_parallel + 1) * self.step_tokens(gpus)


def buffers(
    config: ModelConfig, gpus: Gpus, deployment: Deployment, limits: Limits, index_topk: int
) -> dict[str, int]:
    """Bytes on one GPU by name.

    index_topk: of config.json, the entries that an indexer selects.
    """
    tokens = limits.step_tokens(gpus)
    found = {
        "activations": _activations(config, deployment, tokens, limits.step_requests(gpus)),
        "attention workspace": _workspace(config, tokens, limits.max_model_len, index_topk),
        "allowance": ALLOWANCE,
    }
    if deployment.mega_moe:
        found["MegaMoE buffer"] = mega_moe_buffer(
            ranks=deployment.experts_divided,
            experts=config.num_experts,
            tokens=tokens,
            top_k=config.dimensions["top_k"],
            hidden=config.dimensions["hidden"],
            inner=config.dimensions["inner"],
        )
    return found


def _activations(config: ModelConfig, deployment: Deployment, tokens: int, requests: int) -> int:
    """The largest tensors that are alive at once in a step.

    The residual streams three times (before, after, and mixed), queries and outputs of attention
    with heads padded to 64 or 128 (models/deepseek_v4/nvidia/flashmla.py `get_padded_num_q_heads`),
    the routed experts' inputs and both outputs (not in the fused kernel), and float32 logits twice.
    """
    dims = config.dimensions
    heads = 64 if dims["heads"] // deployment.tensor_parallel <= 64 else 128
    streams = 3 * tokens * dims["streams"] * dims["hidden"] * BF16
    attention = 2 * tokens * heads * dims["head_dim"] * BF16
    routed = tokens * dims["top_k"] * (2 * dims["hidden"] + 2 * dims["inner"]) * BF16
    logits = 2 * min(requests, tokens) * dims["vocab"] * FP32
    return streams + attention + (0 if deployment.mega_moe else routed) + logits


def _workspace(config: ModelConfig, tokens: int, context: int, index_topk: int) -> int:
    """What prefill gathers, what the indexer scores, and tables of indices.

    Sources: vLLM 0.33.0, models/deepseek_v4/nvidia/flashmla.py (four requests' compressed context,
    window and step in BF16), v1/attention/backends/mla/indexer.py `get_max_prefill_buffer_size`
    (132 bytes an entry; the two share one workspace), config/vllm.py (the factor, 5 or 2),
    envs.py VLLM_SPARSE_INDEXER_MAX_LOGITS_MB, models/deepseek_v4/sparse_mla.py (ratio 128).
    """
    ratios = {block.ratio for block in config.blocks}
    head, wide = config.dimensions["head_dim"], -(-index_topk // 128) * 128 + 128
    entries = math.ceil(context / min(ratios - {0}, default=context))
    gathered = 4 * (entries + 128 + tokens) * head * BF16 + tokens * (wide + 1) * INT32
    total = gathered
    if 4 in ratios:
        factor = 5 if context <= 256 * 1024 else 2
        total = max(gathered, context * (576 * 2 // 132) * factor // 4 * 132)
        total += 512 * 2**20 + tokens * index_topk * INT32
    if 128 in ratios:
        total += 2 * tokens * (-(-context // (128 * 128)) * 128) * INT32
    return total


def mega_moe_buffer(
    *, ranks: int, experts: int, tokens: int, top_k: int, hidden: int, inner: int
) -> int:
    """Bytes of the symmetric buffer of DeepGEMM's NVFP4 kernel on one rank, at most.

    Source: the bundled DeepGEMM of vLLM 0.33.0, include/deep_gemm/layout/{mega_moe,nvfp4_mega_moe}
    .cuh: signals, routing tables, this rank's tokens and their scales, top_k outputs for each, and
    a ring in which received tokens wait. How long the ring is DeepGEMM decides by the GPU: `_ring`.
    """
    tokens = _up(tokens, 1920)
    pool = _up(ranks * tokens * min(top_k, experts // ranks) + experts // ranks * 239, 1920)
    total = _signals() + experts * tokens * INT32 + pool * 12
    total = _up(total, 16)
    total += tokens * (hidden // 2 + hidden // 16 + top_k * (8 + 4) + FP32)
    total += tokens * top_k * hidden * BF16
    # Scales of a block of 8 tokens take the room of 128.
    waiting = hidden // 2 + inner // 2 + (hidden + inner) // 16 * (128 // 8) + FP32
    return total + _ring(pool, hidden, inner) * waiting


#: By shape (hidden, inner): a part of all tokens that may arrive, and tokens besides. The least
#: that covers what DeepGEMM chose on a B200 (148 SMs) for 1 to 32 ranks and 1,024 to 32,768 tokens.
RING: Final[Mapping[tuple[int, int], tuple[float, int]]] = {
    (7168, 3072): (0.1434, 4608),
    (4096, 2048): (0.0, 3840),
}


def _ring(pool: int, hidden: int, inner: int) -> int:
    """Tokens in the ring; for a shape that was not asked for, all that may arrive."""
    part, more = RING.get((hidden, inner), (1.0, 0))
    return min(pool, math.ceil(pool * part) + more)


def _signals() -> int:
    """Counters of blocks, experts and ranks: fixed, whatever the model."""
    fixed = _up(4 * 4 + 4 + 2 * 4 + 4 * 2 * 4, 128)
    by_rank = 2 * _up(72 * 8, 128)
    by_expert = 2 * 2048 * 8 + 512 * 8
    by_block = (4 + 4 + 8 + 4) * 2**20 + 4 * 2**15
    return _up(fixed + by_rank + by_expert + by_block, 128)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
