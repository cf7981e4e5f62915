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

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, Final

from nvfp4_codec.checkpoint.families import natural_key
from nvfp4_codec.checkpoint.files import inside, read_small
from nvfp4_codec.checkpoint.header import shown
from nvfp4_codec.checkpoint.job import json_bytes
from nvfp4_codec.checkpoint.reader import Checkpoint
from nvfp4_codec.checkpoint.rewrite import documents
from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import Entry, Schema

from .policy import ExportOptions

_NVFP4: Final = {"quant_algo": "NVFP4", "group_size": 16}
#: Without an activation scale: a loader told "NVFP4" would quantize activations with none.
_WEIGHT_ONLY: Final = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
#: FP8 in 128x128 blocks, activations quantized by the loader.
_FP8: Final = {"quant_algo": "FP8_PB_WO"}

#: What NVIDIA's experts-only configs ignore, as far as the model has it.
_IGNORED: Final = ("*.attn.*", "*.ffn.shared_experts.*", "head")

#: What the source's block says of its FP8; anything else in it would describe other tensors.
_FP8_KEYS: Final = ("activation_scheme", "fmt", "scale_fmt", "weight_block_size")
_FP8_CACHE: Final = {"dynamic": False, "num_bits": 8, "type": "float"}

#: DeepSeek ships its chat encoding as a script beside the weights. It is copied, never run.
_ENCODING: Final = "encoding"
_ENCODING_SUFFIXES: Final = (".py", ".json", ".jinja", ".md", ".txt")
_MAX_ENCODING_BYTES: Final = 1 << 22


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
        self.fp8_cache = options.kv_cache == "fp8_cast"
        layers: dict[str, dict[str, Any]] = {}
        ignore: list[str] = []
        official = True  # but for the experts
        for entry in schema.entries():
            layout = options.layout(entry)
            if layout is None or not entry.template.row.linear:
                continue
            module = entry.module()
            if entry.role == "routed_expert":
                layers[module.rsplit(".", 2)[0]] = _NVFP4
                continue
            official = official and layout == "official"
            if layout == "nvfp4":
                layers[module] = _WEIGHT_ONLY if module in weight_only else _NVFP4
            elif layout == "official" and entry.format == "fp8_block":
                layers[module] = _FP8
            else:
                ignore.append(module)
        self.experts_only = official
        if official:
            layers = {name: algorithm for name, algorithm in layers.items() if algorithm is _NVFP4}
            ignore = _ignored_globs(schema, options)
        self.layers = {name: dict(layers[name]) for name in sorted(layers, key=natural_key)}
        self.ignore = ignore if official else sorted(ignore, key=natural_key)

    def hf_document(self) -> dict[str, Any]:
        """hf_quant_config.json, which older readers prefer."""
        return {
            "producer": _producer(),
            "quantization": {
                "quant_algo": "MIXED_PRECISION",
                "kv_cache_quant_algo": "FP8" if self.fp8_cache else None,
                "group_size": 16,
                "quantized_layers": self.layers,
                "exclude_modules": self.ignore,
            },
        }

    def block(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """``quantization_config``: the source's, which describes its FP8, with what is new."""
        changed: dict[str, Any] = {
            "quant_method": "fp8" if self.experts_only else "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "config_groups": self._groups(),
            "quantized_layers": self.layers,
            "ignore": self.ignore,
            "producer": _producer(),
        }
        if self.experts_only:
            changed["moe_quant_algo"] = "NVFP4"
            changed["group_size"] = 16
            changed["kv_cache_quant_algo"] = "FP8" if self.fp8_cache else None
        if self.fp8_cache:
            changed["kv_cache_scheme"] = _FP8_CACHE
        kept = {key: value for key, value in source.items() if key in _FP8_KEYS}
        return {**kept, **changed}

    def _groups(self) -> dict[str, Any]:
        """compressed-tensors' view: a group for each algorithm, with its modules as targets."""
        if self.experts_only:
            return {"group_0": {**_group("NVFP4"), "targets": ["Linear"]}}
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


def _ignored_globs(schema: Schema, options: ExportOptions) -> list[str]:
    """Globs that match every linear module but the routed experts, NVIDIA's first."""
    globs = list(_IGNORED)
    for entry in _rest(schema, options):
        if not any(fnmatchcase(entry.module(), glob) for glob in globs):
            globs.append(entry.template.official.removesuffix(".weight").replace("#", "*"))
    return globs


def _rest(schema: Schema, options: ExportOptions) -> Iterable[Entry]:
    for entry in schema.entries():
        linear = entry.template.row.linear and entry.role != "routed_expert"
        if linear and options.layout(entry) is not None:
            yield entry


def _producer() -> dict[str, str]:
    from . import __version__

    return {"name": "modelopt-v4-patches", "version": __version__}


def encoding_files(root: Path) -> dict[str, bytes]:
    """The chat encoding's small text files, by their names below a checkpoint's folder."""
    folder = root / _ENCODING
    found: dict[str, bytes] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.suffix in _ENCODING_SUFFIXES:
            name = str(PurePosixPath(_ENCODING, path.name))
            if not name.isprintable():  # bytes that are no UTF-8 among others
                raise CheckpointError(
                    "a name that no manifest can hold. Rename the file, or remove it.",
                    file=shown(name),
                )
            found[name] = read_small(inside(root, name, str(root)), _MAX_ENCODING_BYTES, name)
    return found
