"""Names: a stored tensor's official one, and the official modules behind a vLLM module.

Pure look-ups. What a name means is the schema's business, what happens to the tensor the
transform's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from nvfp4_codec.schemas.deepseek_v4 import Schema, Scheme, Template, parse

from .stored import EXPERTS

#: What vLLM builds as one module, and the official modules that go into it.
FUSED: Final = {
    "attn.fused_wqa_wkv": ("attn.wq_a", "attn.wkv"),
    "compressor.fused_wkv_wgate": ("compressor.wkv", "compressor.wgate"),
    "shared_experts.gate_up_proj": ("shared_experts.w1", "shared_experts.w3"),
}
_RENAMED: Final = {"shared_experts.down_proj": "shared_experts.w2"}
_LAYER: Final = re.compile(r"(?:model\.)?layers\.(?P<index>[0-9]+)(?:\.mtp_block)?\.(?P<rest>.+)")


class Placed(NamedTuple):
    """A stored tensor's place in the model.

    name: the official name, block scales spelled ``scale``. module: without the part; part: what
    of the module it is ("weight", "weight_scale", ...). formatted: the module that `Stored.formats`
    lists it under.
    """

    name: str
    module: str
    part: str
    formatted: str
    kind: _Kind

    @property
    def leaf(self) -> str:
        """The module's last name."""
        return self.module.rpartition(".")[2]


@dataclass(frozen=True)
class _Kind:
    """What all tensors of one template have in common.

    expert: of a routed expert. path: the module with its indices as ``*``.
    """

    is_linear: bool
    is_expert: bool
    is_shared: bool
    is_unused: bool
    path: str


class WeightMap:
    """Looks up the tensors of one checkpoint's scheme."""

    def __init__(self, schema: Schema, scheme: Scheme) -> None:
        self._schema = schema
        self._scheme = scheme
        self._known: dict[Template, tuple[Template, _Kind, str] | None] = {}

    def place(self, name: str) -> Placed | None:
        """Where a tensor belongs; None if the model has no such tensor."""
        parsed = parse(name, self._scheme)
        if parsed is None or parsed.template is None or parsed.part is None:
            return None
        known = self._known.get(parsed.template, ...)
        if known is ...:
            known = self._known[parsed.template] = self._kind(parsed.template)
        if known is None:
            return None
        template, kind, module_format = known
        if not self._schema.has(template, parsed.indices):
            return None
        module = module_format % parsed.indices
        part = "scale" if parsed.part == "weight_scale_inv" else parsed.part
        official = f"{module}.{part}" if part else module
        formatted = module.rsplit(".", 2)[0] if kind.is_expert else module
        return Placed(official, module, part, formatted, kind)

    def _kind(self, template: Template) -> tuple[Template, _Kind, str] | None:
        own = self._schema.own_template(template)
        if own is None:
            return None
        module = own.official.removesuffix(".weight")
        path = module.replace("#", "*")
        kind = _Kind(
            is_linear=own.row.linear,
            is_expert=own.row.role == "routed_expert",
            is_shared=own.row.role == "shared_expert",
            # Scales of an FP8 KV cache, on projections that vLLM's model does not have.
            is_unused=own.row.optional,
            path=path.partition(EXPERTS)[0] + EXPERTS if own.row.role == "routed_expert" else path,
        )
        return own, kind, module.replace("#", "%s")


def official_modules(prefix: str, num_layers: int) -> tuple[str, ...]:
    """The official modules that a vLLM linear or expert module is made of; none if it is no such.

    prefix: as vLLM names it, with or without ``model.`` in front; layers from num_layers on are
    MTP blocks. ``model.layers.3.attn.fused_wqa_wkv`` gives ``layers.3.attn.wq_a`` and ``.wkv``;
    names of parts (``...gate_up_proj`` split into w1 and w3) are understood as well.
    """
    if prefix.rpartition(".")[2] in ("lm_head", "head"):
        return ("head",)
    found = _LAYER.fullmatch(prefix)
    if found is None:
        return ()
    index = int(found["index"])
    block = f"layers.{index}" if index < num_layers else f"mtp.{index - num_layers}"
    rest = found["rest"]
    if rest.startswith("ffn.experts"):
        return (f"{block}{EXPERTS}",)
    for fused, parts in FUSED.items():
        if rest.endswith(fused):
            head = rest.removesuffix(fused)
            return tuple(f"{block}.{head}{part}" for part in parts)
    for renamed, part in _RENAMED.items():
        if rest.endswith(renamed):
            rest = rest.removesuffix(renamed) + part
    return (f"{block}.{rest}",)
