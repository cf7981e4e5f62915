"""Quantize the linear weights of a float checkpoint to NVFP4, tensor by tensor."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from ..checks import NonFinitePolicy
from ..errors import CheckpointError, CodecError, NonFiniteError, ZeroAmaxError
from ..ops import ZeroAmaxPolicy, dequantize_nvfp4, quantize_nvfp4
from ..scales import BLOCK_SIZE, get_profile
from ..sqnr import sqnr_of_pieces
from ..tensors import Divisor, NVFP4Tensor
from .families import FLOATS, Family, find_families, fused_group, fused_groups
from .header import TensorSpec, shown
from .job import Job, Outcome, Step, run
from .measure import amax
from .reader import Checkpoint, as_torch
from .rewrite import Rewrite, documents, modelopt_config
from .structure import located
from .writer import Advance, Fault, ShardWriter, no_advance, no_fault

#: Quantizing and measuring a value takes about as long as copying this many bytes.
_BYTES_PER_VALUE: Final = 16

#: Weights that stay as they are by default, with the reason shown in the table.
_KEPT_NAMES: Final = (
    (re.compile(r"embed|(^|\.)wte|(^|\.)wpe"), "embedding: rows are looked up, not multiplied"),
    (re.compile(r"norm", re.IGNORECASE), "norm"),
    (
        re.compile(r"(^|\.)(lm_head|head|output_projection|classifier|score)(\.|$)"),
        "output head: its error goes straight into the logits",
    ),
    (re.compile(r"(^|\.)(router|gate)(\.|$)"), "router: its error changes which expert runs"),
)

_PIECE: Final = 1 << 20  # elements decoded or measured at a time


@dataclass(frozen=True)
class QuantizeOptions:
    """What to quantize and how. Globs match the tensor's name (``*`` crosses dots).

    include: quantize exactly what matches, names kept by default among them.
    exclude: keep what matches. profile: see ``scales.PROFILES``.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    profile: str = "modelopt"
    zero_amax: ZeroAmaxPolicy = "error"
    nonfinite: NonFinitePolicy = "error"
    quant_algo: Literal["NVFP4", "W4A16_NVFP4"] = "W4A16_NVFP4"


@dataclass(frozen=True)
class Decision:
    """Whether a weight is quantized, and why not."""

    family: Family
    quantize: bool
    reason: str


@dataclass
class QuantizeReport:
    """What was decided, and each written tensor's amax, weight_scale_2 and SQNR (dB)."""

    decisions: list[Decision]
    measured: dict[str, dict[str, float]] = field(default_factory=dict)
    outcome: Outcome | None = None
    input_bytes: int = 0


def decide(families: Sequence[Family], options: QuantizeOptions) -> list[Decision]:
    """The plan for every family; CheckpointError if a pattern of ``include`` fits nothing."""
    decisions = []
    for family in families:
        reason = _reason_to_keep(family, options)
        decisions.append(Decision(family, reason is None, reason or ""))
    for pattern in options.include:
        if not any(fnmatchcase(f.weight.name, pattern) for f in families):
            raise CheckpointError(
                f"--include {shown(pattern)!r} matches none of the {len(families)} weights; "
                "`nvfp4 inspect --each` lists their names."
            )
    return decisions


def planned_work(decisions: Sequence[Decision]) -> int:
    """What ``advance`` adds up to: bytes written, and the arithmetic in terms of these."""
    return sum(
        _arithmetic(d.family) + sum(spec.nbytes for spec in output_specs(d.family))
        if d.quantize
        else d.family.nbytes
        for d in decisions
    )


def _arithmetic(family: Family) -> int:
    return _BYTES_PER_VALUE * family.numel


def _reason_to_keep(family: Family, options: QuantizeOptions) -> str | None:
    name = family.weight.name
    if family.kind != "plain":
        return f"already quantized ({family.kind})"
    if any(fnmatchcase(name, pattern) for pattern in options.exclude):
        return "excluded by --exclude"
    if options.include and not any(fnmatchcase(name, pattern) for pattern in options.include):
        return "not matched by --include"
    if family.weight.dtype not in FLOATS:
        return f"dtype {family.weight.dtype}"
    if not name.endswith(".weight"):
        return "not a weight"
    if not options.include:
        # names before shapes: "norm" says more than "1-D"
        for regex, reason in _KEPT_NAMES:
            if regex.search(family.module):
                return reason
    if len(family.shape) != 2:
        return f"{len(family.shape)}-D, a matrix is needed"
    if family.shape[1] % BLOCK_SIZE or not family.numel:
        return f"K = {family.shape[1]} is no multiple of {BLOCK_SIZE}"
    return None


def quantize_checkpoint(
    source: Checkpoint,
    output: Path,
    options: QuantizeOptions | None = None,
    *,
    resume: bool = False,
    fault: Fault = no_fault,
    advance: Advance = no_advance,
) -> QuantizeReport:
    """Writes an NVFP4 checkpoint under ModelOpt's names; returns what became of each weight.

    Projections that loaders fuse (gate and up; q, k and v) share one weight_scale_2, from
    the largest amax among them. Raises CheckpointError, see ``job.run``.
    """
    options = options or QuantizeOptions()
    families = find_families(source.tensors)
    decisions = decide(families, options)
    chosen = [d.family for d in decisions if d.quantize]
    kept = [d.family for d in decisions if not d.quantize]
    if not chosen:
        raise _nothing_chosen(source, decisions)
    report = QuantizeReport(decisions, input_bytes=sum(info.nbytes for info in source))
    worker = _Worker(
        source, options, {f.module: g for g in fused_groups(chosen) for f in g}, report
    )
    plan = Rewrite(source)
    for family in kept:
        plan.keep(family.members)
    for family in chosen:
        plan.produce(
            family.weight.file,
            output_specs(family),
            worker.step(family, advance),
            family.weight.offset,
        )

    def change_config(config: dict[str, Any]) -> None:
        quantization = modelopt_config(chosen, kept)
        quantization["quant_algo"] = options.quant_algo
        config["quantization_config"] = quantization

    arguments = {
        "include": list(options.include),
        "exclude": list(options.exclude),
        "profile": options.profile,
        "zero_amax": options.zero_amax,
        "nonfinite": options.nonfinite,
        "quant_algo": options.quant_algo,
    }
    job = Job("quantize", arguments, source, plan.shards(), documents(source, change_config))
    report.outcome = run(job, output, resume=resume, fault=fault, advance=advance)
    return report


def _nothing_chosen(source: Checkpoint, decisions: Sequence[Decision]) -> CheckpointError:
    reasons = Counter(decision.reason for decision in decisions).most_common(1)
    why = f"; most often ({reasons[0][1]} times): {reasons[0][0]}" if reasons else ""
    place = source.root if source.is_folder else next(iter(source.paths.values()))
    return CheckpointError(
        f"none of the {len(decisions)} weights is to be quantized{why}. See all reasons with "
        "`nvfp4 quantize --dry-run`, and choose weights with --include.",
        file=shown(os.path.abspath(place)),
    )


def output_specs(family: Family) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    """weight, weight_scale and weight_scale_2 of a matrix under ModelOpt's names."""
    *lead, k = family.shape
    return (
        TensorSpec(f"{family.module}.weight", "U8", (*lead, k // 2)),
        TensorSpec(f"{family.module}.weight_scale", "F8_E4M3", (*lead, k // BLOCK_SIZE)),
        TensorSpec(f"{family.module}.weight_scale_2", "F32", ()),
    )


class _Worker:
    """Quantizes one family at a time; remembers the joint amax of fused projections."""

    def __init__(
        self,
        source: Checkpoint,
        options: QuantizeOptions,
        groups: dict[str, list[Family]],
        report: QuantizeReport,
    ) -> None:
        self.source = source
        self.options = options
        self.groups = groups
        self.report = report
        self.profile = get_profile(options.profile)
        self._joint: dict[tuple[str, str], Tensor] = {}
        if isinstance(self.profile.typed_scale(torch.tensor(1.0)), Divisor):
            raise CheckpointError(
                f"profile {options.profile!r} stores a divisor; expected one with a multiplier. "
                "Quantize with another, then `nvfp4 convert --to compressed-tensors`."
            )

    def step(self, family: Family, advance: Advance) -> Step:
        """The step that writes this family's three tensors."""

        def quantize(writer: ShardWriter) -> None:
            try:
                self._quantize(family, writer)
            except CheckpointError:
                raise
            except ZeroAmaxError as error:
                raise located(
                    error, family, "--zero-amax one stores it, --exclude keeps it."
                ) from None
            except NonFiniteError as error:
                raise located(error, family, "Flag: --nonfinite saturate.") from None
            except CodecError as error:
                raise located(error, family) from None
            advance(_arithmetic(family))

        return quantize

    def _quantize(self, family: Family, writer: ShardWriter) -> None:
        # first, because it reads the other members, a piece at a time
        scale_2 = self._joint_scale(family) if family.module in self.groups else None
        values = self.source.tensor(family.weight.name)
        packed = quantize_nvfp4(
            values,
            weight_scale_2=scale_2,
            profile=self.options.profile,
            zero_amax=self.options.zero_amax,
            nonfinite=self.options.nonfinite,
        )
        assert isinstance(packed.weight_scale_2, Tensor)
        self.report.measured[family.weight.name] = {
            "amax": amax(values),
            "weight_scale_2": float(packed.weight_scale_2),
            "sqnr_db": sqnr_of_pieces(_restored(values, packed)),
        }
        weight, scale, scale_2_spec = output_specs(family)
        writer.write_tensor(weight.name, packed.weight)
        writer.write_tensor(scale.name, packed.weight_scale)
        writer.write_tensor(scale_2_spec.name, packed.weight_scale_2)

    def _joint_scale(self, family: Family) -> Tensor:
        """weight_scale_2 of the group, from the largest finite amax in it."""
        key = fused_group(family.module)
        assert key is not None
        if key not in self._joint:
            largest = [self._finite_amax(member) for member in self.groups[family.module]]
            self._joint[key] = torch.tensor(max(largest), dtype=torch.float32)
        scale = self.profile.global_scale(self._joint[key])
        assert isinstance(scale, Tensor)  # a profile with a divisor was refused before
        return scale

    def _finite_amax(self, family: Family) -> float:
        info = family.weight
        piece = _PIECE * (info.nbytes // family.numel)
        largest = 0.0
        for start in range(0, info.nbytes, piece):
            data = torch.empty(min(piece, info.nbytes - start), dtype=torch.uint8)
            self.source.read_into(info.name, data.numpy(), start)
            values = as_torch(data, info.dtype, (-1,))
            found = amax(values)
            if not found < float("inf"):
                found = amax(values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
            largest = max(largest, found)
        return largest


def _restored(values: Tensor, packed: NVFP4Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(original, decoded) rows; only a piece of the matrix is decoded at a time."""
    step = max(1, _PIECE // values.shape[1])
    for start in range(0, values.shape[0], step):
        rows = slice(start, start + step)
        yield (
            values[rows],
            dequantize_nvfp4(
                packed.weight[rows],
                packed.weight_scale[rows],
                packed.weight_scale_2,
                dtype=torch.float32,
            ),
        )
