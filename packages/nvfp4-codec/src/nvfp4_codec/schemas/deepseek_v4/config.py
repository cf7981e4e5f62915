"""What the schema needs to know of a ``config.json``.

Two dialects are read: the official one (``compress_ratios``, ``num_hash_layers``) and the one
that transformers writes back (``layer_types``, ``mlp_layer_types``, ``compress_rates``), which has
lost the ratios of the MTP blocks. Source: the official config.json of DeepSeek-V4-Pro,
DeepSeek-V4-Flash and DeepSeek-V4-Flash-0731; transformers 5.20.2 ``DeepseekV4Config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ...checkpoint.files import read_config_file
from ...errors import CheckpointError

_RATIOS = {0, 4, 128}
# Far beyond any model: a hostile config.json must not cost memory before it is compared.
_MOST, _MOST_BLOCKS, _MOST_EXPERTS = 1 << 24, 1 << 12, 1 << 20
_HF_LAYER_TYPES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
# Dimension names of the table, and the key of config.json that holds each.
_DIMENSIONS = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "head_dim": "head_dim",
    "q_rank": "q_lora_rank",
    "groups": "o_groups",
    "o_rank": "o_lora_rank",
    "experts": "n_routed_experts",
    "inner": "moe_intermediate_size",
    "top_k": "num_experts_per_tok",
    "streams": "hc_mult",
    "index_heads": "index_n_heads",
    "index_dim": "index_head_dim",
}


@dataclass(frozen=True)
class Block:
    """One transformer block: a main layer or an MTP block.

    ``ratio`` is its KV compression (0, 4 or 128); ``hashed`` blocks route by token id;
    ``first`` and ``last`` speak of the block's position among its kind.
    """

    kind: Literal["layers", "mtp"]
    index: int
    ratio: int
    hashed: bool
    first: bool
    last: bool


@dataclass(frozen=True)
class ModelConfig:
    """The structure of one DeepSeek-V4 model.

    ``dimensions`` maps the table's dimension names to sizes. ``dspark`` tells the block-draft
    variant of the MTP blocks (DeepSeek-V4-Flash-0731) from the plain one. ``expert_format`` is
    "mxfp4" in released models and "fp8_block" in the Base ones; ``scale_dtype`` is the dtype of
    FP8 block scales in safetensors' spelling.
    """

    blocks: tuple[Block, ...]
    dimensions: Mapping[str, int] = field(hash=False)
    dspark: bool
    expert_format: Literal["mxfp4", "fp8_block"]
    scale_dtype: Literal["F8_E8M0", "F32"]
    fp8_block: tuple[int, int]

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Read ``config.json``; raises CheckpointError for no file, no JSON, and as `from_dict`."""
        return cls.from_dict(read_config_file(Path(path), str(path)))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the content of a ``config.json``.

        Raises:
            CheckpointError: it is not DeepSeek-V4, or a key is missing or contradicts another.
        """
        try:
            return cls._read(config)
        except (AttributeError, TypeError, ValueError) as error:
            raise _problem(f"a value is of the wrong type ({error}): repair it") from None

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> ModelConfig:
        model_type = config.get("model_type")
        if model_type != "deepseek_v4":
            raise _problem(f"model_type is {model_type!r}; this schema describes 'deepseek_v4'")
        if (shared := config.get("n_shared_experts", 1)) != 1:
            # The official code allows one only; how several would be stored is unknown.
            raise _problem(f"n_shared_experts is {shared}; DeepSeek-V4 has 1")
        targets = config.get("dspark_target_layer_ids") or ()
        dimensions = {name: _integer(config, key) for name, key in _DIMENSIONS.items()}
        dimensions["targets"] = len(targets)
        dimensions["markov"] = _integer(config, "dspark_markov_rank") if targets else 0
        quantization = config.get("quantization_config") or {}
        rows, columns = quantization.get("weight_block_size") or (128, 128)
        if not (type(rows) is int and type(columns) is int and rows > 0 and columns > 0):
            raise _problem(
                f"weight_block_size is {[rows, columns]!r}; two positive integers needed"
            )
        blocks = _blocks(config, dspark=bool(targets))
        if dimensions["experts"] * len(blocks) > _MOST_EXPERTS:
            raise _problem(f"n_routed_experts is {dimensions['experts']} in {len(blocks)} layers; "
                           f"at most {_MOST_EXPERTS} experts are believed")  # fmt: skip
        return cls(
            blocks=blocks,
            dimensions=dimensions,
            dspark=bool(targets),
            expert_format=_expert_format(config.get("expert_dtype", "fp4")),
            scale_dtype="F8_E8M0" if quantization.get("scale_fmt", "ue8m0") == "ue8m0" else "F32",
            fp8_block=(rows, columns),
        )

    @property
    def num_experts(self) -> int:
        """Routed experts of a block."""
        return self.dimensions["experts"]

    def without_mtp(self) -> ModelConfig:
        """The same model as exporters write it that drop the MTP blocks."""
        return replace(self, blocks=tuple(b for b in self.blocks if b.kind == "layers"))


def _blocks(config: Mapping[str, Any], *, dspark: bool) -> tuple[Block, ...]:
    num_layers = _integer(config, "num_hidden_layers")
    ratios = _compress_ratios(config, num_layers)
    num_mtp = _mtp_count(config, len(ratios) - num_layers, dspark=dspark)
    if num_layers + num_mtp > _MOST_BLOCKS:
        raise _problem(f"{num_layers} layers and {num_mtp} MTP blocks; at most {_MOST_BLOCKS} are "
                       "believed")  # fmt: skip
    # transformers' config has lost the tail; every released MTP block is uncompressed.
    ratios += [0] * (num_layers + num_mtp - len(ratios))
    num_hashed = _num_hashed(config)
    layers = [
        Block("layers", i, ratios[i], i < num_hashed, i == 0, i == num_layers - 1)
        for i in range(num_layers)
    ]
    mtp = [
        Block("mtp", i, ratios[num_layers + i], False, i == 0, i == num_mtp - 1)
        for i in range(num_mtp)
    ]
    return (*layers, *mtp)


def _compress_ratios(config: Mapping[str, Any], num_layers: int) -> list[int]:
    ratios = config.get("compress_ratios")
    if ratios is None:
        types = config.get("layer_types")
        if types is None:
            raise _problem("neither compress_ratios nor layer_types is there: take them from the "
                           "source checkpoint's config.json")  # fmt: skip
        ratios = [_HF_LAYER_TYPES.get(name, name) for name in types]
    if wrong := [ratio for ratio in ratios if ratio not in _RATIOS]:
        raise _problem(f"compress_ratios holds {wrong[0]!r}; known are {sorted(_RATIOS)}")
    if len(ratios) < num_layers:
        raise _problem(f"compress_ratios has {len(ratios)} entries for {num_layers} layers")
    return list(ratios)


def _mtp_count(config: Mapping[str, Any], tail: int, *, dspark: bool) -> int:
    declared = config.get("num_nextn_predict_layers")
    if declared is None:
        return tail
    if declared == 0 or tail == 0:
        return int(declared)
    # DeepSeek-V4-Flash-0731 declares 1 and has 3: there the tail of compress_ratios counts.
    if declared != tail and not dspark:
        raise _problem(f"num_nextn_predict_layers is {declared}, but compress_ratios has {tail} "
                       "entries beyond num_hidden_layers")  # fmt: skip
    return tail


def _num_hashed(config: Mapping[str, Any]) -> int:
    if (count := config.get("num_hash_layers")) is not None:
        return int(count)
    types = config.get("mlp_layer_types")
    if types is None:
        raise _problem("neither num_hash_layers nor mlp_layer_types is there: take them from the "
                       "source checkpoint's config.json")  # fmt: skip
    count = list(types).count("hash_moe")
    if list(types[:count]) != ["hash_moe"] * count:
        raise _problem("mlp_layer_types has hash_moe layers after others; they come first")
    return count


def _expert_format(expert_dtype: Any) -> Literal["mxfp4", "fp8_block"]:
    if expert_dtype == "fp4":
        return "mxfp4"
    if expert_dtype == "fp8":
        return "fp8_block"
    raise _problem(f"expert_dtype is {expert_dtype!r}; known are 'fp4' and 'fp8'")


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        raise _problem(f"{key} is {value!r}; a positive integer up to {_MOST} is needed")
    return value


def _problem(message: str) -> CheckpointError:
    return CheckpointError(message, file="config.json")
