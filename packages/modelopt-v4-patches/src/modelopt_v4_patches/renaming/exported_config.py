"""The config.json that an exported checkpoint should have had: the official one, quantized.

transformers writes back another dialect: compress_ratios becomes layer_types without the MTP
blocks' part, num_hash_layers becomes mlp_layer_types, rope_scaling a nest of two. So the official
config.json is taken whole, and the export gives its quantization_config only, with official names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path
from typing import Any, Final

from nvfp4_codec.checkpoint.rewrite import read_config
from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import SCHEMES, spell_out, translate_entry
from nvfp4_codec.schemas.deepseek_v4.recognize import Recognized

#: What the reference must say, because the export no longer does.
_OFFICIAL_KEYS: Final = ("compress_ratios", "num_hash_layers", "topk_method", "rope_scaling")
# Differences of these are not differences of the model.
_INCIDENTAL: Final = {
    "architectures", "dtype", "num_nextn_predict_layers", "quantization_config", "rope_parameters",
    "rope_scaling", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
_BLOCK: Final = re.compile(r"(?:layers|mtp)\.[0-9]+\.")
_ALGORITHMS: Final = ("NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")


@dataclass(frozen=True)
class ExportedConfig:
    """config.json and hf_quant_config.json, and what had to be changed to get them.

    added: entries of ``ignore`` for linears that are stored unquantized and were not listed.
    dropped: entries that named a quantized linear, or no module of the model.
    notes: sentences about everything else that a person should know.
    """

    config: dict[str, Any]
    hf_quant_config: dict[str, Any]
    added: tuple[str, ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())


def read_reference(path: Path) -> dict[str, Any]:
    """The official config.json, given as the file or as its folder.

    Raises CheckpointError if it is absent, or in transformers' dialect.
    """
    folder = path if path.is_dir() else path.parent
    config = read_config(folder) if path.is_dir() or path.name == "config.json" else None
    if config is None:
        raise CheckpointError(
            "no config.json there. Give the official checkpoint's config.json, or its folder.",
            file=str(path),
        )
    missing = [key for key in _OFFICIAL_KEYS if key not in config]
    if "scale_fmt" not in (config.get("quantization_config") or {}):
        missing.append("quantization_config.scale_fmt")
    if missing:
        raise CheckpointError(
            f"the reference lacks {', '.join(missing)}: it is not the official config.json. Take "
            "it from the checkpoint that DeepSeek published, not from an export.",
            file=str(path),
        )
    return config


def complete_config(
    export: Mapping[str, Any],
    reference: Mapping[str, Any],
    model: Recognized,
    *,
    flat_rope: bool = False,
) -> ExportedConfig:
    """The reference with the export's quantization under official names, and what that changed.

    flat_rope: also write ``rope_parameters`` as one flat dictionary, for readers that know neither
    the official ``rope_scaling`` nor transformers' nest of two.
    Raises CheckpointError if the export is not modelopt's NVFP4.
    """
    quantization = _modelopt(export)
    ignore, added, dropped = _complete_ignore(quantization.get("ignore") or [], model)
    quantization["ignore"] = list(ignore)
    for group in (quantization.get("config_groups") or {}).values():
        # module names under MIXED_PRECISION, else the class name "Linear"
        targets = group.get("targets") or []
        group["targets"] = [o for t in targets for o in _translated(t, model) or (t,)]
    if "quantized_layers" in quantization:
        quantization["quantized_layers"] = {
            official: how
            for name, how in quantization["quantized_layers"].items()
            for official in _translated(name, model) or (name,)
        }
    # Readers of DeepSeek-V4 look it up whatever the weights are.
    quantization["scale_fmt"] = reference["quantization_config"]["scale_fmt"]
    notes = [
        f"config.json: {key} is {export[key]!r} in the export and {value!r} in the reference, "
        "which is used"
        for key, value in reference.items()
        if key in export and key not in _INCIDENTAL and export[key] != value
    ]
    config = {**reference, "quantization_config": quantization}
    declared = reference.get("num_nextn_predict_layers", 0)
    if declared and not model.has_mtp:
        config["num_nextn_predict_layers"] = 0
        notes.append(
            f"no MTP tensors, as usual for an export; num_nextn_predict_layers is now 0, not "
            f"{declared}: speculative decoding needs them"
        )
    if flat_rope:
        scaling = reference["rope_scaling"]
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        theta = {"rope_theta": reference["rope_theta"]} if "rope_theta" in reference else {}
        config["rope_parameters"] = {**scaling, **theta, "rope_type": kind}
    return ExportedConfig(config, _hf_quant_config(quantization), added, dropped, tuple(notes))


def _modelopt(export: Mapping[str, Any]) -> dict[str, Any]:
    quantization = export.get("quantization_config")
    if not isinstance(quantization, dict):
        raise CheckpointError(
            "no quantization_config: this is no export of modelopt. Give the folder that "
            "export_hf_checkpoint wrote.",
            file="config.json",
        )
    method, algorithm = quantization.get("quant_method"), quantization.get("quant_algo")
    if method != "modelopt" or algorithm not in _ALGORITHMS:
        raise CheckpointError(
            f"quant_method is {method!r} and quant_algo {algorithm!r}; finalize takes 'modelopt' "
            f"with {', '.join(_ALGORITHMS)}.",
            file="config.json",
        )
    copied = dict(quantization)
    groups = copied.get("config_groups")
    if groups:
        copied["config_groups"] = {name: dict(group) for name, group in groups.items()}
    return copied


def _complete_ignore(
    entries: Iterable[str], model: Recognized
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The list as it must be, what was added to it, and what was dropped of the given one.

    The stored tensors decide: a loader that finds a BF16 linear unlisted expects scales for it.
    """
    kept: list[str] = []
    dropped: list[str] = []
    quantized, unquantized = _by_block(model.quantized), _by_block(model.unquantized)
    listed: set[str] = set()
    for entry in entries:
        translated = _translated(entry, model)
        wrong = [t for t in translated if any(_covered(quantized, t))]
        if wrong or not translated:
            dropped.append(entry)
        kept += [t for t in translated if t not in wrong]
        listed.update(m for t in translated if t not in wrong for m in _covered(unquantized, t))
    added = spell_out(model.unquantized - listed, model.schema)
    return tuple(dict.fromkeys((*kept, *added))), added, tuple(dropped)


def _by_block(modules: Iterable[str]) -> dict[str, list[str]]:
    """Modules by their block ("layers.3."), and all of them under "": a model has 200,000."""
    blocks: dict[str, list[str]] = {"": []}
    for module in modules:
        found = _BLOCK.match(module)
        if found:
            blocks.setdefault(found[0], []).append(module)
        blocks[""].append(module)
    return blocks


def _covered(blocks: Mapping[str, list[str]], entry: str) -> Iterator[str]:
    """The modules that an official entry means: by glob, by name, or by what holds them."""
    block = _BLOCK.match(entry)
    matches = re.compile(translate(entry)).match
    for module in blocks.get(block[0] if block else "", ()):
        if matches(module) or module.startswith(f"{entry}."):
            yield module


def _translated(entry: str, model: Recognized) -> tuple[str, ...]:
    """Official entries; none if the model has no such module in any scheme.

    The tensors' scheme comes first: HF's ``attn_hc`` would match a half-converted ``attn*``.
    """
    for scheme in (model.scheme, *SCHEMES):
        with suppress(CheckpointError):
            return translate_entry(entry, model.schema, scheme)
    return ()


def _hf_quant_config(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """The same in modelopt's own form, which older readers look at first."""
    scheme = quantization.get("kv_cache_scheme")
    bits = scheme.get("num_bits", 0) if isinstance(scheme, dict) else 0
    inner: dict[str, Any] = {
        "quant_algo": quantization["quant_algo"],
        "kv_cache_quant_algo": {8: "FP8", 4: "NVFP4"}.get(bits, scheme),
        "group_size": 16,
        "exclude_modules": quantization["ignore"],
    }
    if "quantized_layers" in quantization:
        inner["quantized_layers"] = quantization["quantized_layers"]
    producer = quantization.get("producer", {"name": "modelopt"})
    return {"producer": producer, "quantization": inner}
