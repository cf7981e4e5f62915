"""NVFP4 without activation scales: sound as config.json describes it, and refused by the plugin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from nvfp4_codec.checkpoint.deepseek_v4.stored import Model, fault
from nvfp4_codec.checkpoint.deepseek_v4.stored import Stored as Tensors
from nvfp4_codec.checkpoint.verify import Finding
from nvfp4_codec.errors import CheckpointError

from ..options import Options, fix_unscaled, unscaled
from ..stored import is_ours, list_of_experts, stored_in

MISSING: Final = "missing-input-scale"


def look_at_activations(
    model: Model, options: Options | None, known: Iterable[Finding]
) -> list[Finding]:
    """``known`` with what the plugin would refuse under these options, one for each kind of weight.

    The codec misses an input_scale wherever config.json promises quantized activations. What the
    plugin runs in another format needs none, so for kinds of weight that have none at all its own
    rule decides, and its fix does not make it refuse the next thing. options: None refuses nothing.
    """
    kinds = _without_scales(model)
    if not kinds or not is_ours(model.config):
        return list(known)
    try:
        stored = stored_in(model.checkpoint, model.config)
    except CheckpointError:  # names or dtypes that have findings of their own
        return list(known)

    def settled_here(finding: Finding) -> bool:
        entry = model.schema.find(finding.tensor, model.scheme)
        return finding.code == MISSING and entry is not None and entry.template.official in kinds

    findings = [finding for finding in known if not settled_here(finding)]
    lacking = frozenset() if options is None else frozenset(unscaled(stored, options))
    for members in kinds.values():
        mine = [m for m in members if list_of_experts(m.entry.module()) in lacking]
        if mine:
            others = f", as are {len(mine)} of its kind" if mine[1:] else ""
            findings.append(
                fault(
                    mine[0].first,
                    MISSING,
                    f"NVFP4 without an input_scale{others}",
                    "one F32 value each: the plugin runs no NVFP4 without, whatever config.json "
                    "says",
                    fix_unscaled(stored, [list_of_experts(m.entry.module()) for m in mine]),
                )
            )
    return findings


def _without_scales(model: Model) -> dict[str, list[Tensors]]:
    """By template. Where some of a kind have an input_scale, the others are missing names."""
    kinds: dict[str, list[Tensors]] = {}
    for tensors in model.tensors.values():
        if tensors.layout == "nvfp4":
            kinds.setdefault(tensors.entry.template.official, []).append(tensors)
    return {
        kind: members
        for kind, members in kinds.items()
        if not any("input_scale" in member.parts for member in members)
    }
