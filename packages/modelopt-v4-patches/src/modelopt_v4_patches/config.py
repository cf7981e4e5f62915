"""config.json and hf_quant_config.json of an export.

Both start from the source's config.json, of which nothing but ``quantization_config`` changes, so
what transformers' config class would lose (the MTP tail of compress_ratios, num_hash_layers,
topk_method) stays. Two layouts:

``experts``
    what NVIDIA publishes (modelopt's examples/deepseek/deepseek_v4): quant_method "fp8", which
    vLLM 0.33 reads as DeepSeek's FP8 with NVFP4 experts because of ``moe_quant_algo``.
``full``
    modelopt's layout for mixed precision: quant_method "modelopt", and every quantized module with
    its algorithm in ``quantized_layers``. It is taken as soon as anything but experts is not as
    officially stored.

A linear module stands either in ``quantized_layers`` or in ``ignore``, by its official name;
routed experts go by the name of their list, as vLLM looks them up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from nvfp4_codec.checkpoint.families import natural_key
from nvfp4_codec.checkpoint.job import json_bytes
from nvfp4_codec.checkpoint.reader import Checkpoint
from nvfp4_codec.checkpoint.rewrite import documents
from nvfp4_codec.schemas.deepseek_v4 import Schema
from nvfp4_codec.schemas.deepseek_v4.encoding import encoding_files
from nvfp4_codec.schemas.deepseek_v4.experts_only import (
    FP8_CACHE,
    FP8_KEYS,
    NVFP4,
    experts_only_block,
    experts_only_layers,
    hf_quant_config,
)

from .policy import ExportOptions

#: Without an activation scale: a loader told "NVFP4" would quantize activations with none.
_WEIGHT_ONLY: Final = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
#: FP8 in 128x128 blocks, activations quantized by the loader.
_FP8: Final = {"quant_algo": "FP8_PB_WO"}


def export_documents(
    source: Checkpoint, schema: Schema, options: ExportOptions, weight_only: Collection[str]
) -> dict[str, bytes]:
    """The small files of the output folder: both configs, tokenizer and chat encoding.

    weight_only: the NVFP4 modules that have no input_scale.
    """
    quantization = _Quantization(schema, options, weight_only)

    def change(config: dict[str, Any]) -> None:
        config["quantization_config"] = quantization.block(config.get("quantization_config") or {})
        if options.mtp == "drop":
            config["num_nextn_predict_layers"] = 0

    found = documents(source, change)
    found["hf_quant_config.json"] = json_bytes(quantization.hf_document())
    return {**found, **encoding_files(source.root)}


class _Quantization:
    """What is quantized how, as configs say it."""

    def __init__(
        self, schema: Schema, options: ExportOptions, weight_only: Collection[str]
    ) -> None:
        if options.mtp == "drop":
            schema = Schema(schema.config.without_mtp())
        self.schema = schema
        self.fp8_cache = options.kv_cache == "fp8_cast"
        layers: dict[str, Mapping[str, Any]] = {}
        ignore: list[str] = []
        self.experts_only = True
        for entry in schema.entries():
            if not entry.template.row.linear:
                continue
            layout, module = options.layout(entry), entry.module()
            if entry.role == "routed_expert":
                layers[module.rsplit(".", 2)[0]] = NVFP4
                continue
            self.experts_only = self.experts_only and layout == "official"
            if layout == "nvfp4":
                layers[module] = _WEIGHT_ONLY if module in weight_only else NVFP4
            elif layout == "official" and entry.format == "fp8_block":
                layers[module] = _FP8
            else:
                ignore.append(module)
        self.layers = {name: dict(layers[name]) for name in sorted(layers, key=natural_key)}
        self.ignore = sorted(ignore, key=natural_key)
        if self.experts_only:
            self.layers, self.ignore = experts_only_layers(schema)

    def hf_document(self) -> dict[str, Any]:
        """hf_quant_config.json, which older readers prefer."""
        return hf_quant_config(self.layers, self.ignore, _producer(), fp8_cache=self.fp8_cache)

    def block(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """``quantization_config``: the source's, which describes its FP8, with what is new."""
        if self.experts_only:
            return experts_only_block(self.schema, source, _producer(), fp8_cache=self.fp8_cache)
        changed: dict[str, Any] = {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "config_groups": self._groups(),
            "quantized_layers": self.layers,
            "ignore": self.ignore,
            "producer": _producer(),
        }
        if self.fp8_cache:
            changed["kv_cache_scheme"] = FP8_CACHE
        kept = {key: value for key, value in source.items() if key in FP8_KEYS}
        return {**kept, **changed}

    def _groups(self) -> dict[str, Any]:
        """compressed-tensors' view: a group for each algorithm, with its modules as targets."""
        targets: dict[str, list[str]] = {}
        for module, algorithm in self.layers.items():
            targets.setdefault(algorithm["quant_algo"], []).append(module)
        return {
            f"group_{i}": {**_group(algorithm), "targets": sorted(modules)}
            for i, (algorithm, modules) in enumerate(targets.items())
        }


def _group(algorithm: str) -> dict[str, Any]:
    values = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    if algorithm == "NVFP4":
        return {"input_activations": values, "weights": dict(values)}
    return {"weights": values} if algorithm == "W4A16_NVFP4" else {"quant_algo": algorithm}


def _producer() -> dict[str, str]:
    from . import __version__

    return {"name": "modelopt-v4-patches", "version": __version__}
