"""What `prepare` does to every tensor of the model: copy it, convert it, or make it agree.

Decided from headers, before anything is written: the output's names, dtypes and shapes are known
first, and the steps that fill them hold one linear at a time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Final

from torch import Tensor

from nvfp4_codec.checkpoint.header import TensorSpec, shown
from nvfp4_codec.checkpoint.job import Step
from nvfp4_codec.checkpoint.reader import Checkpoint, TensorInfo
from nvfp4_codec.checkpoint.rewrite import Rewrite
from nvfp4_codec.checkpoint.writer import ShardWriter
from nvfp4_codec.errors import CheckpointError, CodecError
from nvfp4_codec.schemas.deepseek_v4 import Entry, Layout, Schema, fused_with

from .stored import Format, Stored, list_of_experts
from .transform.fused import with_one_scale
from .transform.values import NEEDED, to_bf16, to_fp8
from .weight_map import WeightMap

_SCALES: Final = ("weight_scale", "weight_scale_2", "input_scale")

#: Role, stored format, written format.
Key = tuple[str, Format, Format]


def target(entry: Entry) -> Format:
    """What stock vLLM builds for a linear."""
    if entry.role == "routed_expert":
        return "nvfp4"
    return "fp8_block" if entry.format == "fp8_block" else "bf16"


def formatted(entry: Entry) -> str:
    """The module that `Stored.formats` lists a linear under."""
    return list_of_experts(entry.module()) if entry.role == "routed_expert" else entry.module()


class PreparePlan:
    """Decides for every tensor of the model, and lists the steps that write the shards."""

    def __init__(self, stored: Stored, source: Checkpoint) -> None:
        # Scales of FP8 are E8M0 in what is written, whatever they were.
        config = replace(stored.schema.config, scale_dtype="F8_E8M0")
        self.schema = Schema(config)
        self.rewrite = Rewrite(source)
        self.linears: Counter[Key] = Counter()
        self._source = source
        self._infos = _official(stored, source)
        for entry in self.schema.entries():
            if entry.template.row.linear:
                own, out = stored.formats[formatted(entry)], target(entry)
                self.linears[entry.role, own, out] += 1
                self._linear(entry, own, out)
            else:
                self._copy(entry.name())

    def _linear(self, entry: Entry, own: Format, out: Format) -> None:
        module = entry.module()
        if out == "nvfp4":
            self._expert(module)
        elif own == out == "bf16":
            self._copy(f"{module}.weight")
        elif own == out and self._infos[f"{module}.scale"].dtype == "F8_E8M0":
            self._copy(f"{module}.weight")
            self._copy(f"{module}.scale")
        else:
            layout: Layout = "official" if out == "fp8_block" else "plain"
            specs = [TensorSpec(*spec) for spec in self.schema.stored(entry, layout)]
            self._produce(module, specs, partial(self._convert, module, own, out))

    def _expert(self, module: str) -> None:
        self._copy(f"{module}.weight")
        if len(fused_with(module)) == 1:
            for part in _SCALES:
                self._copy(f"{module}.{part}", scalar=part != "weight_scale")
            return
        infos = [self._infos[f"{module}.{part}"] for part in _SCALES]
        specs = [
            TensorSpec(f"{module}.{part}", info.dtype, info.shape if part == "weight_scale" else ())
            for part, info in zip(_SCALES, infos, strict=True)
        ]
        self._produce(module, specs, partial(self._one_scale, module))

    def _copy(self, name: str, *, scalar: bool = False) -> None:
        info = self._infos[name]
        shape = () if scalar else info.shape
        self.rewrite.copy(info, TensorSpec(name, info.dtype, shape), info.file)

    def _produce(self, module: str, specs: list[TensorSpec], step: Step) -> None:
        info = self._infos[f"{module}.weight"]
        self.rewrite.produce(info.file, specs, _located(step, info), info.offset)

    def _tensor(self, name: str) -> Tensor:
        return self._source.tensor(self._infos[name].name)

    def _convert(self, module: str, own: Format, out: Format, writer: ShardWriter) -> None:
        parts = {part: self._tensor(f"{module}.{part}") for part in NEEDED[own]}
        report = None
        if out == "fp8_block":
            made, report = to_fp8(parts, own, e8m0=True)
        else:
            made = to_bf16(parts, own)
        for part, tensor in made.items():
            writer.write_tensor(f"{module}.{part}", tensor)
        if report is not None and report.inexact_values:
            cost = {"sqnr_db": report.sqnr_db, "max_relative_error": report.max_relative_error}
            writer.note(f"{module}.weight", cost)

    def _one_scale(self, module: str, writer: ShardWriter) -> None:
        """An expert's w1 or w3 with the weight_scale_2 and input_scale that it shares."""
        pair = fused_with(module)
        scales = {
            one: {part: self._tensor(f"{one}.{part}").reshape(()) for part in _SCALES[1:]}
            for one in pair
        }
        first, second = scales.values()
        if all(bool(first[part] == second[part]) for part in _SCALES[1:]):
            for part in _SCALES:
                info = self._infos[f"{module}.{part}"]
                writer.copy(f"{module}.{part}", self._source, info)
            return
        for one in pair:
            scales[one]["weight_scale"] = self._tensor(f"{one}.weight_scale")
        codes = {module: self._tensor(f"{module}.weight")}
        made, report = with_one_scale(scales, codes)
        for part in _SCALES:
            writer.write_tensor(f"{module}.{part}", made[module][part])
        inexact = report[pair.index(module)].inexact_blocks if report else 0
        writer.note(f"{module}.weight_scale", {"inexact_blocks": inexact})


def _official(stored: Stored, source: Checkpoint) -> dict[str, TensorInfo]:
    """The tensors by official name; unknown ones are not among them."""
    places, doubled = WeightMap(stored.schema, stored.scheme), frozenset(stored.unknown)
    found = {}
    for name, info in source.tensors.items():
        placed = places.place(name)
        if placed is not None and name not in doubled:
            found[placed.name] = info
    return found


def _located(step: Step, info: TensorInfo) -> Step:
    """The step with errors of the numeric code placed at its tensor and file."""

    def work(writer: ShardWriter) -> None:
        try:
            step(writer)
        except CheckpointError:
            raise
        except CodecError as error:
            raise CheckpointError(
                f"{error}. The checkpoint is damaged here.",
                file=shown(info.file),
                tensor=shown(info.name),
            ) from None

    return work
