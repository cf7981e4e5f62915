"""Shapes and formats: the codec's findings, told apart where serving makes a difference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from nvfp4_codec.checkpoint.deepseek_v4.names import check_headers, check_packing
from nvfp4_codec.checkpoint.deepseek_v4.quantization import check_promises
from nvfp4_codec.checkpoint.deepseek_v4.stored import Model, fault
from nvfp4_codec.checkpoint.families import logical_shape
from nvfp4_codec.checkpoint.verify import Finding
from nvfp4_codec.schemas.deepseek_v4 import Entry

_COMPRESSORS: Final = (".indexer.compressor.", ".compressor.")


def look_at_packing(model: Model) -> dict[str, list[Finding]]:
    """What is wrong between a weight and its scales, by official module."""
    return check_packing(model)


def look_at_headers(model: Model, told: Iterable[str]) -> list[Finding]:
    """Shapes, dtypes, and what quantization_config says of them; ``told``: modules to leave out."""
    found = []
    shaped: set[str] = set()
    for finding in check_headers(model, set(told)):
        entry = model.schema.find(finding.tensor, model.scheme)
        if finding.code != "shape-mismatch" or entry is None:
            found.append(finding)
        elif entry.module() not in shaped:  # a weight and its scales have one fault
            shaped.add(entry.module())
            found.append(_shape(model, finding, entry))
    found += _signed_codes(model)
    return found + [_promise(model, finding) for finding in check_promises(model)]


def _signed_codes(model: Model) -> list[Finding]:
    """NVFP4 codes under MXFP4's dtype: loaders tell the two apart by it."""
    signed = [
        stored.first
        for stored in model.tensors.values()
        if stored.layout == "nvfp4" and stored.first.dtype == "I8"
    ]
    more = f", as are {len(signed) - 1} more weights" if len(signed) > 1 else ""
    return [
        fault(
            info,
            "dtype-mismatch",
            f"dtype I8, which is MXFP4's, beside scales of NVFP4{more}",
            "U8",
            "View the bytes as uint8 and write them again, or export again.",
        )
        for info in signed[:1]
    ]


def _shape(model: Model, finding: Finding, entry: Entry) -> Finding:
    """The finding by the name of the tensor whose shape it is, if there is one."""
    info = model.checkpoint.info(finding.tensor)
    shape = logical_shape(info) if info.dtype in ("U8", "I8") else info.shape
    other = _other_compressor(model, entry)
    if other is not None and shape == other.shape:
        which = "outer" if ".indexer." in entry.module() else "indexer's"
        return replace(
            finding,
            code="indexer-compressor-shape",
            found=f"{finding.found}, the shape of the {which} compressor",
            fix="The two compressors of the layer were exchanged, or one was read from the other's "
            "name: export again.",
        )
    if entry.role in ("routed_expert", "shared_expert") and shape == entry.shape[::-1]:
        return replace(
            finding,
            code="expert-projections-swapped",
            found=f"{finding.found}: that of w2 (down) for w1 or w3, or the other way round",
            fix="w1 is gate, w3 up, w2 down: rename the tensors, or export again.",
        )
    return finding


def _other_compressor(model: Model, entry: Entry) -> Entry | None:
    inner, outer = _COMPRESSORS
    name = entry.name()
    other = name.replace(inner, outer) if inner in name else name.replace(outer, inner)
    return model.schema.find(other) if other != name else None


def _promise(model: Model, finding: Finding) -> Finding:
    """wo_a and experts by codes of their own: the one fails late, the others cannot be served."""
    if finding.code != "config-disagrees":
        return finding
    entry = model.schema.find(finding.tensor, model.scheme)
    if entry is None:
        return finding
    if entry.role == "wo_a":
        return replace(finding, code="wo-a-format")
    stored = model.tensors.get(entry.name())
    if entry.role == "routed_expert" and stored is not None and stored.format == "MXFP4":
        return replace(
            finding,
            code="mxfp4-experts",
            fix="`dsv4-quantize export` casts them to NVFP4 without loss; or take the official "
            "config.json, which says that they are MXFP4.",
        )
    return finding
