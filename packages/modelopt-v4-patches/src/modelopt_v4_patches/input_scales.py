"""The ``input_scale`` of every NVFP4 matrix, from the snapshot, and where each comes from.

Loaders fuse projections of one input and take the larger scale, so fused partners get their
common maximum. An expert that calibration never reached takes its layer's maximum, a layer that
it never reached (MTP blocks always) the model's. Nothing else is ever guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from nvfp4_codec.schemas.deepseek_v4 import Entry, fused_with

from .errors import SnapshotError
from .snapshot import Snapshot

#: From the module itself; from a fused partner; the layer's or the model's largest.
Origin = Literal["own", "partner", "layer", "model"]

_NAMED: Final = 3
_TINY: Final = np.finfo(np.float32).tiny


@dataclass(frozen=True)
class InputScale:
    """A scale (float32, activations), and how far it is the module's own.

    own: the scale that the module alone would have, where its fused partners' differ.
    """

    value: float
    origin: Origin
    own: float | None = None

    @property
    def note(self) -> dict[str, object] | None:
        """What the manifest says of it; None if there is nothing to say."""
        if self.origin != "own":
            return {"input_scale_from": self.origin}
        return None if self.own is None else {"input_scale_from": "largest", "own": self.own}


def input_scales(
    snapshot: Snapshot, entries: Iterable[Entry], *, weight_only: Iterable[str] = ()
) -> dict[str, InputScale]:
    """The scale of each entry's module, by official name.

    weight_only: modules that may go without one; they are then absent from the result.
    Raises SnapshotError naming the modules for which calibration left nothing to take.
    """
    modules = {entry.module(): entry for entry in entries}
    own = {module: _scale(snapshot.input_amax(module)) for module in modules}
    unseen = _Unseen(snapshot, modules.values(), own)
    optional = set(weight_only)
    found: dict[str, InputScale] = {}
    missing: list[str] = []
    for module, entry in modules.items():
        shared = [scale for m in fused_with(module) if (scale := own.get(m)) is not None]
        if shared:
            origin: Origin = "partner" if own[module] is None else unseen.origin(entry)
            largest, mine = max(shared), own[module]
            differs = origin == "own" and mine != largest
            found[module] = InputScale(largest, origin, mine if differs else None)
        elif (other := unseen.fallback(entry)) is not None:
            found[module] = other
        elif module not in optional:
            missing.append(module)
    if missing:
        raise _uncalibrated(missing)
    return found


def _scale(amax: float | None) -> float | None:
    """modelopt's ``amax.float() / (6 * 448)``; None if that is no normal float32."""
    if amax is None:
        return None
    scale = np.float32(amax) / np.float32(6.0 * 448.0)
    return float(scale) if scale >= _TINY else None


class _Unseen:
    """What experts without an amax of their own take."""

    def __init__(
        self,
        snapshot: Snapshot,
        entries: Iterable[Entry],
        own: Mapping[str, float | None],
    ) -> None:
        self._names = frozenset(snapshot.unseen_experts)
        self._largest: dict[tuple[str, str], float] = {}
        for entry in entries:
            scale = own[entry.module()]
            if entry.role == "routed_expert" and scale is not None:
                for place in _places(entry):
                    self._largest[place] = max(scale, self._largest.get(place, 0.0))

    def origin(self, entry: Entry) -> Origin:
        """modelopt has one quantizer for all experts of a layer: its amax is the layer's."""
        expert = entry.module().rpartition(".")[0]
        return "layer" if entry.role == "routed_expert" and expert in self._names else "own"

    def fallback(self, entry: Entry) -> InputScale | None:
        """The layer's or the model's largest scale at an input of the same kind."""
        if entry.role != "routed_expert":
            return None
        layer, model = _places(entry)
        if layer in self._largest:
            return InputScale(self._largest[layer], "layer")
        return InputScale(self._largest[model], "model") if model in self._largest else None


def _places(entry: Entry) -> Iterator[tuple[str, str]]:
    """(layer, input) and ("", input): w1 and w3 read the layer's input, w2 what they made."""
    block, _, rest = entry.module().partition(".ffn.")
    kind = "w2" if rest.endswith(".w2") else "w13"
    yield block, kind
    yield "", kind


def _uncalibrated(missing: list[str]) -> SnapshotError:
    first = ", ".join(missing[:_NAMED]) + (" ..." if len(missing) > _NAMED else "")
    return SnapshotError(
        f"no usable input amax (absent, zero, NaN or Inf) for {len(missing)} modules: {first}. "
        "Only experts may take another's: every token passes the other layers, so their "
        "calibration failed or left them out. Calibrate them, or keep them as they are with "
        "--attn, --shared or --indexer fp8."
    )
