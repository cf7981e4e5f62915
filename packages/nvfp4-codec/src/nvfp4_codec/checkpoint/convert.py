"""Convert a checkpoint between quantized formats, one family at a time.

``nvfp4`` casts MXFP4 by its scales (codes verbatim) and renames compressed-tensors;
``compressed-tensors`` renames NVFP4 and inverts the global scale; ``bf16`` dequantizes
anything; ``fp8-block`` requantizes NVFP4. Tensors of no interest to the target are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from ..errors import CheckpointError, CodecError, LosslessError
from . import cast
from .families import Family, find_families, fused_groups
from .header import TensorSpec, shown
from .job import Job, Outcome, run
from .reader import Checkpoint
from .rewrite import Rewrite, documents, modelopt_config, nvfp4_algorithm
from .structure import check_complete, located
from .writer import Advance, Fault, ShardWriter, no_advance, no_fault

Target = Literal["nvfp4", "compressed-tensors", "bf16", "fp8-block"]
TARGETS: Final[tuple[Target, ...]] = ("nvfp4", "compressed-tensors", "bf16", "fp8-block")


@dataclass(frozen=True)
class ConvertOptions:
    """to: the target format. include, exclude: globs over weight names.

    allow_lossy: requantize the blocks that the exact cast from MXFP4 cannot hold, instead
    of refusing. scale_fmt: of ``fp8-block`` ("ue8m0" stores powers of two).
    """

    to: Target
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    allow_lossy: bool = False
    scale_fmt: Literal["fp32", "ue8m0"] = "fp32"


@dataclass
class ConvertReport:
    """Families converted and copied, and remarks on what is not exact, by weight name."""

    converted: list[Family]
    copied: list[Family]
    remarks: dict[str, str] = field(default_factory=dict)
    outcome: Outcome | None = None

    def remark(self, family: Family, text: str) -> None:
        """Adds a remark; a weight may have several."""
        name = family.weight.name
        self.remarks[name] = f"{self.remarks[name]}; {text}" if name in self.remarks else text


def convert_checkpoint(
    source: Checkpoint,
    output: Path,
    options: ConvertOptions,
    *,
    resume: bool = False,
    fault: Fault = no_fault,
    advance: Advance = no_advance,
) -> ConvertReport:
    """Writes the converted checkpoint. Raises CheckpointError, see ``job.run``, and for a
    family that cannot be converted exactly (nvfp4, without ``allow_lossy``)."""
    families = find_families(source.tensors)
    chosen = [family for family in families if _is_chosen(family, options)]
    if not chosen:
        kinds = sorted({family.kind for family in families})
        raise CheckpointError(
            f"nothing to convert to {options.to}: expected {_WANTED[options.to]}, found "
            f"{', '.join(kinds)}. `nvfp4 inspect` shows what there is.",
            file=shown(str(source.root)),
        )
    for family in chosen:
        check_complete(family)
    names = {family.weight.name for family in chosen}
    copied = [family for family in families if family.weight.name not in names]
    report = ConvertReport(chosen, copied)
    plan = Rewrite(source)
    for family in copied:
        plan.keep(family.members)
    _PLANNERS[options.to](_Context(source, plan, options, report))
    job = Job(
        "convert",
        # allow_lossy is left out: it changes no file that was finished without it
        {
            "to": options.to,
            "include": list(options.include),
            "exclude": list(options.exclude),
            "scale_fmt": options.scale_fmt,
        },
        source,
        plan.shards(),
        documents(source, lambda config: _change_config(config, options, report)),
    )
    report.outcome = run(job, output, resume=resume, fault=fault, advance=advance)
    return report


_WANTED: Final[dict[Target, str]] = {
    "nvfp4": "MXFP4, or NVFP4 under compressed-tensors names",
    "compressed-tensors": "NVFP4 under ModelOpt names",
    "bf16": "quantized weights",
    "fp8-block": "NVFP4",
}


def _is_chosen(family: Family, options: ConvertOptions) -> bool:
    name = family.weight.name
    if options.include and not any(fnmatchcase(name, glob) for glob in options.include):
        return False
    if any(fnmatchcase(name, glob) for glob in options.exclude):
        return False
    if options.to == "nvfp4":
        return family.kind == "mxfp4" or (family.kind == "nvfp4" and family.divides)
    if options.to == "compressed-tensors":
        return family.kind == "nvfp4" and not family.divides
    if options.to == "fp8-block":
        return family.kind == "nvfp4" and len(family.shape) == 2
    return family.kind != "plain"


@dataclass(frozen=True)
class _Context:
    source: Checkpoint
    plan: Rewrite
    options: ConvertOptions
    report: ConvertReport


def _joined(family: Family) -> str:
    """``X.`` or ``X_``: what stands before weight_scale for this family's names."""
    name = family.weight.name
    dotted = name.endswith((".weight", ".weight_packed"))
    return family.module + ("." if dotted else "_")


def dense_name(family: Family) -> str:
    """The name of the unpacked, or ModelOpt-packed, weight: X.weight, or X for bare names."""
    joined = _joined(family)
    return joined + "weight" if joined.endswith(".") else family.module


def _step(family: Family, work: Callable[[ShardWriter], None]) -> Callable[[ShardWriter], None]:
    """The step with errors of the numeric code placed at the family's tensor and file."""

    def step(writer: ShardWriter) -> None:
        try:
            work(writer)
        except CheckpointError:
            raise
        except CodecError as error:
            raise located(error, family) from None

    return step


def _plan_nvfp4(context: _Context) -> None:
    mxfp4 = [family for family in context.report.converted if family.kind == "mxfp4"]
    groups = {f.module: group for group in fused_groups(mxfp4) for f in group}
    caster = cast.FamilyCaster(
        context.source, "requantize" if context.options.allow_lossy else "error"
    )
    for family in context.report.converted:
        if family.kind == "nvfp4":
            _plan_rename(context, family, "weight", "weight_scale_2")
            continue
        cast.check_castable(family)
        joined, (*lead, k) = _joined(family), family.shape
        specs = (
            TensorSpec(dense_name(family), "U8", (*lead, k // 2)),
            TensorSpec(f"{joined}weight_scale", "F8_E4M3", (*lead, k // 16)),
            TensorSpec(f"{joined}weight_scale_2", "F32", ()),
        )
        work = _cast_step(context, caster, family, groups.get(family.module, [family]), specs)
        context.plan.produce(family.weight.file, specs, _step(family, work), family.weight.offset)


def _cast_step(
    context: _Context,
    caster: cast.FamilyCaster,
    family: Family,
    group: list[Family],
    specs: tuple[TensorSpec, TensorSpec, TensorSpec],
) -> Callable[[ShardWriter], None]:
    def work(writer: ShardWriter) -> None:
        try:
            lossy = caster.write(writer, family, group, specs)
        except LosslessError as error:
            raise LosslessError(f"{error}. On the command line: --allow-lossy") from None
        if lossy:
            context.report.remark(
                family,
                f"{lossy} of {family.numel // 32} blocks lie outside the exact window and "
                "were requantized",
            )

    return work


def _plan_compressed_tensors(context: _Context) -> None:
    for family in context.report.converted:
        _plan_rename(context, family, "weight_packed", "weight_global_scale")


def _plan_rename(context: _Context, family: Family, weight: str, global_name: str) -> None:
    """Other names, same bytes; the global scale becomes its float32 reciprocal."""
    source, plan, file, joined = context.source, context.plan, family.weight.file, _joined(family)
    assert family.scale is not None
    assert family.global_scale is not None
    packed = (*family.shape[:-1], family.shape[-1] // 2)
    plan.copy(family.weight, TensorSpec(joined + weight, "U8", packed), file)
    scale = TensorSpec(f"{joined}weight_scale", "F8_E4M3", family.scale.shape)
    plan.copy(family.scale, scale, file)
    shape = (1,) if global_name == "weight_global_scale" else ()
    spec = TensorSpec(joined + global_name, "F32", shape)
    origin = family.global_scale.name

    def invert(writer: ShardWriter) -> None:
        value = source.read(origin).view(np.float32)[0]
        with np.errstate(all="ignore"):
            inverse = np.float32(1.0) / value
        tiny = np.finfo(np.float32).tiny
        if not (tiny <= value < np.inf and tiny <= inverse < np.inf):
            raise CheckpointError(
                f"is {value} with the reciprocal {inverse}; expected two positive normal float32 "
                "numbers. The tensor was all zero or never calibrated: quantize it again.",
                file=shown(family.weight.file),
                tensor=shown(origin),
            )
        if float(inverse) * float(value) != 1.0:
            context.report.remark(
                family,
                "the reciprocal of the global scale is rounded: values may differ by 1 ulp of fp32",
            )
        writer.write(spec.name, inverse.tobytes())

    plan.produce(file, [spec], invert, family.weight.offset)
    for extra in family.extras:
        if extra.name.endswith("input_scale") or extra.name.endswith("input_global_scale"):
            left_out = extra.name.removeprefix(joined)
            context.report.remark(family, f"its {shown(left_out)} was left out")


def _plan_bf16(context: _Context) -> None:
    for family in context.report.converted:
        plan_bf16(context.plan, family)


def plan_bf16(plan: Rewrite, family: Family) -> None:
    """Plans a quantized family's values as one BF16 tensor, in the file of its weight."""
    spec = TensorSpec(dense_name(family), "BF16", family.shape)

    def work(writer: ShardWriter) -> None:
        import torch

        from .values import load_values

        writer.write_tensor(spec.name, load_values(plan.source, family, torch.bfloat16))

    plan.produce(family.weight.file, [spec], work, family.weight.offset)


def _plan_fp8_block(context: _Context) -> None:
    scale_dtype = "F32" if context.options.scale_fmt == "fp32" else "F8_E8M0"
    for family in context.report.converted:
        n, k = family.shape
        specs = (
            TensorSpec(dense_name(family), "F8_E4M3", (n, k)),
            TensorSpec(
                f"{_joined(family)}weight_scale_inv", scale_dtype, (-(-n // 128), -(-k // 128))
            ),
        )

        def work(
            writer: ShardWriter,
            family: Family = family,
            specs: tuple[TensorSpec, TensorSpec] = specs,
        ) -> None:
            from ..convert import nvfp4_to_fp8_block
            from .values import load_nvfp4

            made, added = nvfp4_to_fp8_block(
                *load_nvfp4(context.source, family), scale_fmt=context.options.scale_fmt
            )
            if added.inexact_values:
                context.report.remark(
                    family,
                    f"FP8: {added.sqnr_db:.1f} dB, worst {100 * added.max_relative_error:.1f} %",
                )
            writer.write_tensor(specs[0].name, made.weight)
            writer.write_tensor(specs[1].name, made.weight_scale)

        context.plan.produce(family.weight.file, specs, _step(family, work), family.weight.offset)


_PLANNERS: Final[dict[Target, Callable[[_Context], None]]] = {
    "nvfp4": _plan_nvfp4,
    "compressed-tensors": _plan_compressed_tensors,
    "bf16": _plan_bf16,
    "fp8-block": _plan_fp8_block,
}


def _change_config(config: dict[str, Any], options: ConvertOptions, report: ConvertReport) -> None:
    """Rewrites quantization_config to say what the output holds."""
    kept_quantized = [family for family in report.copied if family.kind != "plain"]
    plain = [family for family in report.copied if family.kind == "plain"]
    if options.to == "bf16":
        if not kept_quantized:
            config.pop("quantization_config", None)
        return
    quantization = modelopt_config(report.converted, plain)
    if options.to == "fp8-block":
        quantization = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": quantization["ignore"],
        }
        if options.scale_fmt == "ue8m0":
            quantization["scale_fmt"] = "ue8m0"
    elif options.to == "compressed-tensors":
        weights = {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "symmetric": True,
            "dynamic": False,
        }
        quantization = {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": quantization["ignore"],
        }
    others = [family for family in kept_quantized if family.kind != "nvfp4"]
    if options.to == "nvfp4" and others:
        del quantization["config_groups"]
        quantization["quant_algo"] = "MIXED_PRECISION"
        algo = nvfp4_algorithm(report.converted)
        layers = {f.module: {"quant_algo": algo, "group_size": 16} for f in report.converted}
        for family in others:
            other = "FP8_PB_WO" if family.kind == "fp8-block" else "MXFP4"
            layers[family.module] = {"quant_algo": other}
        quantization["quantized_layers"] = dict(sorted(layers.items()))
    config["quantization_config"] = quantization
