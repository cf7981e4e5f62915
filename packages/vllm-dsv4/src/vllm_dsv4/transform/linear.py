"""What is known of a linear while its tensors arrive: formats, what it is fused with, what waits.

A checkpoint has some 70,000 expert matrices of four tensors each. So what all experts of a block
have in common is worked out once, a linear is looked up once for its four tensors, and forgotten
when it is complete: hundreds of thousands of objects would keep the garbage collector busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from nvfp4_codec.schemas.deepseek_v4 import fused_with

from ..stored import Format, Stored
from ..weight_map import Placed, WeightMap
from .values import NEEDED

SCALES: Final = ("weight_scale", "weight_scale_2", "input_scale")
#: What may stand beside a weight in each format, and the dtypes of the weight itself.
_BELONGING: Final[Mapping[Format, tuple[str, ...]]] = {
    "nvfp4": ("weight", *SCALES),
    "fp8_block": ("weight", "scale"),
    "mxfp4": ("weight", "scale"),
    "bf16": ("weight",),
}
_DTYPES: Final[Mapping[Format, tuple[torch.dtype, ...]]] = {
    "nvfp4": (torch.uint8,),
    "fp8_block": (torch.float8_e4m3fn,),
    "mxfp4": (torch.int8, torch.uint8),
    "bf16": (torch.bfloat16, torch.float16, torch.float32),
}
_PARTS: Final = 4  # of a linear, at most


@dataclass(frozen=True, slots=True)
class Recipe:
    """What happens to a linear, and to all linears of its kind in the block.

    own, runs: the formats it is stored and runs in. bits: what each of its parts clears in
    `Group.waiting`; 0 for one that may stay away. at_once: whether its tensors leave as they come.
    leaves: the last names of the linears it is fused with, its own among them. waiting: the bits
        of all their parts.
    """

    placed: Placed
    own: Format
    runs: Format
    dtypes: tuple[torch.dtype, ...]
    bits: Mapping[str, int]
    at_once: bool
    leaves: tuple[str, ...]
    waiting: int

    @property
    def path(self) -> str:
        """The module with its indices as ``*``; of what is fused, the first one's."""
        path = self.placed.kind.path
        if self.placed.kind.is_expert:
            return path
        return f"{path.rpartition('.')[0]}.{self.leaves[0]}".removeprefix(".")


@dataclass(slots=True)
class Group:
    """Linears whose tensors leave together: one, or those that are fused.

    waiting: a bit for each part that is still to come. held: what came and cannot leave yet, by
    module and part. codes: packed weights that left already, for counting what their scales'
    rounding costs. sources: the stored names of its linears.
    """

    key: str
    recipe: Recipe
    waiting: int
    held: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    codes: dict[str, Tensor] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)

    def lacking(self) -> Iterator[str]:
        """Official names of the parts that are still to come."""
        parent = self.key.rpartition(".")[0]
        own = self.recipe.leaves.index(self.recipe.placed.leaf)
        for index, leaf in enumerate(self.recipe.leaves):
            for part, bit in self.recipe.bits.items():
                # All linears of a group have the same parts.
                if self.waiting & (bit << _PARTS * index >> _PARTS * own):
                    yield f"{parent}.{leaf}.{part}".removeprefix(".")


@dataclass(slots=True)
class Linear:
    """A linear of the model; ``late`` if all that was waited for had come before."""

    module: str
    recipe: Recipe
    group: Group
    late: bool


class Linears:
    """The linears that are not complete yet, by their stored names."""

    def __init__(
        self,
        stored: Stored,
        names: WeightMap,
        runtime: Mapping[str, Format],
        found: Callable[[Recipe], None],
    ) -> None:
        """found: called for each new linear, and once for a block's routed experts."""
        self._stored = stored
        self._runtime = runtime
        self._found = found
        self._map = names
        self._recipes: dict[tuple[str, str], Recipe] = {}  # of experts, by list and last name
        self._counted: set[str] = set()
        self._groups: dict[str, Group] = {}
        self._done: set[str] = set()
        self.open: dict[str, Linear] = {}

    def look_up(self, stored_module: str) -> Linear | None:
        """A linear of which nothing is known yet; None if the name is of no linear."""
        parent, _, leaf = stored_module.rpartition(".")
        container, _, expert = parent.rpartition(".")
        recipe = self._recipes.get((container, leaf))
        if recipe is not None and self._is_expert(expert):
            base = f"{recipe.placed.formatted}.{expert}"
            return self._open(stored_module, f"{base}.{recipe.placed.leaf}", base, recipe)
        placed = self._map.place(f"{stored_module}.weight")
        if placed is None or not placed.kind.is_linear:
            return None
        own = self._stored.formats.get(placed.formatted)
        if own is None:
            return None
        recipe = _recipe(placed, own, self._runtime[placed.formatted])
        parent = placed.module.rpartition(".")[0]
        linear = self._open(stored_module, placed.module, parent, recipe)
        if placed.kind.is_expert:
            self._recipes[container, leaf] = recipe
        if placed.formatted not in self._counted:
            self._counted.add(placed.formatted)
            self._found(recipe)
        return linear

    def _is_expert(self, index: str) -> bool:
        # As the schema reads indices: without leading zeros, and among the model's.
        return (
            index.isdecimal()
            and (index[0] != "0" or index == "0")
            and int(index) < self._stored.schema.config.num_experts
        )

    def _open(self, stored_module: str, module: str, parent: str, recipe: Recipe) -> Linear:
        key = f"{parent}.{recipe.leaves[0]}"
        if key in self._done:
            return Linear(module, recipe, Group(key, recipe, 0), late=True)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(key, recipe, recipe.waiting)
        group.sources.append(stored_module)
        linear = self.open[stored_module] = Linear(module, recipe, group, late=False)
        return linear

    def close(self, group: Group) -> None:
        """Forgets a group that is complete; only codes of its experts may still come."""
        del self._groups[group.key]
        self._done.add(group.key)
        for stored_module in group.sources:
            del self.open[stored_module]

    def lacking(self) -> list[str]:
        """Official names of everything that was waited for and never came."""
        return sorted(name for group in self._groups.values() for name in group.lacking())


def _recipe(placed: Placed, own: Format, runs: Format) -> Recipe:
    stays = own == runs
    # FP8 waits for its scale, whose dtype may have to change.
    fused = fused_with(placed.module) if stays and own == "nvfp4" else (placed.module,)
    leaves = tuple(module.rpartition(".")[2] for module in fused)
    parts = _BELONGING[own]
    waited = set(parts if stays else NEEDED[own])
    if placed.kind.is_expert:
        # Under expert parallelism vLLM's loader leaves out the weights of other ranks' experts,
        # but none of their scales.
        waited -= {"weight"}
    masks = {part: (1 << i if part in waited else 0) for i, part in enumerate(parts)}
    shift = _PARTS * leaves.index(placed.leaf)
    return Recipe(
        placed=placed,
        own=own,
        runs=runs,
        dtypes=_DTYPES[own],
        bits={part: mask << shift for part, mask in masks.items()},
        at_once=stays and own != "fp8_block" and len(fused) == 1,
        leaves=leaves,
        waiting=sum(sum(masks.values()) << _PARTS * i for i in range(len(leaves))),
    )
