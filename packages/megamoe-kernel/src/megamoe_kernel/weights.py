"""Checkpoint weights to kernel weights and back: rearranged once, when a model loads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from nvfp4_codec import NVFP4Tensor, UnifiedPart, unify_weight_scale_2

from . import layout_sm90, layout_sm100
from .errors import ArchitectureError, DtypeError, LayoutError, RecipeError, ShapeError
from .experts import (
    W2,
    W13,
    ExpertWeights,
    as_w2,
    as_w13,
    check_aligned,
    check_beside,
    check_dtype,
    check_scales,
    check_shape,
    check_values,
)

Arch = Literal["sm_100a", "sm_90a"]
Layer = Literal["l1", "l2"]


@dataclass(frozen=True, eq=False)
class MegaMoEWeights:
    """One layer's weights as a kernel reads them; transform_nvfp4_weights_for_mega_moe makes them.

    layer: "l1" (gate and up, interleaved) or "l2" (down). arch: whose layout it is.
    rows, columns: N and K of one expert; l1 has 2 * intermediate rows.
    weight: "sm_100a": codes uint8 ``[E, N, K/2]``; "sm_90a": tiles of codes and scales, uint8
        ``[E, N/64, K/128, 4608]``. See layout_sm100 and layout_sm90.
    scale: "sm_100a": int32 ``[E, N, K/64]``; None for "sm_90a".
    alpha: float32 ``[E, 2]`` (gate, up) or ``[E, 1]``: the factors of the accumulators.
    input_scale: float32 ``[]`` of l2, or None: see ExpertWeights.
    """

    layer: Layer
    arch: Arch
    rows: int
    columns: int
    weight: Tensor
    scale: Tensor | None
    alpha: Tensor
    input_scale: Tensor | None = None

    def __post_init__(self) -> None:
        if self.layer not in get_args(Layer):
            raise LayoutError(f"layer is {self.layer!r}, expected 'l1' or 'l2'")
        check_arch(self.arch)
        check_aligned(rows=self.rows, columns=self.columns)
        check_dtype("weight", self.weight, torch.uint8)
        experts = self.weight.shape[0] if self.weight.ndim else 0
        weight: tuple[int, ...] = (experts, self.rows, self.columns // 2)
        others = [self.alpha]
        if self.arch == "sm_90a":
            down, across = layout_sm90.TILE_ROWS, layout_sm90.TILE_COLUMNS
            weight = (experts, self.rows // down, self.columns // across, layout_sm90.TILE_BYTES)
            if self.scale is not None:
                raise LayoutError("weights for sm_90a have a scale, expected None: it is in weight")
        else:
            check_dtype("scale", self.scale, torch.int32)
            assert self.scale is not None
            check_shape("scale", self.scale, (experts, self.rows, self.columns // 64))
            others.append(self.scale)
        check_shape("weight", self.weight, weight)
        check_dtype("alpha", self.alpha, torch.float32)
        check_shape("alpha", self.alpha, (experts, 2 if self.layer == "l1" else 1))
        # Kernels have the strides in them.
        laid_out = {"weight": self.weight, "alpha": self.alpha}
        if self.scale is not None:
            laid_out["scale"] = self.scale.transpose(1, 2)
        for name, tensor in laid_out.items():
            if not tensor.is_contiguous():
                raise LayoutError(
                    f"{name} does not lie in memory as the transform leaves it: transform the "
                    "weights again, and keep their strides where they are copied"
                )
        check_beside(self.weight, others, self.input_scale)

    @property
    def num_experts(self) -> int:
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes that a kernel reads to use all experts."""
        return sum(t.nbytes for t in (self.weight, self.scale, self.alpha) if t is not None)


def transform_nvfp4_weights_for_mega_moe(
    w13: W13, w2: W2, *, arch: Arch, l2_input_scale: Tensor | None = None
) -> tuple[MegaMoEWeights, MegaMoEWeights]:
    """Rearrange the experts of one layer for a kernel; no value changes.

    w13: ExpertWeights ``[E, 2 * intermediate, hidden]``, or for each expert the NVFP4Tensors (gate,
        up). w2: ExpertWeights ``[E, hidden, intermediate]``, or NVFP4Tensors. load_experts reads
        both from a checkpoint. hidden and intermediate are multiples of 128.
    arch: "sm_100a" (W4A4) or "sm_90a" (W4A16). The result lies on the device of the input; for
        "sm_100a" l2's codes are w2's own memory, if that begins at a multiple of 16 bytes.
    l2_input_scale: float32 ``[]``, instead of w2.input_scale. W4A4 needs one; a multiplier of
        swiglu_limit^2 / 2688 covers all that SwiGLU with that limit can produce.
    Global scales become the alphas: gate and up keep their own (see fold_global_scale).
    Raises ScaleError for block scales that are NaN or negative and for global scales that are not
    positive, ShapeError, DtypeError, ArchitectureError.
    """
    check_arch(arch)
    w13, w2 = as_w13(w13), as_w2(w2)
    if l2_input_scale is not None:
        check_dtype("l2_input_scale", l2_input_scale, torch.float32)
        check_values("l2_input_scale", l2_input_scale)
        w2 = replace(w2, input_scale=l2_input_scale.to(w2.weight.device))
    check_pair(w13, w2)
    if not w13.num_experts:
        raise ShapeError("w13 has no experts, expected at least one")
    check_aligned(hidden=w13.columns, intermediate=w2.columns)
    check_scales("w13", w13)
    check_scales("w2", w2)
    return _transform(w13, "l1", arch), _transform(w2, "l2", arch)


def untransform_nvfp4_weights(
    l1_weights: MegaMoEWeights, l2_weights: MegaMoEWeights
) -> tuple[ExpertWeights, ExpertWeights]:
    """The inverse of transform_nvfp4_weights_for_mega_moe, bit for bit: (w13, w2).

    Raises LayoutError for anything but l1 and l2, in this order, of one architecture.
    """
    check_layers(l1_weights, l2_weights)
    return _untransform(l1_weights), _untransform(l2_weights)


def fold_global_scale(
    weights: ExpertWeights,
    *,
    into: Literal["alpha", "bytes"] = "alpha",
    underflow: Literal["error", "floor", "zero"] = "error",
) -> tuple[ExpertWeights, list[UnifiedPart]]:
    """Choose where the global scales go: the accumulators' alphas, or the block scales.

    into: "alpha" returns the weights as they are; the kernels multiply accumulators by
        weight_scale_2 in float32 and lose nothing. "bytes" multiplies it into every block scale,
        rounded again to E4M3 (most scales then lie among the subnormals, see the report), and
        leaves global scales of one, for kernels of others that have no alpha.
    underflow: with "bytes", what becomes of a block whose scale would round to zero; see
        nvfp4_codec.unify_weight_scale_2.
    Returns the weights and a report for each global scale, expert by expert. Raises DtypeError for
    what is no ExpertWeights, RecipeError if a global scale is above one, LosslessError (of
    nvfp4_codec) for underflow.
    """
    if not isinstance(weights, ExpertWeights):
        raise DtypeError(f"weights is a {type(weights).__name__}, expected ExpertWeights")
    if underflow not in ("error", "floor", "zero"):
        raise RecipeError(f"underflow is {underflow!r}, expected 'error', 'floor' or 'zero'")
    if into not in ("alpha", "bytes"):
        raise RecipeError(f"into is {into!r}, expected 'alpha' or 'bytes'")
    parts = weights.weight_scale.unflatten(1, (weights.num_parts, -1))
    if into == "alpha" or not weights.num_experts:
        blocks = parts[0, 0].numel() if weights.num_experts else 0
        return weights, [UnifiedPart(blocks, 0, 0.0) for _ in range(weights.weight_scale_2.numel())]
    check_scales("weights", weights)
    if bool((weights.weight_scale_2 > 1).any()):
        raise RecipeError(
            f"the largest global scale is {float(weights.weight_scale_2.max()):g}, expected at "
            "most 1 to fold into bytes; keep it in the alphas (into='alpha')"
        )
    codes = weights.weight.unflatten(1, (weights.num_parts, -1))
    unit = _unit_tensor(weights)
    folded, reports = [], []
    for index in range(weights.weight_scale_2.numel()):
        at = divmod(index, weights.num_parts)
        part = NVFP4Tensor(codes[at], parts[at], weights.weight_scale_2[at])
        (tensor, _), (report, _) = unify_weight_scale_2([part, unit], underflow=underflow)
        folded.append(tensor.weight_scale.view(torch.uint8))
        reports.append(report)
    scale = torch.stack(folded).view(torch.float8_e4m3fn).view(weights.weight_scale.shape)
    ones = torch.ones_like(weights.weight_scale_2)
    return replace(weights, weight_scale=scale, weight_scale_2=ones), reports


def check_arch(arch: str) -> None:
    if arch not in get_args(Arch):
        raise ArchitectureError(
            f"arch is {arch!r}, expected one of: {', '.join(get_args(Arch))}; plain sm_90 and "
            "sm_100 lack the instructions that these kernels are made of"
        )


def check_layers(l1: MegaMoEWeights, l2: MegaMoEWeights, kind: str = "") -> None:
    """Refuse what is not (l1, l2) of one architecture."""
    layers: tuple[tuple[MegaMoEWeights, Layer], ...] = ((l1, "l1"), (l2, "l2"))
    for weights, layer in layers:
        name = f"{kind}{layer}_weights"
        if not isinstance(weights, MegaMoEWeights):
            raise LayoutError(
                f"{name} is a {type(weights).__name__}, expected MegaMoEWeights; pass the "
                "checkpoint's weights through transform_nvfp4_weights_for_mega_moe"
            )
        if weights.layer != layer:
            raise LayoutError(f"{name} was transformed as {weights.layer}; l1 comes before l2")
    if l1.arch != l2.arch:
        raise LayoutError(f"{kind}l1_weights are for {l1.arch}, l2_weights for {l2.arch}")


def check_pair(w13: ExpertWeights, w2: ExpertWeights) -> None:
    """Refuse w13 and w2 that are not of one layer."""
    if (w2.num_experts, w2.rows, 2 * w2.columns) != (w13.num_experts, w13.columns, w13.rows):
        raise ShapeError(
            f"w13 is {w13.num_experts} experts of {w13.rows}x{w13.columns} and w2 "
            f"{w2.num_experts} of {w2.rows}x{w2.columns}, expected "
            "[2 * intermediate, hidden] and [hidden, intermediate]"
        )
    if w13.weight.device != w2.weight.device:
        raise ShapeError(f"w13 is on {w13.weight.device}, w2 on {w2.weight.device}")


def _transform(weights: ExpertWeights, layer: Layer, arch: Arch) -> MegaMoEWeights:
    codes, scale = map(_aligned, (weights.weight, weights.weight_scale.view(torch.uint8)))
    words = None
    if arch == "sm_90a":
        codes = layout_sm90.to_tiles(codes, scale, gate_up=layer == "l1")
    else:
        if layer == "l1":
            codes, scale = map(layout_sm100.interleave_gate_up, (codes, scale))
        words = layout_sm100.to_scale_words(scale)
    alpha, input_scale = weights.weight_scale_2.contiguous(), weights.input_scale
    return MegaMoEWeights(
        layer, arch, weights.rows, weights.columns, codes, words, alpha, input_scale
    )


def _aligned(rows: Tensor) -> Tensor:
    """Contiguous bytes at an address from which words are read: bulk copies want 16."""
    rows = rows.contiguous()
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()


def _untransform(weights: MegaMoEWeights) -> ExpertWeights:
    if weights.scale is None:
        codes, scale = layout_sm90.from_tiles(weights.weight, gate_up=weights.layer == "l1")
    else:
        codes, scale = weights.weight, layout_sm100.from_scale_words(weights.scale)
        if weights.layer == "l1":
            codes, scale = map(layout_sm100.separate_gate_up, (codes, scale))
    return ExpertWeights(codes, scale.view(torch.float8_e4m3fn), weights.alpha, weights.input_scale)


def _unit_tensor(weights: ExpertWeights) -> NVFP4Tensor:
    """No values, and the global scale to which the others are brought: one."""
    device = weights.weight.device
    return NVFP4Tensor(
        torch.empty(0, 8, dtype=torch.uint8, device=device),
        torch.empty(0, 1, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
        torch.ones((), dtype=torch.float32, device=device),
    )
