"""``quantization_config`` of a checkpoint that is official but for routed experts in NVFP4.

That is what NVIDIA publishes (modelopt's examples/deepseek/deepseek_v4): quant_method "fp8", which
vLLM 0.33 reads as DeepSeek's FP8 with NVFP4 experts because of ``moe_quant_algo``. Everything else
has its official format, so a module stands in ``quantized_layers`` if it is a list of experts, by
its official name, and else matches a glob of ``ignore``.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

from .schema import Schema

NVFP4: Final[Mapping[str, Any]] = {"quant_algo": "NVFP4", "group_size": 16}
FP8_CACHE: Final[Mapping[str, Any]] = {"dynamic": False, "num_bits": 8, "type": "float"}
_VALUES: Final[Mapping[str, Any]] = {
    "dynamic": False, "num_bits": 4, "type": "float", "group_size": 16,
}  # fmt: skip

#: What NVIDIA's experts-only configs ignore, as far as the model has it.
_IGNORED: Final = ("*.attn.*", "*.ffn.shared_experts.*", "head")
#: What the source's block says of its FP8; anything else in it would describe other tensors.
FP8_KEYS: Final = ("activation_scheme", "fmt", "scale_fmt", "weight_block_size")


def experts_only_layers(schema: Schema) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """``quantized_layers`` and ``ignore``: lists of experts, and globs for all other linears."""
    layers: dict[str, dict[str, Any]] = {}
    globs = list(_IGNORED)
    for entry in schema.entries():
        module = entry.module()
        if entry.role == "routed_expert":
            layers.setdefault(module.rsplit(".", 2)[0], dict(NVFP4))
        elif entry.template.row.linear and not any(fnmatchcase(module, glob) for glob in globs):
            globs.append(entry.template.official.removesuffix(".weight").replace("#", "*"))
    return layers, globs


def experts_only_block(
    schema: Schema,
    source: Mapping[str, Any],
    producer: Mapping[str, str],
    *,
    fp8_cache: bool = True,
) -> dict[str, Any]:
    """The whole block.

    source: the block it starts from, whose description of the FP8 is kept. fp8_cache: whether the
    KV cache is to be FP8.
    """
    layers, ignore = experts_only_layers(schema)
    group = {"input_activations": dict(_VALUES), "weights": dict(_VALUES), "targets": ["Linear"]}
    block: dict[str, Any] = {key: value for key, value in source.items() if key in FP8_KEYS}
    block |= {
        "quant_method": "fp8",
        "quant_algo": "MIXED_PRECISION",
        "config_groups": {"group_0": group},
        "quantized_layers": layers,
        "ignore": ignore,
        "producer": dict(producer),
        "moe_quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": "FP8" if fp8_cache else None,
    }
    if fp8_cache:
        block["kv_cache_scheme"] = dict(FP8_CACHE)
    return block


def hf_quant_config(
    layers: Mapping[str, Mapping[str, Any]],
    ignore: list[str],
    producer: Mapping[str, str],
    *,
    fp8_cache: bool = True,
) -> dict[str, Any]:
    """hf_quant_config.json, which older readers prefer, of any mixed checkpoint."""
    return {
        "producer": dict(producer),
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": "FP8" if fp8_cache else None,
            "group_size": 16,
            "quantized_layers": dict(layers),
            "exclude_modules": ignore,
        },
    }
