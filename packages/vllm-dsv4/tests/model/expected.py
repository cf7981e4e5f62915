"""What must lie in vLLM's model after loading, from the stored tensors and plain formulas.

Nothing of the plugin is used here. vLLM's layouts are written down again: which linears it fuses,
along which dimension it splits them, where it pads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nvfp4_codec import (
    dequantize_fp8_block,
    dequantize_nvfp4,
    nvfp4_to_fp8_block,
    quantize_fp8_block,
)

#: vLLM's linears within a layer: the official ones in them, and the dimension that ranks split.
LINEARS: Mapping[str, tuple[tuple[str, ...], int | None]] = {
    "attn.fused_wqa_wkv": (("attn.wq_a", "attn.wkv"), None),
    "attn.wq_b": (("attn.wq_b",), 0),
    "attn.wo_a": (("attn.wo_a",), 0),
    "attn.wo_b": (("attn.wo_b",), 1),
    "attn.compressor.fused_wkv_wgate": (
        ("attn.compressor.wkv", "attn.compressor.wgate"), None,
    ),
    "attn.indexer.wq_b": (("attn.indexer.wq_b",), None),
    "attn.indexer.weights_proj": (("attn.indexer.weights_proj",), None),
    "attn.indexer.compressor.fused_wkv_wgate": (
        ("attn.indexer.compressor.wkv", "attn.indexer.compressor.wgate"), None,
    ),
    "ffn.gate": (("ffn.gate",), None),
    "ffn.shared_experts.gate_up_proj": (
        ("ffn.shared_experts.w1", "ffn.shared_experts.w3"), 0,
    ),
    "ffn.shared_experts.down_proj": (("ffn.shared_experts.w2",), 1),
    "e_proj": (("e_proj",), None),
    "h_proj": (("h_proj",), None),
}  # fmt: skip
#: Tensors that are no linear's and have another name in vLLM.
RENAMED = {
    "ffn.gate.e_score_correction_bias": "ffn.gate.bias",
    "shared_head.norm.weight": "norm.weight",
}
_LAYER = re.compile(r"model\.layers\.([0-9]+)\.(?:mtp_block\.)?(.+)")


@dataclass(frozen=True)
class Rank:
    """One rank of a deployment. replicated: shared experts are not split (tokens are)."""

    rank: int = 0
    tp: int = 1
    expert_parallel: bool = False
    replicated: bool = False


class Expected:
    """Compares a loaded model with a checkpoint's tensors; ``compared`` is every parameter seen."""

    def __init__(
        self, oracle: ModuleType, source: Mapping[str, Tensor], rank: Rank, layers: int = 4
    ) -> None:
        self.oracle = oracle
        self.source = source
        self.rank = rank
        self.layers = layers

    def check(self, model: Any) -> None:
        """Every parameter of the model is what the checkpoint means by it."""
        parameters = dict(model.parameters)
        compared: set[str] = set()
        for layer, rest in self._modules(parameters):
            block = f"layers.{layer}" if layer < self.layers else f"mtp.{layer - self.layers}"
            prefix = self._prefix(parameters, layer, rest)
            if rest == "ffn.experts.routed_experts":
                compared |= self._experts(parameters, prefix, block)
            elif rest in LINEARS:
                compared |= self._linear(parameters, prefix, block, rest)
        for name in parameters.keys() - compared:
            if name.endswith((".shared_head.head.weight", "model.embed_tokens.weight")) and (
                f"model.layers.{self.layers}.enorm.weight" in parameters
            ):
                continue  # the draft shares them
            if ".ffn.experts." in name:
                continue  # MegaMoE's, which have tests of their own
            self._other(name, parameters[name])

    def _modules(self, parameters: Mapping[str, Tensor]) -> list[tuple[int, str]]:
        found = (_LAYER.fullmatch(name.rpartition(".")[0]) for name in parameters)
        return sorted({(int(match[1]), match[2]) for match in found if match})

    @staticmethod
    def _prefix(parameters: Mapping[str, Tensor], layer: int, rest: str) -> str:
        plain, within = f"model.layers.{layer}.{rest}", f"model.layers.{layer}.mtp_block.{rest}"
        return within if any(name.startswith(f"{within}.") for name in parameters) else plain

    def _linear(
        self, parameters: Mapping[str, Tensor], prefix: str, block: str, rest: str
    ) -> set[str]:
        names, dim = LINEARS[rest]
        own = {
            part: parameters[f"{prefix}.{part}"]
            for part in ("weight", "weight_scale", "weight_scale_2", "input_scale",
                         "weight_scale_inv")
            if f"{prefix}.{part}" in parameters
        }  # fmt: skip
        modules = [f"{block}.{name}" for name in names]
        rows = self._rows(own["weight"].shape[0], modules, dim)
        start = 0
        for module, size in zip(modules, rows, strict=True):
            self._compare(module, own, slice(start, start + size), dim)
            start += size
        assert start == own["weight"].shape[0]
        if "input_scale" in own:
            largest = max(float(self.source[f"{module}.input_scale"]) for module in modules)
            assert own["input_scale"].tolist() == [largest] * len(modules)
        return {f"{prefix}.{part}" for part in own}

    def _rows(self, total: int, modules: list[str], dim: int | None) -> list[int]:
        if dim == 0:
            return [total // len(modules)] * len(modules)
        return [self.source[f"{module}.weight"].shape[0] for module in modules]

    def _compare(
        self, module: str, own: Mapping[str, Tensor], rows: slice, dim: int | None
    ) -> None:
        meant = self._share(self.oracle.values(self.source, module), module, dim)
        weight = own["weight"][rows]
        stored = self.stored(module)
        if weight.dtype == torch.uint8:
            assert len(set(own["weight_scale_2"].tolist())) == 1
            found = self.oracle.nvfp4(weight, own["weight_scale"][rows], own["weight_scale_2"][0])
            scale_2 = self.source[f"{module}.weight_scale_2"]
            if float(own["weight_scale_2"][0]) == float(scale_2):
                assert torch.equal(found, meant), module
            else:  # the block scales were rounded once
                assert within(found, meant, 2**-4, float(own["weight_scale_2"][0]) * 6 * 2**-10)
        elif weight.dtype == torch.float8_e4m3fn:
            scale = own["weight_scale_inv"][rows.start // 128 : -(-rows.stop // 128)]
            found = self.oracle.fp8(weight, scale)
            if stored == "fp8":
                assert torch.equal(found, meant), module
            else:
                assert torch.equal(found, self._share(self._as_fp8(module, stored), module, dim))
                largest = float(meant.abs().amax())
                assert within(found, meant, 2**-4, largest * 2**-17), module
        else:
            assert weight.dtype == torch.bfloat16
            if stored == "bf16":
                assert torch.equal(weight.double(), meant), module
            else:
                reference = self._as_bf16(module, stored).double()
                assert torch.equal(weight.double(), self._share(reference, module, dim)), module
                assert within(weight.double(), meant, 2**-7, 0.0), module

    def stored(self, module: str) -> str:
        """By dtype."""
        dtype = self.source[f"{module}.weight"].dtype
        return {torch.uint8: "nvfp4", torch.float8_e4m3fn: "fp8"}.get(dtype, "bf16")

    def _parts(self, module: str, *parts: str) -> list[Tensor]:
        return [self.source[f"{module}.{part}"] for part in parts]

    def _as_fp8(self, module: str, stored: str) -> Tensor:
        """The codec's conversion, read by the oracle."""
        if stored == "nvfp4":
            parts = self._parts(module, "weight", "weight_scale", "weight_scale_2")
            made, _ = nvfp4_to_fp8_block(*parts, scale_fmt="ue8m0")
        else:
            made = quantize_fp8_block(self.source[f"{module}.weight"], scale_fmt="ue8m0")
        values: Tensor = self.oracle.fp8(made.weight, made.weight_scale)
        return values

    def _as_bf16(self, module: str, stored: str) -> Tensor:
        if stored == "nvfp4":
            return dequantize_nvfp4(
                *self._parts(module, "weight", "weight_scale", "weight_scale_2")
            )
        return dequantize_fp8_block(*self._parts(module, "weight", "scale"), dtype=torch.bfloat16)

    def _share(self, full: Tensor, module: str, dim: int | None) -> Tensor:
        is_shared = ".shared_experts." in module
        if dim is None or self.rank.tp == 1 or (is_shared and self.rank.replicated):
            return full
        if is_shared:  # to whole blocks of 128 for each rank
            step = 128 * self.rank.tp
            shape = list(full.shape)
            shape[dim] = -full.shape[dim] % step
            full = torch.cat([full, full.new_zeros(shape)], dim)
        return full.chunk(self.rank.tp, dim)[self.rank.rank]

    def _experts(self, parameters: Mapping[str, Tensor], prefix: str, block: str) -> set[str]:
        own = {
            name.removeprefix(f"{prefix}."): parameter
            for name, parameter in parameters.items()
            if name.startswith(f"{prefix}.")
        }
        count = own["w13_weight"].shape[0]
        first = self.rank.rank * count if self.rank.expert_parallel else 0
        split = Rank() if self.rank.expert_parallel else self.rank
        for local in range(count):
            expert = f"{block}.ffn.experts.{first + local}"
            half = own["w13_weight"].shape[1] // 2
            for leaf, fused, rows, dim in (
                ("w1", "w13", slice(0, half), 0),
                ("w3", "w13", slice(half, 2 * half), 0),
                ("w2", "w2", slice(0, None), 1),
            ):
                self._expert(f"{expert}.{leaf}", own, fused, local, rows, dim, split)
            twin = own["w13_weight_scale_2"][local]
            assert twin[0] == twin[1]
        scales = own["w13_input_scale"], own["w2_input_scale"]
        # Some of vLLM's kernels take those of all ranks' experts.
        first_scale = first if len(scales[0]) == count else 0
        for index, (w13, w2) in enumerate(zip(*scales, strict=True), first_scale):
            w1_w2_w3 = (f"{block}.ffn.experts.{index}.w{i}.input_scale" for i in (1, 2, 3))
            gate, down, up = (float(self.source[name]) for name in w1_w2_w3)
            assert w13.tolist() == [max(gate, up)] * 2
            assert float(w2) == down
        return {f"{prefix}.{part}" for part in own}

    def _expert(
        self, module: str, own: Mapping[str, Tensor], fused: str, local: int, rows: slice,
        dim: int, split: Rank,
    ) -> None:  # fmt: skip
        meant = self.oracle.values(self.source, module)
        if split.tp > 1:
            meant = meant.chunk(split.tp, dim)[split.rank]
        scale_2 = own[f"{fused}_weight_scale_2"][local].reshape(-1)[0]
        found = self.oracle.nvfp4(
            own[f"{fused}_weight"][local][rows], own[f"{fused}_weight_scale"][local][rows], scale_2
        )
        if float(scale_2) == float(self.source[f"{module}.weight_scale_2"]):
            assert torch.equal(found, meant), module
        else:
            assert within(found, meant, 2**-4, float(scale_2) * 6 * 2**-10), module

    def _other(self, name: str, parameter: Tensor) -> None:
        """Neither a linear's nor an expert's: as stored, or this rank's part of it."""
        rank, tp = self.rank.rank, self.rank.tp
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            stored = self.source["embed.weight" if "embed" in name else "head.weight"]
            assert torch.equal(parameter.float(), stored.chunk(tp)[rank].float()), name
            return
        stored = self.source[self._official(name)]
        if name.endswith(".attn_sink"):
            own = stored.chunk(tp)[rank]
            assert torch.equal(parameter[: len(own)], own.to(parameter.dtype)), name
            assert bool((parameter[len(own) :] == -torch.inf).all()), name
            return
        assert torch.equal(parameter.double(), stored.double()), name

    def _official(self, name: str) -> str:
        found = _LAYER.fullmatch(name)
        if found is None:
            return name.removeprefix("model.")
        layer, rest = int(found[1]), found[2]
        block = f"layers.{layer}" if layer < self.layers else f"mtp.{layer - self.layers}"
        return f"{block}.{RENAMED.get(rest, rest)}"


def within(found: Tensor, meant: Tensor, relative: float, absolute: float) -> bool:
    """Whether no value is further off than its share plus a floor."""
    return bool(((found - meant).abs() <= relative * meant.abs() + absolute).all())


def shards(model: Any, rank: Rank, experts: int = 16) -> Iterator[tuple[str, set[str]]]:
    """Every parameter of a model, and the parts that must have been written into it."""
    for name, parameter in model.parameters.items():
        module, _, leaf = name.rpartition(".")
        rest = module.partition(".ffn.experts")[2] if ".ffn.experts" in module else None
        fused = next((n for n in LINEARS if module.endswith(f".{n}")), None)
        if rest is not None and leaf.startswith(("w13_", "w2_")):
            own = range(experts)
            if rank.expert_parallel and parameter.shape[0] < experts:
                size = parameter.shape[0]
                own = range(rank.rank * size, (rank.rank + 1) * size)
            leaves = ("w1", "w3") if leaf.startswith("w13_") else ("w2",)
            yield name, {f"{name}[{expert}.{w}]" for expert in own for w in leaves}
        elif rest is not None:  # the shared expert that MegaMoE took in
            down = "w2" if ".mtp_block." in name else "down_proj"  # as vLLM had named it by then
            leaves = ("w1", "w3") if "l1" in leaf else (down,)
            yield name, {f"{name}[{w}]" for w in leaves}
        elif fused is not None and len(LINEARS[fused][0]) == 2:
            yield name, {f"{name}[0]", f"{name}[1]"}
        else:
            yield name, {name}


def check(model: Any, oracle: ModuleType, stored: Any, rank: Rank = Rank()) -> None:
    """Every parameter was written exactly once, part for part, and holds what is stored."""
    wanted = {
        name: parts
        for name, parts in shards(model, rank)
        if not _is_shared_with_target(model, name)
    }
    assert set().union(*wanted.values()) == set(model.loaded_counts)
    assert set(model.loaded_counts.values()) == {1}
    Expected(oracle, stored, rank).check(model)


def _is_shared_with_target(model: Any, name: str) -> bool:
    """The draft takes them from the model it drafts for."""
    return model.class_name.endswith("MTP") and name.endswith(
        (".shared_head.head.weight", "model.embed_tokens.weight")
    )
