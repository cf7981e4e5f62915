"""``verify_load``: is what lies in the model what lies in the checkpoint?

Every linear, and one routed expert of each layer, is compared as soon as vLLM has written all of
it: dequantized from the model's parameters in the format it runs in, against the codec's reading
of the stored tensors. Neither the transform nor vLLM's loaders have a part in the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    RowParallelLinear,
)

from nvfp4_codec import dequantize_fp8_block, dequantize_nvfp4, explain_diff

from .errors import LoadError
from .stored import list_of_experts
from .transform.padding import padded_inner
from .transform.values import NEEDED
from .weight_map import WeightMap, official_modules

if TYPE_CHECKING:
    from .quant_config import DSV4NVFP4Config
    from .stored import Format

Named = tuple[str, Tensor]

#: Half a step of E4M3, by which a converted value (FP8) or block scale (NVFP4) may be off.
_RELATIVE: Final = 2.0**-4
#: What E4M3's subnormals cost beside it: of the matrix's largest value.
_ABSOLUTE: Final = 2.0**-17


@dataclass(frozen=True)
class _Place:
    """Where a checkpoint's linear lies in the model.

    layer, module: vLLM's; rows: of its weight. dim: along which ranks split the linear, tp_size of
    them, this one being tp_rank. padded: to whole blocks. expert: its index among the local ones.
    prefix: of the parameters' names.
    """

    layer: str
    module: Any
    rows: slice
    dim: int
    tp_size: int
    tp_rank: int
    padded: bool = False
    expert: int | None = None
    prefix: str = ""

    def parameter(self, part: str) -> Tensor:
        """One part, of the whole layer or of the one expert."""
        data: Tensor = getattr(self.module, self.prefix + part).data
        return data if self.expert is None else data[self.expert]

    def share(self, full: Tensor) -> Tensor:
        """This rank's part of a matrix; beyond its end, where vLLM pads it, zeros."""
        if self.tp_size == 1:
            return full
        if self.padded:
            shape = list(full.shape)
            shape[self.dim] = padded_inner(shape[self.dim], self.tp_size) - shape[self.dim]
            full = torch.cat([full, full.new_zeros(shape)], self.dim)
        return full.chunk(self.tp_size, self.dim)[self.tp_rank]


class Verifier:
    """Watches a loading model: `source` sees what is stored, `loaded` what vLLM is given."""

    def __init__(self, model: nn.Module, quant_config: DSV4NVFP4Config) -> None:
        self._config = quant_config
        stored = quant_config.stored
        self._map = WeightMap(stored.schema, stored.scheme)
        num_layers = int(stored.config["num_hidden_layers"])
        self._places = dict(_linears(model, num_layers))
        self._places |= dict(_experts(model, num_layers, stored.schema.config.dimensions["inner"]))
        self._together: dict[str, list[str]] = {}
        for module, place in self._places.items():
            self._together.setdefault(place.layer, []).append(module)
        self._source: dict[str, dict[str, Tensor]] = {}
        self._awaited: dict[str, set[tuple[str, str]]] = {}
        self.verified: set[str] = set()

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
            if module in self._places:
                self._arrived(module, part)

    def finish(self) -> None:
        """Raises LoadError if a linear of the model was never complete."""
        if rest := sorted(set(self._places) - self.verified):
            raise LoadError(f"{len(rest)} linears were never loaded, the first is {rest[0]}.")

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


def _linears(model: nn.Module, num_layers: int) -> Iterator[tuple[str, _Place]]:
    for name, module in model.named_modules():
        if not isinstance(module, LinearBase):
            continue
        splits = isinstance(module, ColumnParallelLinear | RowParallelLinear)
        sizes = list(getattr(module, "output_partition_sizes", ())) or [module.output_size]
        start = 0
        for official, size in zip(official_modules(name, num_layers), sizes, strict=True):
            yield (
                official,
                _Place(
                    layer=name,
                    module=module,
                    rows=slice(start, start + size),
                    dim=int(isinstance(module, RowParallelLinear)),
                    tp_size=module.tp_size if splits else 1,
                    tp_rank=module.tp_rank if splits else 0,
                    padded=".shared_experts." in name,
                ),
            )
            start += size


def _experts(model: nn.Module, num_layers: int, inner: int) -> Iterator[tuple[str, _Place]]:
    """The first expert on this rank of each layer; MegaMoE's are in a kernel's own layout."""
    for name, module in model.named_modules():
        if not isinstance(module, RoutedExperts) or not hasattr(module, "w13_weight_scale_2"):
            continue
        (block,) = official_modules(name, num_layers)
        expert = 0 if module.expert_map is None else int((module.expert_map == 0).nonzero())
        ranks = module.moe_config.moe_parallel_config
        own, half = inner // ranks.tp_size, module.w13_weight.shape[1] // 2
        for leaf, prefix, first, size in (
            ("w1", "w13_", 0, own),
            ("w3", "w13_", half, own),
            ("w2", "w2_", 0, module.w2_weight.shape[1]),
        ):
            yield (
                f"{block}.{expert}.{leaf}",
                _Place(
                    layer=name,
                    module=module,
                    rows=slice(first, first + size),
                    dim=int(leaf == "w2"),
                    tp_size=ranks.tp_size,
                    tp_rank=ranks.tp_rank,
                    expert=0,
                    prefix=prefix,
                ),
            )


def _dequantized(parts: Mapping[str, Tensor], own: Format) -> Tensor:
    if own == "nvfp4":
        weight, scale, scale_2 = (parts[part] for part in NEEDED["nvfp4"])
        return dequantize_nvfp4(weight, scale, scale_2.reshape(()), dtype=torch.float32)
    if own == "fp8_block":
        return dequantize_fp8_block(parts["weight"], parts["scale"], dtype=torch.float32)
    return parts["weight"].float()


def _read(place: _Place, own: Format) -> Tensor:
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
