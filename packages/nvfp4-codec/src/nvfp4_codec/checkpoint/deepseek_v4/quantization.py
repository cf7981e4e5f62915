"""Whether quantization_config is complete, in the right names, and true of what is stored."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from ...errors import CheckpointError
from ...schemas.deepseek_v4 import SCHEMES, Layout, Role, Scheme, translate_entry
from ..files import read_small, strict_json
from ..verify import Finding
from .kv_cache import cache_of_algorithm, cache_of_config, check_kv_cache
from .promised import NVFP4, Promises, contradictions
from .stored import Model, Stored, fault
from .structure import CONFIG, problem

#: Matrices that loaders keep as they are whatever the config says.
_FIXED: Final[frozenset[Role]] = frozenset(
    {"head", "gate", "compressor", "indexer_weights", "draft_head"}
)
#: What readers took before config.json had a quantization_config.
OLDER: Final = "hf_quant_config.json"
_MAX_BYTES: Final = 1 << 26


def check_promises(model: Model) -> list[Finding]:
    """Matrices that are not stored as the config says, and input_scales too few or too many."""
    quantization = model.quantization
    findings = [] if quantization is None else _keys(quantization)
    promises = Promises(quantization)
    findings += _contradictions(model, promises)
    wrong: dict[tuple[str, Layout, str], list[Stored]] = {}
    unscaled: dict[str, list[Stored]] = {}
    unread: dict[str, list[Stored]] = {}
    scaled: set[str] = set()
    for stored in model.tensors.values():
        entry = stored.entry
        if not entry.template.row.linear or "weight" not in stored.parts:
            continue
        promise = promises.of(stored, entry.module(model.scheme))
        fixed = entry.role in _FIXED and stored.layout == "plain"
        if stored.layout != promise.layout and not fixed:
            key = (entry.template.official, promise.layout, stored.format)
            wrong.setdefault(key, []).append(stored)
        elif stored.layout == "nvfp4" and promise.activations:
            if "input_scale" in stored.parts:
                scaled.add(entry.template.official)
            else:
                unscaled.setdefault(entry.template.official, []).append(stored)
        elif stored.layout == "nvfp4" == promise.layout and "input_scale" in stored.parts:
            unread.setdefault(entry.template.official, []).append(stored)
    for (_, promised, format), members in wrong.items():
        findings.append(_disagreement(members, promised, format))
    for template, members in unscaled.items():
        if template in scaled:
            continue  # told as missing names
        found = f"absent, as for all {len(members)} of its kind"
        findings.append(
            fault(
                members[0].first,
                "missing-input-scale",
                found,
                "one F32 value each: the config says that activations are quantized",
                "Export with a calibration snapshot, or say W4A16_NVFP4 in quantization_config.",
            )
        )
    for members in unread.values():
        findings.append(
            fault(
                members[0].parts["input_scale"],
                "unexpected-input-scale",
                f"stored for {len(members)} of its kind, which the config calls W4A16_NVFP4",
                "none: that says weights only",
                "Say NVFP4 in quantization_config to have activations quantized, or remove the "
                "input_scale: loaders would drop it, or stop at it.",
            )
        )
    return findings


def _contradictions(model: Model, promises: Promises) -> list[Finding]:
    layouts = {stored.layout for stored in model.tensors.values()}
    mixed = any(stored.format == "MXFP4" for stored in model.tensors.values())
    sizes = [] if "nvfp4" not in layouts else promises.group_sizes()
    findings = [
        problem(
            f"quantization_config.{key}",
            repr(size),
            "16, which NVFP4 has",
            "Loaders shape weight_scale by it: set it to 16, or export again.",
            "config-disagrees",
        )
        for key, size in sizes
        if size != 16 and not (mixed and size == 32 and key.startswith("config_groups"))
    ]
    findings += check_kv_cache(model.quantization or {})
    if both := contradictions(promises):
        findings.append(
            problem(
                "quantization_config.ignore",
                f"selects {len(both)} entries of quantized_layers as well, such as {both[0]!r}",
                "each module in one of the two",
                "Loaders that ask ignore first read it as not quantized: keep the entry that the "
                "tensors bear out; `dsv4-quantize finalize` completes both.",
                "config-contradicts-itself",
            )
        )
    return findings


def _disagreement(members: list[Stored], promised: Layout, format: str) -> Finding:
    first = members[0].first
    words = {"plain": "not quantized", "nvfp4": "NVFP4", "official": "its official format"}
    return fault(
        first,
        "config-disagrees",
        f"stored as {format}" + (f", as are {len(members)} of its kind" if members[1:] else ""),
        f"{words[promised]}, as quantization_config in {CONFIG} says",
        "Loaders believe the config: list the module in `ignore` or `quantized_layers` as it is "
        "stored; `dsv4-quantize finalize` completes both.",
    )


def _keys(quantization: Mapping[str, Any]) -> list[Finding]:
    findings = []
    method = quantization.get("quant_method")
    if method not in ("fp8", "deepseek_v4_fp8", "modelopt"):
        findings.append(
            problem(
                "quantization_config.quant_method",
                repr(method),
                "'modelopt' or 'fp8'",
                "Loaders choose the reader by it: export or finalize the checkpoint again.",
                "config-disagrees",
            )
        )
    algorithms = (*NVFP4, "MIXED_PRECISION")
    if method == "modelopt" and (algo := quantization.get("quant_algo")) not in algorithms:
        findings.append(
            problem(
                "quantization_config.quant_algo",
                repr(algo),
                " or ".join(algorithms),
                "Loaders choose the kernels by it: export or finalize the checkpoint again.",
                "config-disagrees",
            )
        )
    if not quantization.get("scale_fmt"):
        findings.append(
            problem(
                "quantization_config.scale_fmt",
                "absent",
                "'ue8m0', or 'float32' if FP8 block scales are stored so",
                "DeepSeek-V4 loaders read it without a default: take it from the source's config.",
                "config-missing-key",
            )
        )
    return findings


def check_entries(model: Model) -> tuple[list[Finding], list[str]]:
    """Entries in names that the tensors do not have, which select nothing; and remarks."""
    promises = Promises(model.quantization)
    foreign: dict[str, list[str]] = {}
    dead: list[str] = []
    for key, entries in (("ignore", promises.ignored), ("quantized_layers", promises.layers)):
        for entry in entries:
            if _matches(entry, model, model.scheme):
                continue
            if any(_matches(entry, model, scheme) for scheme in SCHEMES if scheme != model.scheme):
                foreign.setdefault(key, []).append(entry)
            else:
                dead.append(f"{entry!r} in {key}")
    findings = [
        problem(
            f"quantization_config.{key}",
            f"{len(entries)} entries such as {entries[0]!r}, which select nothing",
            f"names in the scheme of the tensors ({model.scheme})",
            "Loaders do not translate them: `dsv4-quantize finalize` writes both in one scheme.",
            "config-other-names",
        )
        for key, entries in foreign.items()
    ]
    notes = [f"{', '.join(dead[:3])} select(s) no module of this model"] if dead else []
    return findings, notes


def _matches(entry: str, model: Model, scheme: Scheme) -> bool:
    try:
        translate_entry(entry, model.schema, scheme)
    except CheckpointError:
        return False
    return True


def check_older(model: Model) -> list[Finding]:
    """hf_quant_config.json, which older readers take instead: it must say the same."""
    path = model.checkpoint.root / OLDER
    if model.quantization is None or not os.path.lexists(path):
        return []
    document = strict_json(read_small(path, _MAX_BYTES, OLDER), OLDER)
    inner = document.get("quantization") if isinstance(document, dict) else None
    if not isinstance(inner, dict):
        raise CheckpointError('has no "quantization"; remove it, or export again.', file=OLDER)
    newer = model.quantization
    pairs = {
        "quant_algo": (inner.get("quant_algo"), newer.get("quant_algo")),
        "exclude_modules": (_set(inner.get("exclude_modules")), _set(newer.get("ignore"))),
        "quantized_layers": (
            inner.get("quantized_layers") or {},
            newer.get("quantized_layers") or {},
        ),
    }
    found = {
        key: ("another value than quantization_config has", "the same in both")
        for key, (old, new) in pairs.items()
        if old != new
    }
    algorithm = inner.get("kv_cache_quant_algo")
    if (cache := cache_of_algorithm(algorithm)) != (promised := cache_of_config(newer)):
        said = f"{promised}, as quantization_config in {CONFIG} says"
        found["kv_cache_quant_algo"] = (f"{algorithm!r}: {cache}", said)
    packed = any(stored.layout == "nvfp4" for stored in model.tensors.values())
    if packed and (size := inner.get("group_size", 16)) != 16:
        found["group_size"] = (repr(size), "16, which NVFP4 has")
    return [
        Finding(
            "config-disagrees",
            f"quantization.{key}",
            OLDER,
            what,
            f"{expected}: some readers take this file, some config.json",
            "Remove the file, or write both again: `dsv4-quantize finalize` does.",
        )
        for key, (what, expected) in found.items()
    ]


def _set(entries: object) -> set[str]:
    return {str(entry) for entry in entries} if isinstance(entries, list) else set()
