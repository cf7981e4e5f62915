"""What vLLM itself says of DeepSeek-V4's KV cache and of its defaults, as JSON on standard output.

Run as a program, in a process of its own: ``ask_vllm.py CASES`` with a JSON list of
``{"ratios", "head_dim", "index_dim", "window", "stages", "contexts", "in_flight"}``. Layer objects
are vLLM's own, made without a model; nothing is computed here.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace as Having
from typing import Any
from unittest.mock import patch

import torch

CONFIG = Having(compilation_config=Having(static_forward_context={}))
MODULES = ("vllm.models.deepseek_v4.attention", "vllm.models.deepseek_v4.compressor",
           "vllm.v1.attention.backends.mla.sparse_swa")  # fmt: skip


def specs(case: dict[str, Any], asked: Any) -> dict[str, Any]:
    """What every layer's parts ask of the KV cache, by name."""
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
    from vllm.models.deepseek_v4.compressor import CompressorStateCache
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

    CONFIG.compilation_config.static_forward_context.clear()
    head, index, cache = case["head_dim"], case["index_dim"], asked.cache_config
    found = {}
    for layer, ratio in enumerate(case["ratios"]):
        window = DeepseekV4SWACache(head, case["window"], torch.uint8, f"{layer}.window", cache)
        found[f"{layer}.window"] = window.get_kv_cache_spec(asked)
        attention = Having(compress_ratio=max(1, ratio), kv_cache_dtype="fp8_ds_mla", head_dim=head)
        own = DeepseekV4Attention.get_kv_cache_spec(attention, asked)
        if own is None:
            continue
        found[f"{layer}.compressed"] = own
        widths = {"state": head}
        if ratio == 4:
            indexer = DeepseekV4IndexerCache(
                index + index // 128 * 4, torch.uint8, f"{layer}.index", cache, 4
            )
            found[f"{layer}.index"] = indexer.get_kv_cache_spec(asked)
            widths["index_state"] = index
        for name, width in widths.items():
            full = 2 * (2 if ratio == 4 else 1) * width
            state = CompressorStateCache(full, torch.float32, ratio, f"{layer}.{name}")
            found[f"{layer}.{name}"] = state.get_kv_cache_spec(asked)
    return found


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Block bytes of every stage, and the blocks that a request takes, by context."""
    from vllm.v1.core import kv_cache_planning as planning
    from vllm.v1.kv_cache_interface import KVCacheLayout

    layout = KVCacheLayout.BLHNC
    asked = Having(
        cache_config=Having(
            cache_dtype="fp8_ds_mla", block_size=256, get_resolved_kv_cache_layout=lambda: layout
        ),
        scheduler_config=Having(disable_hybrid_kv_cache_manager=False),
        attention_config=Having(hisparse_config=None),
        speculative_config=None,
        parallel_config=Having(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        max_in_flight_tokens=case["in_flight"],
    )
    found = specs(case, asked)
    groups = planning.get_kv_cache_groups(asked, found)
    blocks = {}
    for context in case["contexts"]:
        asked.model_config = Having(max_model_len=context)
        blocks[context] = sum(g.kv_cache_spec.max_memory_usage_pages(asked) for g in groups)
    block_bytes = []
    for first, end in case["stages"]:
        worker = {n: s for n, s in found.items() if first <= int(n.partition(".")[0]) < end}
        here = planning._project_kv_cache_groups_to_worker(groups, worker)
        block_bytes.append(planning._get_kv_cache_bytes_per_block(here, layout))
    return {"groups": len(groups), "block_bytes": block_bytes, "blocks": blocks}


def main() -> None:
    from vllm.config import CacheConfig
    from vllm.distributed.utils import get_pp_indices
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    patches = [patch(f"{module}.get_current_vllm_config", lambda: CONFIG) for module in MODULES]
    for each in patches:
        each.start()
    steps = {}
    for gib in (178, 139, 79, 47):
        platform = Having(
            get_device_total_memory=lambda gib=gib: gib << 30,
            get_device_name=lambda: "NVIDIA",
            is_device_capability=lambda capability: False,
            is_tpu=lambda: False,
            is_cpu=lambda: False,
        )
        with patch("vllm.engine.arg_utils.current_platform", platform):
            tokens, requests = EngineArgs.get_batch_defaults(1)
        server = UsageContext.OPENAI_API_SERVER
        steps[gib] = (tokens[server], requests[server])
    document = {
        "cases": [answer(case) for case in json.loads(sys.argv[1])],
        "stages": {n: [get_pp_indices(61, rank, n) for rank in range(n)] for n in (1, 2, 3, 4)},
        "steps": steps,
        "gpu_memory_utilization": CacheConfig.model_fields["gpu_memory_utilization"].default
        if hasattr(CacheConfig, "model_fields")
        else CacheConfig.gpu_memory_utilization,
    }
    sys.stdout.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
