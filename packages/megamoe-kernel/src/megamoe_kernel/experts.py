"""One projection of several experts as tensors: what a checkpoint holds, before any transform."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nvfp4_codec import Divisor, NVFP4Tensor

from .errors import DtypeError, ScaleError, ShapeError

BLOCK_SIZE = 16
ALIGNMENT = 128  # of hidden and intermediate sizes: one tile of every kernel and layout
_LARGEST_UE4M3 = 0x7E  # 448; above it are NaN and the bytes with a sign


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """NVFP4 weights of one projection, expert by expert, in reading order.

    weight: uint8 ``[E, N, K/2]``, even k in the low nibble. ``w13`` has the gate projection (w1) in
        its first N/2 rows and the up projection (w3) in the others.
    weight_scale: float8_e4m3fn ``[E, N, K/16]``, linear.
    weight_scale_2: float32 ``[E, 2]`` for ``w13`` (gate, up), ``[E, 1]`` for ``w2``; multipliers.
    input_scale: float32 ``[]``, of ``w2`` only: the one activation scale by which the intermediate
        is requantized (see quantize_intermediate); None if the checkpoint has none.
    Raises DtypeError or ShapeError for anything else; values are looked at by check_scales.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_scale_2: Tensor
    input_scale: Tensor | None = None

    def __post_init__(self) -> None:
        check_dtype("weight", self.weight, torch.uint8)
        check_dtype("weight_scale", self.weight_scale, torch.float8_e4m3fn)
        check_dtype("weight_scale_2", self.weight_scale_2, torch.float32)
        if self.weight.ndim != 3:
            raise ShapeError(f"weight has shape {tuple(self.weight.shape)}, expected [E, N, K/2]")
        experts, rows, half_columns = self.weight.shape
        columns = 2 * half_columns
        if columns % BLOCK_SIZE:
            raise ShapeError(f"weight has {columns} columns, expected a multiple of {BLOCK_SIZE}")
        check_shape("weight_scale", self.weight_scale, (experts, rows, columns // BLOCK_SIZE))
        parts = self.weight_scale_2.shape[-1] if self.weight_scale_2.ndim else 0
        if tuple(self.weight_scale_2.shape) not in ((experts, 1), (experts, 2)) or rows % parts:
            raise ShapeError(
                f"weight_scale_2 has shape {tuple(self.weight_scale_2.shape)}, expected "
                f"({experts}, 2) for w13 (gate, up) or ({experts}, 1) for w2"
            )
        check_beside(self.weight, [self.weight_scale, self.weight_scale_2], self.input_scale)

    @property
    def num_experts(self) -> int:
        return self.weight.shape[0]

    @property
    def rows(self) -> int:
        """N, the outputs of the projection (gate and up together)."""
        return self.weight.shape[1]

    @property
    def columns(self) -> int:
        """K, the inputs of the projection."""
        return 2 * self.weight.shape[2]

    @property
    def num_parts(self) -> int:
        """2 for w13 (gate and up), 1 for w2: the global scales of an expert."""
        return self.weight_scale_2.shape[1]

    def to(self, device: torch.device | str) -> ExpertWeights:
        """The same weights on another device."""
        return replace(
            self,
            weight=self.weight.to(device),
            weight_scale=self.weight_scale.to(device),
            weight_scale_2=self.weight_scale_2.to(device),
            input_scale=None if self.input_scale is None else self.input_scale.to(device),
        )

    def select(self, experts: slice) -> ExpertWeights:
        """Some of the experts, without a copy."""
        return replace(
            self,
            weight=self.weight[experts],
            weight_scale=self.weight_scale[experts],
            weight_scale_2=self.weight_scale_2[experts],
        )


W13 = ExpertWeights | Sequence[tuple[NVFP4Tensor, NVFP4Tensor]]
W2 = ExpertWeights | Sequence[NVFP4Tensor]


def as_w13(w13: W13) -> ExpertWeights:
    """Stack (gate, up) pairs, one for each expert; ExpertWeights pass through."""
    if not isinstance(w13, ExpertWeights):
        _check_sequence("w13", w13)
        for pair in w13:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise DtypeError(
                    f"w13 holds a {type(pair).__name__}, expected for each expert the pair (gate, "
                    "up) of NVFP4Tensors"
                )
        return _stack("w13", w13)
    if w13.num_parts != 2:
        raise ShapeError(
            f"weight_scale_2 of w13 has shape {tuple(w13.weight_scale_2.shape)}, expected one for "
            f"gate and one for up, ({w13.num_experts}, 2): their global scales differ"
        )
    return w13


def as_w2(w2: W2) -> ExpertWeights:
    """Stack NVFP4Tensors, one for each expert; ExpertWeights pass through."""
    if not isinstance(w2, ExpertWeights):
        _check_sequence("w2", w2)
        return _stack("w2", [(tensor,) for tensor in w2])
    if w2.num_parts != 1:
        raise ShapeError(
            f"weight_scale_2 of w2 has shape {tuple(w2.weight_scale_2.shape)}, expected "
            f"({w2.num_experts}, 1)"
        )
    return w2


def check_scales(name: str, weights: ExpertWeights) -> None:
    """Look at the values of all scales; ScaleError for what no kernel could compute with.

    Block scales must be UE4M3, from 0 to 448: tensor cores ignore a sign bit and pass NaN on.
    """
    check_values(name, weights.weight)
    raw = weights.weight_scale.view(torch.uint8)
    if raw.numel() and int(raw.max()) > _LARGEST_UE4M3:
        num_nan = int(((raw & 0x7F) == 0x7F).sum())
        num_negative = int((raw > _LARGEST_UE4M3).sum()) - num_nan
        raise ScaleError(
            f"weight_scale of {name} has {num_nan} NaN and {num_negative} negative bytes of "
            f"{raw.numel()}, expected UE4M3 from 0 to 448; quantize these weights again (bytes of "
            "E8M0 scales look like this too: cast MXFP4 with mxfp4_to_nvfp4)"
        )
    _check_positive(f"weight_scale_2 of {name}", weights.weight_scale_2)
    if weights.input_scale is not None:
        _check_positive(f"input_scale of {name}", weights.input_scale)


def check_dtype(name: str, value: object, *dtypes: torch.dtype) -> None:
    """Refuse what is no dense tensor of one of these dtypes."""
    found = value.dtype if isinstance(value, Tensor) else type(value).__name__
    if found not in dtypes:
        raise DtypeError(f"{name} is {found}, expected {' or '.join(map(str, dtypes))}")
    if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_nested):
        raise DtypeError(f"{name} is {value.layout}, expected a dense tensor (to_dense)")


def check_values(name: str, tensor: Tensor) -> None:
    """Refuse a tensor without memory, where its values are needed."""
    if tensor.is_meta:
        raise ShapeError(f"{name} is a meta tensor, which has no values; load the weights first")


def check_beside(weight: Tensor, scales: list[Tensor], input_scale: Tensor | None) -> None:
    """Refuse an input_scale that is no float32 scalar, and scales elsewhere than their weight."""
    if input_scale is not None:
        check_dtype("input_scale", input_scale, torch.float32)
        check_shape("input_scale", input_scale, ())
        scales = [*scales, input_scale]
    for tensor in scales:
        if tensor.device != weight.device:
            raise ShapeError(f"scales are on {tensor.device}, weight on {weight.device}")


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")


def check_aligned(**sizes: int) -> None:
    """Refuse sizes that are no positive multiple of the kernels' tile."""
    for name, size in sizes.items():
        if not is_integer(size) or size < 1 or size % ALIGNMENT:
            raise ShapeError(f"{name} is {size}, expected a positive multiple of {ALIGNMENT}")


def is_integer(value: object) -> bool:
    """Whether this is an int and no bool, which Python takes for one."""
    return isinstance(value, int) and not isinstance(value, bool)


def _check_sequence(name: str, experts: object) -> None:
    if not isinstance(experts, Sequence):
        raise DtypeError(
            f"{name} is a {type(experts).__name__}, expected ExpertWeights or a list of "
            "NVFP4Tensors, expert by expert"
        )


def _check_positive(name: str, values: Tensor) -> None:
    wrong = ~((values > 0) & values.isfinite())
    if bool(wrong.any()):
        value = values[wrong].flatten()[0].item()
        raise ScaleError(
            f"{name} holds {value:g}, expected positive finite multipliers; the tensor was not "
            "calibrated, or the scale is a divisor (NVFP4Tensors may hold a Divisor)"
        )


def _stack(name: str, experts: Sequence[Sequence[NVFP4Tensor]]) -> ExpertWeights:
    if not experts:
        raise ShapeError(f"{name} has no experts, expected at least one")
    for index, parts in enumerate(experts):
        for tensor in parts:
            if not isinstance(tensor, NVFP4Tensor):
                raise DtypeError(
                    f"expert {index} of {name} is a {type(tensor).__name__}, expected NVFP4Tensors"
                )
            if tensor.logical_k is not None or tensor.weight.ndim != 2:
                raise ShapeError(
                    f"expert {index} of {name} has weight {tuple(tensor.weight.shape)} and "
                    f"logical_k {tensor.logical_k}, expected an unpadded matrix"
                )
    shapes = {tuple(tensor.weight.shape) for parts in experts for tensor in parts}
    if len(shapes) > 1:
        raise ShapeError(f"{name} has weights of shapes {sorted(shapes)}, expected one shape")
    return ExpertWeights(
        torch.stack([torch.cat([tensor.weight for tensor in parts]) for parts in experts]),
        torch.stack([_scale_bytes(parts) for parts in experts]).view(torch.float8_e4m3fn),
        torch.stack([torch.stack([_multiplier(tensor) for tensor in parts]) for parts in experts]),
    )


def _scale_bytes(parts: Sequence[NVFP4Tensor]) -> Tensor:
    for tensor in parts:
        check_dtype("weight_scale", tensor.weight_scale, torch.float8_e4m3fn)
    # As bytes: not every torch concatenates float8.
    return torch.cat([tensor.weight_scale.view(torch.uint8) for tensor in parts])


def _multiplier(tensor: NVFP4Tensor) -> Tensor:
    scale = tensor.weight_scale_2
    value = scale.to_multiplier() if isinstance(scale, Divisor) else scale
    return value.reshape(()).to(tensor.weight.device)
