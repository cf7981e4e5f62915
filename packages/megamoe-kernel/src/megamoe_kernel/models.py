"""The MoE layers that commands know by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .errors import ShapeError


@dataclass(frozen=True)
class MoEShape:
    """One layer: experts of the whole group, slots of a token, and the sizes of an expert."""

    num_experts: int
    num_topk: int
    hidden: int
    intermediate: int


#: Source: the official config.json files.
MODELS: Mapping[str, MoEShape] = MappingProxyType(
    {
        "deepseek-v4-pro": MoEShape(384, 6, 7168, 3072),
        "deepseek-v4-flash": MoEShape(256, 6, 4096, 2048),
    }
)


def local_experts(num_experts: int, num_ranks: int) -> int:
    """Experts of one rank; ShapeError if they do not divide evenly."""
    if num_experts % num_ranks:
        raise ShapeError(
            f"num_experts is {num_experts}, expected a multiple of the {num_ranks} ranks; with "
            f"redundant experts {-(-num_experts // num_ranks) * num_ranks} would fit"
        )
    return num_experts // num_ranks
