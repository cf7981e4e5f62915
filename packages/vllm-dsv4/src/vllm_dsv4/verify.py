"""``verify_load``: is what lies in the model what lies in the checkpoint?

Every linear, and one routed expert of each layer, is compared as soon as vLLM has written all of
it: dequantized from the model's parameters in the format it runs in, against the codec's reading
of the stored tensors. Neither the transform nor vLLM's loaders have a part in the second. What
lies where nothing here reads it is named (`Verifier.unverified`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from nvfp4_codec import dequantize_fp8_block, dequantize_nvfp4, explain_diff

from .errors import LoadError
from .stored import list_of_experts
from .transform.values import NEEDED
from .verify_places import Place, expert_places, linear_places
from .weight_map import WeightMap

if TYPE_CHECKING:
    from .quant_config import DSV4NVFP4Config
    from .stored import Format

Named = tuple[str, Tensor]

#: Half a step of E4M3, by which a converted value (FP8) or block scale (NVFP4) may be off.
_RELATIVE: Final = 2.0**-4
#: What E4M3's subnormals cost beside it: of the matrix's largest value.
_ABSOLUTE: Final = 2.0**-17


class Verifier:
    """Watches a loading model: `source` sees what is stored, `loaded` what vLLM is given."""

    def __init__(self, model: nn.Module, quant_config: DSV4NVFP4Config) -> None:
        self._config = quant_config
        stored = quant_config.stored
        self._map = WeightMap(stored.schema, stored.scheme)
        num_layers = int(stored.config["num_hidden_layers"])
        self._places = dict(linear_places(model, num_layers))
        inner = stored.schema.config.dimensions["inner"]
        self._places |= dict(expert_places(model, num_layers, inner))
        self._together: dict[str, list[str]] = {}
        for module, place in self._places.items():
            self._together.setdefault(place.layer, []).append(module)
        self._source: dict[str, dict[str, Tensor]] = {}
        self._awaited: dict[str, set[tuple[str, str]]] = {}
        self.verified: set[str] = set()
        self._given: set[str] = set()

    def source(self, weights: Iterable[Named]) -> Iterator[Named]:
        """Passes the stored tensors on and keeps those of linears until they are compared."""
        for name, tensor in weights:
            placed = self._map.place(name)
            if placed is not None and placed.module in self._places:
                self._source.setdefault(placed.module, {})[placed.part] = tensor
            yield name, tensor

    def loaded(self, stream: Iterable[Named]) -> Iterator[Named]:
        """Passes the official tensors on; raises LoadError after the first that arrived wrongly."""
        for name, tensor in stream:
            yield name, tensor
            # vLLM asks for the next one when it has written this one.
            module, _, part = name.rpartition(".")
            self._given.add(list_of_experts(module))
            if module in self._places:
                self._arrived(module, part)

    def finish(self) -> None:
        """Raises LoadError if a linear of the model was never complete."""
        if rest := sorted(set(self._places) - self.verified):
            raise LoadError(f"{len(rest)} linears were never loaded, the first is {rest[0]}.")

    @property
    def unverified(self) -> list[str]:
        """Linears that vLLM was given and that lie where nothing here reads them."""
        read = {list_of_experts(module) for module in self.verified}
        return sorted((self._given & self._config.stored.formats.keys()) - read)

    def _runs_as(self, module: str) -> Format:
        return self._config.formats[list_of_experts(module)]

    def _arrived(self, module: str, part: str) -> None:
        layer = self._places[module].layer
        together = self._together[layer]
        if layer not in self._awaited:
            self._awaited[layer] = {
                (other, needed) for other in together for needed in NEEDED[self._runs_as(other)]
            }
        self._awaited[layer].discard((module, part))
        if not self._awaited[layer] and module not in self.verified:
            for other in together:
                self._compare(other)

    def _compare(self, module: str) -> None:
        place = self._places[module]
        own = self._config.stored.formats[list_of_experts(module)]
        actual = _read(place, self._runs_as(module))
        expected = place.share(_dequantized(self._source.pop(module), own)).to(actual.device)
        tolerance = _RELATIVE * expected.abs() + _ABSOLUTE * expected.abs().amax()
        wrong = ~((actual - expected).abs() <= tolerance)  # NaN is wrong
        if bool(wrong.any()):
            guess = explain_diff(expected, actual).best
            hint = f" It looks like {guess.name}: {guess.meaning}." if guess else ""
            raise LoadError(
                f"{module} (vLLM's {place.layer}) is not what the checkpoint holds: "
                f"{int(wrong.sum())} of {wrong.numel()} values are off.{hint} Run 'vllm-dsv4 "
                "doctor' on the checkpoint; if it finds nothing, report this."
            )
        self.verified.add(module)


def _dequantized(parts: Mapping[str, Tensor], own: Format) -> Tensor:
    if own == "nvfp4":
        weight, scale, scale_2 = (parts[part] for part in NEEDED["nvfp4"])
        return dequantize_nvfp4(weight, scale, scale_2.reshape(()), dtype=torch.float32)
    if own == "fp8_block":
        return dequantize_fp8_block(parts["weight"], parts["scale"], dtype=torch.float32)
    return parts["weight"].float()


def _read(place: Place, own: Format) -> Tensor:
    weight = place.parameter("weight")[place.rows]
    if own == "bf16":
        return weight.float()
    if own == "fp8_block":
        scales = slice(place.rows.start // 128, -(-place.rows.stop // 128))
        scale = place.parameter("weight_scale_inv")[scales]
        return dequantize_fp8_block(weight, scale, dtype=torch.float32)
    # Of a fused linear vLLM takes the largest, of an expert's w1 and w3 the first.
    scales_2 = place.parameter("weight_scale_2").reshape(-1)
    scale_2 = scales_2.max() if place.expert is None else scales_2[0]
    scale = place.parameter("weight_scale")[place.rows]
    return dequantize_nvfp4(weight, scale, scale_2, dtype=torch.float32)
