"""The two released models, for plans without a checkpoint at hand.

Sources: the official config.json of DeepSeek-V4-Pro and DeepSeek-V4-Flash. Only what memory depends
on is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, Literal, get_args

from nvfp4_codec.schemas.deepseek_v4 import Entry, ModelConfig, Role, Schema

from ..errors import PlanError
from ..stored import Format, Stored, linears

Model = Literal["pro", "flash"]
#: How a checkpoint stores the model: as DeepSeek does; with the routed experts in NVFP4 (NVIDIA's
#: checkpoints); with most linears in NVFP4 (`dsv4-quantize export --preset full`); with every
#: linear in NVFP4 that modelopt quantizes, compressors and wo_a among them.
Preset = Literal["official", "experts", "full", "everything"]

NAMES: Final[Mapping[Model, str]] = {"pro": "DeepSeek-V4-Pro", "flash": "DeepSeek-V4-Flash"}

_COMMON: Final[Mapping[str, Any]] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "hc_mult": 4,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
    "max_position_embeddings": 1048576,
    "topk_method": "noaux_tc",
    "expert_dtype": "fp4",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
_OWN: Final[Mapping[Model, Mapping[str, Any]]] = {
    "pro": {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "n_routed_experts": 384,
        "moe_intermediate_size": 3072,
        "index_topk": 1024,
        "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    },
    "flash": {
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
        "index_topk": 512,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    },
}  # fmt: skip

_FULL: Final[tuple[Role, ...]] = ("wq_a", "wkv", "wq_b", "wo_b", "shared_expert", "indexer_wq_b")
_OFFICIAL: Final[Mapping[str, Format]] = {"fp8_block": "fp8_block", "mxfp4": "mxfp4"}


def released_config(model: Model) -> dict[str, Any]:
    """The official config.json, as far as memory depends on it."""
    return {**_COMMON, **_OWN[model]}


def released(model: str, preset: Preset = "full") -> Stored:
    """A released model as a checkpoint of that preset would store it.

    Raises PlanError for a name that is none of the released models'.
    """
    for name in get_args(Model):
        if model == name:
            config, schema = released_config(name), _schema(name)
            formats = {module: _format(entry, preset) for module, entry in linears(schema)}
            return Stored(config, schema, "official", formats, has_mtp=True)
    raise PlanError(f"model {model!r} is not known; known are {', '.join(get_args(Model))}.")


@lru_cache
def _schema(model: Model) -> Schema:
    return Schema(ModelConfig.from_dict(released_config(model)))


def _format(entry: Entry, preset: Preset) -> Format:
    official = _OFFICIAL.get(entry.format, "bf16")
    role = entry.role
    if preset == "official":
        return official
    if role == "routed_expert":
        return "nvfp4"
    if preset == "everything" and (role in (*_FULL, "wo_a", "mtp_proj", "compressor")):
        return "nvfp4"
    if preset == "full" and role in _FULL and not entry.in_mtp:
        return "nvfp4"
    return official
