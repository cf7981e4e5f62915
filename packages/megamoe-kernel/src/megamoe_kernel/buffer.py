"""The buffer that ranks share: where a caller puts tokens and routing before the kernel runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import BackendError, RecipeError, ShapeError
from .experts import BLOCK_SIZE, check_aligned
from .reference import Activation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class SymmBuffer:
    """One rank's part of the shared buffer, by name; M is num_max_tokens_per_rank.

    x: the tokens: uint8 ``[M, hidden/2]`` ("nvfp4") or bfloat16 ``[M, hidden]`` ("bf16").
    x_sf: float8_e4m3fn ``[M, hidden/16]``, x_scale: float32 ``[M]``; None for "bf16".
    topk_idx: int64 ``[M, num_topk]``, global expert ids or -1. topk_weights: float32, same shape.
    Only the first rows are read, as many as the output has. prepare_inputs fills them.
    """

    activation: Activation
    num_experts: int
    num_max_tokens_per_rank: int
    num_topk: int
    hidden: int
    intermediate: int
    rank_idx: int
    num_ranks: int
    x: Tensor
    x_sf: Tensor | None
    x_scale: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor

    @property
    def num_experts_per_rank(self) -> int:
        return self.num_experts // self.num_ranks


def get_symm_buffer_for_nvfp4_mega_moe(
    group: ProcessGroup | None = None,
    *,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate: int,
    activation: Activation = "nvfp4",
    device: torch.device | str = "cpu",
) -> SymmBuffer:
    """Allocate the buffer of one MoE layer's shape; layers of a model may share it.

    group: the expert-parallel ranks; None is this process alone. Several ranks are refused by name
        (BackendError): their shared memory is not written yet.
    num_experts: of the whole group, a multiple of its size. hidden and intermediate: multiples of
        128. num_topk: 1 to 32.
    """
    check_buffer_activation(activation)
    check_aligned(hidden=hidden, intermediate=intermediate)
    num_ranks = 1 if group is None else group.size()
    if num_ranks > 1:
        raise BackendError(
            f"the group has {num_ranks} ranks, expected one: memory that ranks share is not there "
            "yet; megamoe_kernel.reference.mega_moe computes several ranks in one process"
        )
    for name, value in (
        ("num_experts", num_experts),
        ("num_max_tokens_per_rank", num_max_tokens_per_rank),
    ):
        if not isinstance(value, int) or value < 1:
            raise ShapeError(f"{name} is {value}, expected a positive integer")
    if not 1 <= num_topk <= min(32, num_experts):
        raise ShapeError(
            f"num_topk is {num_topk}, expected 1 to 32 and at most {num_experts} experts"
        )
    tokens = num_max_tokens_per_rank
    x_sf = x_scale = None
    if activation == "nvfp4":
        x = torch.zeros(tokens, hidden // 2, dtype=torch.uint8, device=device)
        raw = torch.zeros(tokens, hidden // BLOCK_SIZE, dtype=torch.uint8, device=device)
        x_sf = raw.view(torch.float8_e4m3fn)
        x_scale = torch.ones(tokens, dtype=torch.float32, device=device)
    else:
        x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=device)
    topk_idx = torch.full((tokens, num_topk), -1, dtype=torch.int64, device=device)
    topk_weights = torch.zeros(tokens, num_topk, dtype=torch.float32, device=device)
    return SymmBuffer(
        activation, num_experts, tokens, num_topk, hidden, intermediate, 0, num_ranks,
        x, x_sf, x_scale, topk_idx, topk_weights,
    )  # fmt: skip


def check_buffer_activation(activation: str) -> None:
    if activation not in ("nvfp4", "bf16"):
        raise RecipeError(
            f"activation is {activation!r}, expected 'nvfp4' (sm_100a) or 'bf16' (sm_90a)"
        )
