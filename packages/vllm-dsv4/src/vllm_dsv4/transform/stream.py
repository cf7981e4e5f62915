"""The pass itself: (stored name, tensor) in any order, (official name, tensor) out.

Most tensors leave as they came, under their official name. The others wait until their linear, or
the pair that is fused, is complete; in a checkpoint's own order that is a handful of tensors.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, Literal

from torch import Tensor

from nvfp4_codec.checkpoint.header import shown, some_names
from nvfp4_codec.errors import CheckpointError, CodecError

from ..options import Options, disagreeing, runtime_formats
from ..stored import Stored
from ..weight_map import WeightMap
from .fused import with_one_scale
from .linear import Group, Linear, Linears, Recipe
from .padding import pad_shared, padded_inner
from .report import Tally, TransformReport
from .values import to_bf16, to_fp8

#: Which tensors a model wants: the MTP blocks are a model of their own in vLLM.
Part = Literal["all", "model", "mtp"]
Named = tuple[str, Tensor]

_SCALARS: Final = ("weight_scale_2", "input_scale")
_INDEX: Final = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")
_KINDS_SHOWN: Final = 10

_log = logging.getLogger(__name__)


class Transform:
    """Turns a checkpoint's tensors into those that vLLM's own load_weights takes.

    Names become official. A linear becomes ``.weight`` (BF16), ``.weight`` and ``.scale`` (FP8:
    E4M3, one scale for each 128x128 block, E8M0, or FP32 where expert_dtype is "fp8"), or
    ``.weight``, ``.weight_scale``, ``.weight_scale_2`` and ``.input_scale`` (NVFP4; the last two
    FP32 scalars, equal within what is fused), by `runtime_formats`. Routed experts keep their
    codes; under expert parallelism their weights may be absent from the stream.

    part: "model" leaves out MTP blocks, "mtp" leaves out everything else. shared_tp: over how many
    ranks vLLM splits the shared experts (1 where it replicates them); their inner dimension is
    padded to suit, so the loader must not pad again (see ``padding``).

    Warns of fused linears that run in BF16 because they are stored in different formats. Raises
    OptionError as `runtime_formats` does.
    """

    def __init__(
        self, stored: Stored, options: Options, *, part: Part = "all", shared_tp: int = 1
    ) -> None:
        self._stored = stored
        self._part = part
        self._map = WeightMap(stored.schema, stored.scheme)
        self._e8m0 = stored.config.get("expert_dtype", "fp4") != "fp8"
        self._inner = stored.schema.config.dimensions["inner"]
        self._padded = padded_inner(self._inner, shared_tp) if shared_tp > 1 else self._inner
        self._tally = Tally()
        if differing := [name for name in disagreeing(stored, options) if self._wants(name)]:
            _log.warning(
                "%d linears are fused with others that are stored in another format, and run in "
                "BF16: %s",
                len(differing),
                some_names(differing),
            )
        self._linears = Linears(stored, self._map, runtime_formats(stored, options), self._count)

    @property
    def report(self) -> TransformReport:
        """What was done so far; complete once `apply` is exhausted."""
        return self._tally.report()

    def apply(self, weights: Iterable[Named]) -> Iterator[Named]:
        """The transformed stream; to be exhausted once.

        Tensors may be on any device and are never written to. What the model does not have is
        dropped, with one warning at the end. Raises CheckpointError, naming the tensor, for what
        the headers already showed to be missing, for MTP blocks that are wanted and absent, for a
        tensor that cannot be converted, and at the end for linears of which a part never came.
        """
        self._check_headers()
        known, doubled = self._linears.open, frozenset(self._stored.unknown)
        wants_all = self._part == "all"
        for name, tensor in weights:
            if not (wants_all or self._wants(name)):
                continue
            stored_module, _, part = name.rpartition(".")
            linear = known.get(stored_module)
            if doubled and name in doubled:
                self._drop(name)
            elif linear is None and (linear := self._linears.look_up(stored_module)) is None:
                yield from self._other(name, tensor)
            else:
                yield from self._linear(linear, name, part, tensor)
        self._finish()

    def _check_headers(self) -> None:
        stored = self._stored
        if self._part == "mtp" and not stored.has_mtp:
            raise CheckpointError(
                "the checkpoint has no MTP blocks, which speculative decoding needs. Switch it "
                "off, or export the model again with its MTP blocks."
            )
        missing = [name for name in stored.missing if self._wants(name)]
        if missing:
            raise CheckpointError(
                f"{len(missing)} tensors are missing: {some_names(missing)}. Fetch the checkpoint "
                "again, or export it again.",
                tensor=shown(missing[0]),
            )

    def _wants(self, name: str) -> bool:
        # In every scheme: transformers does not know MTP blocks.
        return self._part == "all" or name.startswith("mtp.") == (self._part == "mtp")

    def _other(self, name: str, tensor: Tensor) -> Iterable[Named]:
        placed = self._map.place(name)
        if placed is None or placed.kind.is_unused or placed.kind.is_linear:
            self._drop(name)
            return ()
        return ((placed.name, tensor),)

    def _linear(self, linear: Linear, name: str, part: str, tensor: Tensor) -> Iterable[Named]:
        recipe = linear.recipe
        if part == "weight_scale_inv":
            part = "scale"
        bit = recipe.bits.get(part)
        if bit is None:  # a gate's bias, or a scale that does not belong
            return self._other(name, tensor)
        if part == "weight":
            if tensor.dtype not in recipe.dtypes:
                raise _mislabelled(name, recipe, tensor)
        elif part in _SCALARS:
            if recipe.own != recipe.runs and part == "input_scale":
                return ()  # of the activations, which the running format quantizes anew
            if tensor.ndim:
                tensor = tensor.reshape(())
        if linear.late:
            if bit:  # there already, under another spelling
                self._drop(name)
                return ()
            return ((f"{linear.module}.{part}", tensor),)
        group = linear.group
        group.waiting &= ~bit
        if not group.waiting:
            self._linears.close(group)
        if recipe.at_once:
            return self._leave(linear, linear.module, {part: tensor})
        if recipe.own == recipe.runs == "nvfp4":
            return self._pack(linear, part, tensor)
        return self._convert(linear, part, tensor)

    def _pack(self, linear: Linear, part: str, tensor: Tensor) -> Iterable[Named]:
        """NVFP4 that is fused: codes leave at once, scales when those of its partner have come."""
        group, module = linear.group, linear.module
        leaving: list[Named] = []
        if part == "weight":
            leaving += self._leave(linear, module, {part: tensor})
            group.codes[module] = tensor
        else:
            group.held.setdefault(module, {})[part] = tensor
        if group.waiting:
            return leaving
        try:
            made, cost = with_one_scale(group.held, group.codes)
        except CodecError as error:
            raise _located(error, group) from None
        if cost:
            self._tally.unify(linear.recipe.path, cost)
        for one, scales in made.items():
            leaving += self._leave(linear, one, scales)
        return leaving

    def _convert(self, linear: Linear, part: str, tensor: Tensor) -> Iterable[Named]:
        group, recipe = linear.group, linear.recipe
        parts = group.held.setdefault(linear.module, {})
        parts[part] = tensor
        if group.waiting:
            return ()
        try:
            if recipe.runs == "bf16":
                return self._leave(linear, linear.module, to_bf16(parts, recipe.own))
            made, cost = to_fp8(parts, recipe.own, e8m0=self._e8m0)
        except CodecError as error:
            raise _located(error, group) from None
        if cost is not None:
            self._tally.requantize(recipe.path, cost)
        return self._leave(linear, linear.module, made)

    def _leave(self, linear: Linear, module: str, parts: dict[str, Tensor]) -> Iterable[Named]:
        if linear.recipe.placed.kind.is_shared and self._padded != self._inner:
            leaf = module.rpartition(".")[2]
            self._tally.padded += sum(tensor.ndim >= 2 for tensor in parts.values())
            parts = {
                part: pad_shared(tensor, part, leaf, self._inner, self._padded)
                for part, tensor in parts.items()
            }
        return [(f"{module}.{part}", tensor) for part, tensor in parts.items()]

    def _count(self, recipe: Recipe) -> None:
        self._tally.layers[recipe.placed.kind.path, recipe.own, recipe.runs] += 1

    def _drop(self, name: str) -> None:
        self._tally.dropped[_INDEX.sub("#", name)] += 1

    def _finish(self) -> None:
        dropped = self._tally.dropped
        if dropped:
            kinds = Counter(dropped).most_common()
            more = len(kinds) - _KINDS_SHOWN
            _log.warning(
                "%d tensors are none that this model uses, and are left out: %s%s",
                sum(dropped.values()),
                ", ".join(f"{count} x {shown(kind)}" for kind, count in kinds[:_KINDS_SHOWN]),
                f" and {more} more kinds" if more > 0 else "",
            )
        if lacking := self._linears.lacking():
            raise CheckpointError(
                f"the stream ended before {len(lacking)} tensors came: {some_names(lacking)} "
                "(official names). Fetch the checkpoint again, or export it again.",
                tensor=shown(lacking[0]),
            )


def _mislabelled(name: str, recipe: Recipe, tensor: Tensor) -> CheckpointError:
    expected = " or ".join(str(dtype) for dtype in recipe.dtypes)
    return CheckpointError(
        f"is {tensor.dtype}, expected {expected}: config.json or the header says that it is "
        f"stored as {recipe.own}. Give a checkpoint whose config and tensors belong together.",
        tensor=shown(name),
    )


def _located(error: CodecError, group: Group) -> CheckpointError:
    return CheckpointError(
        f"{error}. The checkpoint is damaged here.", tensor=shown(f"{group.sources[0]}.weight")
    )
