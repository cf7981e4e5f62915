"""What is stored how: one table, and the options that move its entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from nvfp4_codec.schemas.deepseek_v4 import Entry, Format, Layout, ModelConfig, Role

from .errors import PolicyError

Preset = Literal["full", "experts"]
#: NVFP4, the official FP8 (128x128 blocks) byte for byte, or BF16.
Storage = Literal["nvfp4", "fp8", "bf16"]
Mtp = Literal["keep", "drop"]
KvCache = Literal["fp8_cast", "none"]


@dataclass(frozen=True)
class Rule:
    """One row: the roles it covers, what each preset stores, what its flag may choose."""

    part: str
    roles: tuple[Role, ...]
    experts: Storage
    full: Storage
    choices: tuple[Storage, ...]


_ANY: Final[tuple[Storage, ...]] = ("nvfp4", "fp8", "bf16")

#: Roles without a row are stored as they are: gates, norms, hyper-connections, sinks, embeddings,
#: heads, weights_proj. In MTP blocks that holds for everything but the routed experts.
RULES: Final = (
    #    part          roles                             experts  full     its flag may say
    Rule("experts",    ("routed_expert",),               "nvfp4", "nvfp4", ("nvfp4",)),
    Rule("attn",       ("wq_a", "wkv", "wq_b", "wo_b"),  "fp8",   "nvfp4", _ANY),
    Rule("shared",     ("shared_expert",),               "fp8",   "nvfp4", _ANY),
    Rule("indexer",    ("indexer_wq_b",),                "fp8",   "nvfp4", _ANY),
    Rule("wo_a",       ("wo_a",),                        "fp8",   "fp8",   _ANY),
    Rule("compressor", ("compressor",),                  "bf16",  "bf16",  ("bf16", "nvfp4")),
)  # fmt: skip

_RULE_OF: Final[Mapping[Role, Rule]] = {role: rule for rule in RULES for role in rule.roles}
_OFFICIAL: Final[Mapping[Format, Storage]] = {"fp8_block": "fp8", "bf16": "bf16"}


@dataclass(frozen=True)
class ExportOptions:
    """What to export; None takes the preset's entry of the table.

    Raises PolicyError for a choice that the table does not have.
    """

    preset: Preset = "full"
    attn: Storage | None = None
    shared: Storage | None = None
    indexer: Storage | None = None
    wo_a: Storage | None = None
    compressor: Storage | None = None
    mtp: Mtp = "keep"
    kv_cache: KvCache = "fp8_cast"

    def __post_init__(self) -> None:
        for name, known in (("preset", Preset), ("mtp", Mtp), ("kv_cache", KvCache)):
            _check(name, getattr(self, name), get_args(known))
        for rule in RULES[1:]:
            _check(rule.part, getattr(self, rule.part), (None, *rule.choices))

    def storage(self, part: str) -> Storage:
        """What a part of the table is stored as."""
        rule = next(rule for rule in RULES if rule.part == part)
        chosen: Storage | None = getattr(self, part, None)  # the experts have no option
        return chosen or (rule.full if self.preset == "full" else rule.experts)

    def layout(self, entry: Entry) -> Layout | None:
        """How a tensor of the model is stored; None if it is left out."""
        rule = _RULE_OF.get(entry.role)
        if entry.in_mtp:
            if self.mtp == "drop":
                return None
            if entry.role != "routed_expert":
                return "official"
        if rule is None:
            return "official"
        storage = self.storage(rule.part)
        if storage == "nvfp4":
            return "nvfp4"
        return "official" if storage == _OFFICIAL.get(entry.format) else "plain"


def check_exact(config: ModelConfig) -> None:
    """PolicyError for a model whose experts the exact cast cannot take."""
    if config.expert_format != "mxfp4":
        raise PolicyError(
            "config.json says that the routed experts are FP8 (expert_dtype 'fp8', a Base model); "
            "experts are never anything but NVFP4 by the exact cast from MXFP4. Export the "
            "released model, whose expert_dtype is 'fp4'."
        )


def _check(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        words = ", ".join(str(word) for word in known if word is not None)
        raise PolicyError(f"{name} is {value!r}; expected one of {words}")
