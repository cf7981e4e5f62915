"""The experts of one DeepSeek-V4 layer, straight from a checkpoint folder."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nvfp4_codec import CheckpointError, LosslessError, mxfp4_to_nvfp4
from nvfp4_codec.checkpoint import Checkpoint
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig, Scheme, detect_scheme, from_official

from .errors import DtypeError, ShapeError
from .experts import BLOCK_SIZE, ExpertWeights, is_integer

_MX_BLOCK_SIZE = 32


def load_experts(
    folder: str | os.PathLike[str], layer: int | str, *, experts: Sequence[int] | None = None
) -> tuple[ExpertWeights, ExpertWeights]:
    """Read the routed experts of one layer: (w13, w2) on the CPU.

    folder: a DeepSeek-V4 checkpoint with config.json, under any of the names that nvfp4_codec
        knows. Experts in NVFP4 are read as they are; MXFP4 experts, as DeepSeek ships them, are
        cast with every code kept (nvfp4_codec.mxfp4_to_nvfp4), gate and up with global scales of
        their own.
    layer: the index of a main layer, or an official block name such as "mtp.0".
    experts: global ids, in the order wanted; None reads all. A rank of expert parallelism gives its
        own, ``range(rank * n, (rank + 1) * n)``.
    w2.input_scale is the largest of all experts of the layer, also of those not read, so that
    every rank has the same one; None if the checkpoint has none (MXFP4, weight-only exports).
    Raises DtypeError and ShapeError for arguments that name no layer or expert, CheckpointError
    naming file and tensor, and LosslessError for MXFP4 weights whose exponents spread too far for
    an exact cast.
    """
    if not isinstance(folder, str | os.PathLike):
        raise DtypeError(f"folder is a {type(folder).__name__}, expected a path")
    block = _block_name(layer)
    config = ModelConfig.from_file(Path(folder) / "config.json")
    hidden, inner = config.dimensions["hidden"], config.dimensions["inner"]
    chosen = _expert_ids(range(config.num_experts) if experts is None else experts)
    if wrong := [e for e in chosen if not 0 <= e < config.num_experts]:
        raise CheckpointError(
            f"expert {wrong[0]} was asked for, the layer has 0 to {config.num_experts - 1}",
            file="config.json",
        )
    with Checkpoint.open(folder) as checkpoint:
        reader = _Reader(checkpoint, f"{block}.ffn.experts")
        w13 = _empty(len(chosen), (inner, inner), hidden)
        w2 = _empty(len(chosen), (hidden,), inner, reader.input_scale(config.num_experts))
        for position, expert in enumerate(chosen):
            for projection, target, part in (("w1", w13, 0), ("w3", w13, 1), ("w2", w2, 0)):
                reader.read(expert, projection, target, position, part)
    return w13, w2


def _block_name(layer: int | str) -> str:
    """``layers.N`` or ``mtp.N``, from an index or that name."""
    if isinstance(layer, int) and is_integer(layer) and layer >= 0:
        return f"layers.{layer}"
    if isinstance(layer, str) and re.fullmatch(r"(layers|mtp)\.(0|[1-9][0-9]*)", layer):
        return layer
    kind = ShapeError if is_integer(layer) or isinstance(layer, str) else DtypeError
    raise kind(
        f"layer is {layer!r}, expected the index of a main layer (0 or more), or a block name such "
        "as 'mtp.0'"
    )


def _expert_ids(experts: object) -> list[int]:
    if isinstance(experts, str) or not isinstance(experts, Iterable):
        raise DtypeError(f"experts is {experts!r}, expected a list of expert ids")
    ids = list(experts)
    if wrong := [e for e in ids if isinstance(e, bool) or not hasattr(e, "__index__")]:
        raise DtypeError(f"experts holds {wrong[0]!r}, expected expert ids, which are integers")
    return [operator.index(e) for e in ids]  # NumPy's integers too


class _Reader:
    """Reads single matrices of one block's experts, in the format that they have."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.checkpoint = checkpoint
        self.prefix = prefix
        self.scheme: Scheme = detect_scheme(checkpoint.tensors)

    def name(self, expert: int, projection: str, tensor: str) -> str:
        return from_official(f"{self.prefix}.{expert}.{projection}.{tensor}", self.scheme)

    def read(
        self, expert: int, projection: str, target: ExpertWeights, position: int, part: int
    ) -> None:
        """Fill one part (gate, up or down) of the target at a position."""
        rows = target.rows // target.num_parts
        at = slice(part * rows, (part + 1) * rows)
        weight, scale = target.weight[position, at], target.weight_scale[position, at]
        if self.name(expert, projection, "weight_scale_2") in self.checkpoint:
            self._fill(self.name(expert, projection, "weight"), ("U8",), weight)
            name = self.name(expert, projection, "weight_scale")
            self._fill(name, ("F8_E4M3",), scale.view(torch.uint8))
            scale_2 = self._scalar(self.name(expert, projection, "weight_scale_2"))
        elif self.name(expert, projection, "scale") in self.checkpoint:
            name = self.name(expert, projection, "weight")
            self._fill(name, ("I8", "U8"), weight)
            e8m0 = torch.empty(rows, target.columns // _MX_BLOCK_SIZE, dtype=torch.uint8)
            self._fill(self.name(expert, projection, "scale"), ("F8_E8M0",), e8m0)
            try:
                cast = mxfp4_to_nvfp4(weight, e8m0)  # keeps every code, in place
            except LosslessError as error:
                raise LosslessError(f"tensor {name}: {error}") from None
            scale.view(torch.uint8).copy_(cast.weight_scale.view(torch.uint8))
            scale_2 = cast.weight_scale_2
        else:
            name = self.name(expert, projection, "weight")
            info = self.checkpoint.info(name)
            raise CheckpointError(
                f"is {info.dtype} with neither NVFP4's weight_scale_2 nor MXFP4's scale beside it; "
                "quantize the checkpoint first (nvfp4 convert, dsv4-quantize export)",
                file=info.file,
                tensor=name,
            )
        target.weight_scale_2[position, part] = scale_2

    def input_scale(self, num_experts: int) -> Tensor | None:
        """The largest input_scale of w2 over all experts of the layer."""
        names = [self.name(expert, "w2", "input_scale") for expert in range(num_experts)]
        found = [name for name in names if name in self.checkpoint]
        if not found:
            return None
        if len(found) < len(names):
            missing = next(name for name in names if name not in self.checkpoint)
            raise CheckpointError(
                f"is missing, though {len(found)} of {len(names)} experts have one; calibrate "
                "again, or export weights only",
                tensor=missing,
            )
        return torch.stack([self._scalar(name) for name in names]).max()

    def _scalar(self, name: str) -> Tensor:
        return self.checkpoint.tensor(self._checked(name, ("F32",), ())).reshape(())

    def _fill(self, name: str, dtypes: tuple[str, ...], out: Tensor) -> None:
        """Read a tensor into memory that is contiguous."""
        self._checked(name, dtypes, tuple(out.shape))
        self.checkpoint.read_into(name, out.view(-1).numpy())

    def _checked(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> str:
        info = self.checkpoint.info(name)
        # Scalars are written with shape [] or [1].
        if info.dtype not in dtypes or info.shape not in _spellings(shape):
            raise CheckpointError(
                f"is {info.dtype} {list(info.shape)}, expected {' or '.join(dtypes)} {list(shape)}",
                file=info.file,
                tensor=name,
            )
        return name


def _spellings(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    yield shape
    if not shape:
        yield (1,)


def _empty(
    experts: int, parts: tuple[int, ...], columns: int, input_scale: Tensor | None = None
) -> ExpertWeights:
    rows = sum(parts)
    scale = torch.empty(experts, rows, columns // BLOCK_SIZE, dtype=torch.uint8)
    return ExpertWeights(
        torch.empty(experts, rows, columns // 2, dtype=torch.uint8),
        scale.view(torch.float8_e4m3fn),
        torch.empty(experts, len(parts), dtype=torch.float32),
        input_scale,
    )
