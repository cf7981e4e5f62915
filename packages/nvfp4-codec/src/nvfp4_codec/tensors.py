"""What the codec's functions return: packed weights together with their scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import DtypeError, ShapeError


@dataclass(frozen=True, eq=False)
class Divisor:
    """A global scale by which decoding *divides*: compressed-tensors' ``weight_global_scale``.

    ``weight_scale_2`` (ModelOpt, vLLM, TensorRT-LLM) is its reciprocal. The two differ by
    about nine orders of magnitude and nothing in the number says which it is, so the
    direction is a type: a plain tensor is a multiplier, a divisor is wrapped in this class.
    """

    value: Tensor

    def __post_init__(self) -> None:
        _check_scalar("Divisor.value", self.value)

    def to_multiplier(self) -> Tensor:
        """The reciprocal, rounded to float32: a ``weight_scale_2``."""
        return self.value.float().reciprocal().reshape(())

    @classmethod
    def from_multiplier(cls, weight_scale_2: Tensor) -> Divisor:
        """The reciprocal of a ``weight_scale_2``, rounded to float32."""
        _check_scalar("weight_scale_2", weight_scale_2)
        return cls(weight_scale_2.float().reciprocal().reshape(()))


GlobalScale = Tensor | Divisor


def global_scale_value(scale: GlobalScale, name: str = "weight_scale_2") -> tuple[float, bool]:
    """Return ``(value, divides)`` of a global scale after checking its type.

    Raises DtypeError for a bare Python number: its direction would have to be guessed.
    """
    if isinstance(scale, Divisor):
        return float(scale.value.detach()), True
    if not isinstance(scale, Tensor):
        raise DtypeError(
            f"{name} is a {type(scale).__name__}, expected a float32 tensor of one element "
            "(a multiplier) or Divisor(tensor); a bare number does not say its direction"
        )
    _check_scalar(name, scale)
    return float(scale.detach()), False


def dtype_of(value: object) -> object:
    """A tensor's dtype, or the name of what was given instead of a tensor."""
    return value.dtype if isinstance(value, Tensor) else type(value).__name__


def _check_scalar(name: str, value: Tensor) -> None:
    if dtype_of(value) != torch.float32:
        raise DtypeError(
            f"{name} is {dtype_of(value)}, expected a torch.float32 tensor of one element"
        )
    if value.numel() != 1:
        raise ShapeError(
            f"{name} has shape {tuple(value.shape)}, expected one element: "
            "NVFP4 has one global scale per tensor"
        )


@dataclass(frozen=True, eq=False)
class NVFP4Tensor:
    """E2M1 weights with one E4M3 scale per 16 values and one global scale.

    weight: uint8 ``[..., N, K/2]``, even k in the low nibble.
    weight_scale: float8_e4m3fn ``[..., N, K/16]``.
    weight_scale_2: float32 ``[]`` multiplier, or a Divisor (profile "compressed-tensors").
    logical_k: K before padding, if the last block was padded; None otherwise.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_scale_2: GlobalScale
    logical_k: int | None = None

    def __iter__(self) -> Iterator[Tensor | Divisor]:
        return iter((self.weight, self.weight_scale, self.weight_scale_2))


@dataclass(frozen=True, eq=False)
class MXFP4Tensor:
    """E2M1 weights with one E8M0 scale per 32 values (OCP MX v1.0).

    weight: uint8 ``[..., N, K/2]``, even k in the low nibble.
    weight_scale: float8_e8m0fnu ``[..., N, K/32]``.
    """

    weight: Tensor
    weight_scale: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.weight, self.weight_scale))


@dataclass(frozen=True, eq=False)
class FP8BlockTensor:
    """E4M3 weights with one scale per rectangular block (DeepSeek's 128x128).

    weight: float8_e4m3fn ``[N, K]``.
    weight_scale: float32 or float8_e8m0fnu ``[ceil(N / block[0]), ceil(K / block[1])]``.
    """

    weight: Tensor
    weight_scale: Tensor
    block: tuple[int, int] = (128, 128)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.weight, self.weight_scale))
