"""Functions that run in the vLLM process; `Harness.call` takes them by name."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def registered() -> dict[str, Any]:
    """What the plugin leaves in vLLM's registries, called once and twice, and what it imports."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    imported = [name for name in sys.modules if name.startswith(("vllm.models", "vllm_dsv4"))]
    first = _registries()

    from vllm_dsv4.plugin import register

    register()
    return {"first": first, "second": _registries(), "imported": imported}


def _inspect_here() -> None:
    """vLLM inspects each model class in a process of its own; once is tested, and takes long."""
    from vllm.model_executor.models import registry

    vars(registry)["_run_in_subprocess"] = lambda function: function()


def inspected(folder: Path, cache: Path) -> None:
    """vLLM inspects the class for a checkpoint and writes what it found below ``cache``."""
    os.environ["VLLM_CACHE_ROOT"] = str(cache)
    from vllm_dsv4.testing.harness import engine_config

    engine_config(folder)


def _registries() -> dict[str, Any]:
    from vllm import ModelRegistry
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        get_quantization_config,
    )
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    models = ModelRegistry.models
    ours = ("DeepseekV4ForCausalLM", "DeepSeekV4MTPModel")
    return {
        "models": {name: f"{models[name].module_name}:{models[name].class_name}" for name in ours},
        "others": sum("vllm_dsv4" in getattr(m, "module_name", "") for m in models.values()),
        "quantization": QUANTIZATION_METHODS.count("dsv4_nvfp4"),
        "hook": MODELS_CONFIG_MAP["DeepseekV4ForCausalLM"].__module__,
        "hooks": sum("vllm_dsv4" in hook.__module__ for hook in MODELS_CONFIG_MAP.values()),
        "claim": get_quantization_config("dsv4_nvfp4").__module__,
    }


def with_another_vllm(folder: Path, version: str) -> dict[str, Any]:
    """What a vLLM of this version would say to a checkpoint, and what it has of ours."""
    from vllm_dsv4 import compat

    _inspect_here()
    vars(compat)["version"] = lambda package: version
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm import ModelRegistry

    from vllm_dsv4.testing.harness import engine_config

    model = ModelRegistry.models["DeepseekV4ForCausalLM"]
    try:
        engine_config(folder)
        error = ""
    except Exception as refusal:
        error = f"{type(refusal).__name__}: {refusal}"
    return {"model": model.module_name, "error": error}


def load(without_plugin: bool = False, **keywords: Any) -> Any:
    """`vllm_dsv4.testing.harness.load`."""
    if without_plugin:
        os.environ["VLLM_PLUGINS"] = os.environ["VLLM_PLUGINS"].partition(",")[0]
    _inspect_here()
    from vllm_dsv4.testing.harness import load

    return load(**keywords)


def load_ranks(ranks: list[int], **keywords: Any) -> list[Any]:
    """The same for several ranks, one after another."""
    _inspect_here()
    from vllm_dsv4.testing.harness import load

    return [load(rank=rank, **keywords) for rank in ranks]


def configured(**keywords: Any) -> dict[str, Any]:
    """What vLLM's config says of a checkpoint, and what was logged as a warning meanwhile."""
    import logging

    _inspect_here()
    from vllm_dsv4.testing.harness import engine_config

    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm_dsv4").addHandler(handler)
    config = engine_config(**keywords)
    hf_config = config.model_config.hf_config
    return {
        "quantization": config.model_config.quantization,
        "quant_config": type(config.quant_config).__name__,
        "topk_method": getattr(hf_config, "topk_method", None),
        "architecture": config.model_config.architecture,
        "warnings": messages,
    }


def l2_activation_scales(**keywords: Any) -> Any:
    """What vLLM's MegaMoE experts quantize their second input with, by layer."""
    _inspect_here()
    from vllm_dsv4.testing.harness import load

    def inspect(model: Any) -> dict[str, Any]:
        return {"scales": [layer.ffn.experts.l2_activation_scale for layer in model.model.layers]}

    return load(inspect=inspect, **keywords).other["scales"]


def promised_and_stored(folder: Path) -> Any:
    """The formats of a model on a hub, of which only config.json is at hand, and of its folder."""
    import json

    from vllm.transformers_utils import repo_utils

    from vllm_dsv4.config_hook import stored_of

    config = json.loads((folder / "config.json").read_text())
    repo_utils.get_hf_file_to_dict = lambda file, model, revision: config
    return [dict(stored_of(model, None).formats) for model in ("somebody/model", str(folder))]


def _run_layer(layer: Any, x: Any, weights: Any, ids: Any) -> Any:
    """A whole MoE layer, whose gate needs a GPU: it chooses what it is told to."""
    import inspect

    import torch

    from vllm_dsv4 import model

    real = inspect.signature(model.fused_topk_bias)

    def chosen(**keywords: Any) -> Any:
        real.bind(**keywords)
        assert keywords["topk"] == ids.shape[1]
        assert torch.equal(keywords["gating_output"], x @ layer.gate.weight.T)
        return weights, ids

    vars(model)["fused_topk_bias"] = chosen
    layer.gate.forward = lambda tokens: (tokens @ layer.gate.weight.T, None)
    layer.shared_experts = None
    return layer(x)


def with_backend(site: str, mtp: bool = False, **keywords: Any) -> dict[str, Any]:
    """Loads a model whose experts run on a backend of the site, and runs every layer's experts."""
    import torch

    _inspect_here()
    sys.path.insert(0, site)
    from vllm.model_executor.warmup.deep_gemm_warmup import _mega_moe_may_use_deep_gemm

    from vllm_dsv4.kernel_experts import KernelExperts
    from vllm_dsv4.testing.harness import load

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 256, generator=generator).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(16, generator=generator)[:2] for _ in range(5)])
    weights = torch.rand(5, 2, generator=generator)

    def inspect(model: Any) -> dict[str, Any]:
        experts = [m for m in model.modules() if isinstance(m, KernelExperts)]
        return {
            "y": [one(x, weights, ids) for one in experts],
            "with_shared": experts[0](x, weights, ids, lambda tokens: 2 * tokens),
            "layer": _run_layer(model.model.layers[1].ffn, x, weights, ids) if not mtp else None,
            "deep_gemm": sum(map(_mega_moe_may_use_deep_gemm, model.modules())),
        }

    model = load(inspect=inspect, mtp=mtp, **keywords)
    toy = sys.modules.get("toy_backend")
    return {
        **model.other, "x": x, "ids": ids, "weights": weights,
        "shapes": toy.Toy.made if toy else None,
        "counts": dict(model.loaded_counts), "parameters": list(model.parameters),
    }  # fmt: skip


def load_damaged(damage: str, **keywords: Any) -> None:
    """Loads with a mistake somewhere on the way."""
    _inspect_here()
    import torch

    from vllm_dsv4.testing.harness import load
    from vllm_dsv4.transform import stream

    real = {name: getattr(stream, name) for name in ("to_fp8", "to_bf16", "with_one_scale")}
    apply = stream.Transform.apply

    def ones(parts: Any, stored: Any, *, e8m0: bool) -> Any:
        made, report = real["to_fp8"](parts, stored, e8m0=e8m0)
        made["scale"].view(torch.uint8).fill_(127)
        return made, report

    def without_scale_2(parts: Any, stored: Any) -> Any:
        return real["to_bf16"]({**parts, "weight_scale_2": torch.tensor(1.0)}, stored)

    expert = "layers.1.ffn.experts.0"
    wrong_expert = {
        ("an expert's nibbles swapped", "w3.weight"): lambda t: (t >> 4) | (t << 4),
        ("an expert's scale rows turned", "w2.weight_scale"): lambda t: t.roll(1, 0),
        ("an expert's gate rows turned", "w1.weight_scale"): lambda t: t.roll(8, 0),
    }

    def changed(self: Any, weights: Any) -> Any:
        for name, tensor in apply(self, weights):
            edit = wrong_expert.get((damage, name.removeprefix(f"{expert}.")))
            if edit is not None:
                yield name, edit(tensor.view(torch.uint8)).view(tensor.dtype)
                continue
            if damage == "nibbles swapped" and name.endswith(".attn.wq_b.weight"):
                yield name, (tensor >> 4) | (tensor << 4)
            elif damage == "input_scale multiplied in" and name.endswith("wq_b.weight_scale_2"):
                yield name, tensor * 0.01
            elif damage == "not written" and name == "layers.2.attn.wo_b.weight_scale":
                yield name, tensor.new_zeros(tensor.shape)
            elif damage != "a tensor lost" or name != "layers.1.attn.attn_sink":
                yield name, tensor

    if damage == "ones for scales":
        vars(stream)["to_fp8"] = ones
    elif damage == "no weight_scale_2":
        vars(stream)["to_bf16"] = without_scale_2
    elif damage == "no common scale":
        vars(stream)["with_one_scale"] = lambda scales, weights: (dict(scales), ())
    else:
        stream.Transform.apply = changed  # type: ignore[method-assign]
    load(**keywords)


def travelled(folder: Path) -> dict[str, Any]:
    """What a worker, which gets vLLM's config by pickle, knows of a checkpoint it cannot read."""
    _inspect_here()
    import pickle

    from vllm.config import set_current_vllm_config

    from vllm_dsv4 import config_hook
    from vllm_dsv4.testing.harness import engine_config

    sent = pickle.dumps(engine_config(folder))
    config_hook.stored_of.cache_clear()
    folder.rename(folder.with_name("gone"))
    arrived = pickle.loads(sent)
    with set_current_vllm_config(arrived):
        return dict(arrived.quant_config.formats)
