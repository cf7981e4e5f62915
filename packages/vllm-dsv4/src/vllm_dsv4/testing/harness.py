"""Builds vLLM's real model of a checkpoint on the stand-in platform and loads it.

Everything goes as in a worker: the plugin by its entry point, the config by vLLM's argument
classes, the class by its registry, the weights by its loader. What comes after loading (packing
weights for kernels) is left out: it needs the kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from .loaded import LoadedModel
from .ranks import simulated_rank


def load(
    folder: Path,
    *,
    tp: int = 1,
    rank: int = 0,
    pp: int = 1,
    pp_rank: int = 0,
    expert_parallel: bool = False,
    moe_backend: str = "auto",
    mtp: bool = False,
    options: Mapping[str, Any] | None = None,
    inspect: Callable[[nn.Module], Mapping[str, Any]] | None = None,
    **arguments: Any,
) -> LoadedModel:
    """Loads a checkpoint as rank ``rank`` of ``tp`` in stage ``pp_rank`` of ``pp``.

    Raises what vLLM and the plugin raise.

    mtp: the draft model instead. options: those of ``--additional-config``'s "vllm_dsv4".
    inspect: called with the loaded model; what it returns becomes ``other``. arguments: further
    ones of vLLM's EngineArgs.
    """
    if mtp:
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 1}
    config = engine_config(
        folder, tp=tp, pp=pp, expert_parallel=expert_parallel, moe_backend=moe_backend,
        options=options, **arguments,
    )  # fmt: skip
    model_config = config.model_config
    if mtp:
        assert config.speculative_config is not None
        model_config = config.speculative_config.draft_model_config
    with simulated_rank(rank, tp, pp_rank, pp), set_current_vllm_config(config):
        with set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(config, model_config=model_config)
        counts: Counter[str] = Counter()
        _count_loads(model, counts)
        get_model_loader(config.load_config).load_weights(model, model_config)
        other = inspect(model) if inspect is not None else {}
    return LoadedModel(
        parameters={name: parameter.data.clone() for name, parameter in model.named_parameters()},
        loaded_counts=counts,
        quant_methods=_quant_methods(model),
        class_name=type(model).__name__,
        other=other,
    )


def engine_config(
    folder: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    expert_parallel: bool = False,
    moe_backend: str = "auto",
    options: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> VllmConfig:
    """vLLM's config for a small engine of this checkpoint, made as ``vllm serve`` makes it."""
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_batched_tokens=512,
        max_num_seqs=4,
        block_size=256,
        enforce_eager=True,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        enable_expert_parallel=expert_parallel,
        moe_backend=moe_backend,
        additional_config={"vllm_dsv4": dict(options)} if options else {},
        **arguments,
    ).create_engine_config()


def _count_loads(model: nn.Module, counts: Counter[str]) -> None:
    for name, parameter in model.named_parameters():
        _wrap(parameter, name, counts)


def _wrap(parameter: nn.Parameter, name: str, counts: Counter[str]) -> None:
    original = getattr(parameter, "weight_loader", default_weight_loader)

    def counting(*positional: Any, **keywords: Any) -> Any:
        result = original(*positional, **keywords)
        if result is not False:  # an expert of another rank
            counts[name + _shard(positional[2:], keywords)] += 1
        return result

    # vLLM's parameters have a read-only property over this attribute.
    attribute = "_weight_loader" if hasattr(parameter, "_weight_loader") else "weight_loader"
    setattr(parameter, attribute, counting)


def _shard(positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> str:
    if "expert_id" in keywords:
        return f"[{keywords['expert_id']}.{keywords['shard_id']}]"
    if not positional:
        return ""
    (shard,) = positional
    if isinstance(shard, str):  # MegaMoE's shared expert is told by the tensor's name
        return f"[{shard.split('.')[-2]}]"
    return f"[{shard}]"


def _quant_methods(model: nn.Module) -> dict[str, str]:
    found = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            kernel = getattr(method, "kernel", None) or getattr(method, "fp8_linear", None)
            suffix = "" if kernel is None else f"/{type(kernel).__name__}"
            found[name] = type(method).__name__ + suffix
    return found
