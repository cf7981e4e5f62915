"""What a config.json says of the weights, and what it has lost on its way through an export.

transformers writes back another dialect than DeepSeek's: compress_ratios becomes layer_types
without the MTP blocks' part, num_hash_layers becomes mlp_layer_types, rope_scaling a nest of two;
topk_method, scale_fmt and weight_block_size go missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from fnmatch import translate
from typing import TYPE_CHECKING, Any, Final

from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import (
    SCHEMES,
    Entry,
    ModelConfig,
    Schema,
    Scheme,
    detect_scheme,
    translate_entry,
)

from .config_file import check_types
from .errors import StoredError

if TYPE_CHECKING:
    from .stored import Format

_ALGORITHMS: Final[Mapping[str, Format]] = {
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "FP8_PB_WO": "fp8_block",
}
_MIXED: Final = "MIXED_PRECISION"
_OFFICIAL: Final[Mapping[str, Format]] = {
    "fp8_block": "fp8_block", "mxfp4": "mxfp4", "bf16": "bf16",
}  # fmt: skip
#: What a nested rope's part says besides the official ``rope_scaling``.
_ROPE_ELSEWHERE: Final = ("rope_theta", "partial_rotary_factor")


def is_ours(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a DeepSeek-V4 checkpoint with NVFP4 in it.

    True for modelopt's exports (``full`` among them) and for the experts-only layout; False for
    every other model, for the official checkpoint, and for anything that is not understood.
    """
    quantization = config.get("quantization_config")
    if config.get("model_type") != "deepseek_v4" or not isinstance(quantization, Mapping):
        return False
    method = str(quantization.get("quant_method", "")).lower()
    if method in ("fp8", "deepseek_v4_fp8"):
        return str(quantization.get("moe_quant_algo", "")).upper() == "NVFP4"
    if not method.startswith("modelopt"):
        return False
    algorithm = _upper(quantization.get("quant_algo"))
    if algorithm != _MIXED:
        return _ALGORITHMS.get(algorithm) == "nvfp4"
    layers = quantization.get("quantized_layers")
    return isinstance(layers, Mapping) and any(
        # A bare word claims as much; `complete_config` then says how it is spelled.
        _ALGORITHMS.get(_upper(how.get("quant_algo") if isinstance(how, Mapping) else how))
        == "nvfp4"
        for how in layers.values()
    )


def complete_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A config.json with its gaps filled as DeepSeek writes them, and a sentence for each gap.

    The input is not changed. What cannot be known from the rest (the rope's scaling, when it is
    nowhere) is told and left. Raises CheckpointError as `check_types` and
    `ModelConfig.from_dict` do.
    """
    check_types(config)
    found, notes = dict(config), []
    if found.get("topk_method") is None:
        found["topk_method"] = "noaux_tc"
        notes.append("topk_method is missing: taken as 'noaux_tc', as every DeepSeek-V4 has it")
    if found.get("compress_ratios") is None and found.get("layer_types") is not None:
        found["compress_ratios"] = [
            block.ratio for block in ModelConfig.from_dict(found | _hashed(found)).blocks
        ]
        notes.append("compress_ratios is missing: derived from layer_types, 0 for MTP blocks")
    if found.get("num_hash_layers") is None and found.get("mlp_layer_types") is not None:
        found |= _hashed(found)
        notes.append("num_hash_layers is missing: counted in mlp_layer_types")
    _complete_quantization(found, notes)
    _complete_rope(found, notes)
    return found, notes


def _hashed(config: Mapping[str, Any]) -> dict[str, int]:
    return {"num_hash_layers": list(config.get("mlp_layer_types") or ()).count("hash_moe")}


def _complete_quantization(found: dict[str, Any], notes: list[str]) -> None:
    quantization = found.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return
    quantization = dict(quantization)
    if quantization.get("scale_fmt") is None:
        # FP8 experts (the Base models) come with FP32 scales, all others with powers of two.
        fmt = "float32" if found.get("expert_dtype") == "fp8" else "ue8m0"
        quantization["scale_fmt"] = fmt
        notes.append(f"quantization_config.scale_fmt is missing: taken as {fmt!r}")
    if quantization.get("weight_block_size") is None:
        quantization["weight_block_size"] = [128, 128]
        notes.append("quantization_config.weight_block_size is missing: taken as [128, 128]")
    found["quantization_config"] = quantization


def _complete_rope(found: dict[str, Any], notes: list[str]) -> None:
    if found.get("rope_scaling") is not None:
        return
    nested = found.get("rope_parameters")
    compress = nested.get("compress") if isinstance(nested, Mapping) else None
    if not (isinstance(nested, Mapping) and isinstance(compress, Mapping)):
        if isinstance(nested, Mapping) and nested:  # flat already, under transformers' name
            found["rope_scaling"] = _flat(nested)
            notes.append("rope_scaling is missing: taken from rope_parameters")
        else:
            notes.append(
                "rope_scaling is missing and cannot be derived: without it compressed layers run "
                "unscaled. Take it from the official config.json, unless the model has none"
            )
        return
    del found["rope_parameters"]
    found["rope_scaling"] = _flat(compress)
    if "rope_theta" in compress:
        found["compress_rope_theta"] = compress["rope_theta"]
    main = nested.get("main")
    if isinstance(main, Mapping) and "rope_theta" in main:
        found["rope_theta"] = main["rope_theta"]
    notes.append("rope_scaling is missing: taken from the nested rope_parameters")


def _flat(rope: Mapping[str, Any]) -> dict[str, Any]:
    """One dictionary as DeepSeek writes it; transformers adds an attention_factor of one."""
    flat = {key: value for key, value in rope.items() if key not in _ROPE_ELSEWHERE}
    kind = flat.get("rope_type", flat.get("type", "default"))
    if flat.get("attention_factor") == 1.0:
        del flat["attention_factor"]
    return {**flat, "type": kind, "rope_type": kind}


def promised_formats(
    config: Mapping[str, Any], schema: Schema, linears: Iterable[tuple[str, Entry]]
) -> tuple[Scheme, dict[str, Format], frozenset[str]]:
    """The names' scheme, each linear's format, and which NVFP4 ones have no activation scale.

    Raises StoredError for an algorithm that is none of ours.
    """
    quantization = config.get("quantization_config") or {}
    layers = quantization.get("quantized_layers") or {}
    ignore = quantization.get("ignore") or quantization.get("exclude_modules") or []
    scheme = _scheme(list(layers), list(ignore))
    algorithm_of = _lookup(
        {name: _upper(how.get("quant_algo")) for name, how in layers.items()}, schema, scheme
    )
    ignored = _lookup(dict.fromkeys(ignore, "ignored"), schema, scheme)
    is_modelopt = str(quantization.get("quant_method", "")).lower().startswith("modelopt")
    everywhere = _upper(quantization.get("quant_algo"))
    of_experts = _upper(quantization.get("moe_quant_algo"))
    formats: dict[str, Format] = {}
    weight_only = set()
    for module, entry in linears:
        algorithm = algorithm_of(module)
        if algorithm is None and entry.role == "routed_expert":
            algorithm = of_experts or None
        if algorithm is None and is_modelopt and ignored(module):
            formats[module] = "bf16"
            continue
        if algorithm is None and is_modelopt and not entry.in_mtp:
            algorithm = everywhere
        if algorithm == _MIXED:  # where what is not listed is not quantized
            formats[module] = "bf16"
            continue
        if algorithm is None:
            formats[module] = _OFFICIAL[entry.format]
            continue
        if algorithm not in _ALGORITHMS:
            raise StoredError(
                f"config.json: {module} has quant_algo {algorithm!r}; known are "
                f"{', '.join(_ALGORITHMS)}. Export the model again with one of these."
            )
        formats[module] = _ALGORITHMS[algorithm]
        if algorithm == "W4A16_NVFP4":
            weight_only.add(module)
    return scheme, formats, frozenset(weight_only)


def _scheme(*lists: list[str]) -> Scheme:
    """Of the first list that has one: half-converted exports ignore under names of two schemes."""
    for entries in lists:
        with suppress(CheckpointError):
            return detect_scheme(entries)
    return "official"


def _lookup(
    entries: Mapping[str, str], schema: Schema, scheme: Scheme
) -> Callable[[str], str | None]:
    """Finds what entries (names, globs, containers; in any scheme) say of an official module."""
    names: dict[str, str] = {}
    globs: list[tuple[Callable[[str], object], str]] = []
    for entry, value in entries.items():
        for official in _official(entry, schema, scheme):
            if any(character in official for character in "*?["):
                globs.append((re.compile(translate(official)).match, value))
            else:
                names[official] = value
                if ".ffn.experts." in official:  # listed one by one
                    names.setdefault(official.rsplit(".", 2)[0], value)

    def find(module: str) -> str | None:
        path = module
        while path:
            if path in names:
                return names[path]
            path = path.rpartition(".")[0]
        return next((value for matches, value in globs if matches(module)), None)

    return find


def _official(entry: str, schema: Schema, scheme: Scheme) -> tuple[str, ...]:
    """Official entries; none for a module that the model does not have (k_proj, lm_head tied)."""
    for candidate in (scheme, *SCHEMES):
        with suppress(CheckpointError):
            return translate_entry(entry, schema, candidate)
    return ()


def _upper(value: object) -> str:
    return str(value or "").upper()
