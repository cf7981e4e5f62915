"""The buffer that ranks share: where a caller puts tokens and routing before the kernel runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .buffer_layout import BufferLayout, Field
from .buffer_sizes import (
    LARGEST_TILE,
    MOST_EXPERTS,
    MOST_TOKENS,
    check_num_ranks,
    check_width,
    layer_layout,
)
from .errors import BackendError, DtypeError, LayoutError, RecipeError, ShapeError
from .experts import check_aligned, is_integer
from .failure import Failure, read_failure
from .models import MoEShape
from .nvlink import agree_on_domain, meet
from .reference import Activation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DTYPES = {
    "U8": torch.uint8,
    "E4M3": torch.float8_e4m3fn,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
}


@dataclass(eq=False)
class SymmBuffer:
    """One rank's part of the shared buffer; M is num_max_tokens_per_rank.

    layout: where each field lies; ``field`` gives one as a tensor, ``address`` its address.
    peers: the address of every rank's memory, this rank's included, as this GPU sees it.
    handle: a number by which graphs name the buffer (see find_buffer).
    After ``destroy`` every use raises BackendError.
    """

    activation: Activation
    num_experts: int
    num_max_tokens_per_rank: int
    num_topk: int
    hidden: int
    intermediate: int
    rank_idx: int
    num_ranks: int
    layout: BufferLayout = field(repr=False)
    peers: tuple[int, ...] = field(repr=False)
    memory: Tensor | None = field(repr=False)
    group: ProcessGroup | None = field(repr=False, default=None)
    handle: int = field(repr=False, init=False, default_factory=count().__next__)
    _fields: dict[str, Tensor] = field(repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        _BUFFERS[self.handle] = self

    @property
    def shape(self) -> MoEShape:
        """The layer's sizes."""
        return MoEShape(self.num_experts, self.num_topk, self.hidden, self.intermediate)

    @property
    def num_experts_per_rank(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def device(self) -> torch.device:
        return self._required().device

    @property
    def x(self) -> Tensor:
        """The tokens: uint8 ``[M, hidden/2]`` ("nvfp4") or bfloat16 ``[M, hidden]`` ("bf16")."""
        return self.field("x")

    @property
    def x_sf(self) -> Tensor | None:
        """Block scales, float8_e4m3fn ``[M, hidden/16]``; None for "bf16"."""
        return self.field("x_sf") if self.activation == "nvfp4" else None

    @property
    def x_scale(self) -> Tensor | None:
        """The tokens' scales, float32 ``[M]``; None for "bf16"."""
        return self.field("x_scale").squeeze(1) if self.activation == "nvfp4" else None

    @property
    def topk_idx(self) -> Tensor:
        """Global expert ids or -1, int64 ``[M, num_topk]``."""
        return self.field("topk_idx")

    @property
    def topk_weights(self) -> Tensor:
        """Routing weights, float32 ``[M, num_topk]``."""
        return self.field("topk_weights")

    def field(self, name: str) -> Tensor:
        """A field of the table as a tensor ``[rows, columns]`` in this memory."""
        memory = self._required()
        row = self._row(name)
        if name not in self._fields:
            raw = memory[row.offset : row.offset + row.nbytes]
            dtype = _DTYPES[row.type]
            if self.activation == "bf16" and name in ("x", "ring_x", "ring_h"):
                dtype = torch.bfloat16
            self._fields[name] = raw.view(dtype).view(row.rows, -1)
        return self._fields[name]

    def address(self, name: str) -> int:
        """The address of a field in this rank's memory."""
        return self._required().data_ptr() + self._row(name).offset

    def failure(self) -> Failure | None:
        """The wait that this rank's kernel gave up, if any; waits for the GPU."""
        return read_failure(self.field("failure").view(torch.int32).flatten().tolist())

    def clear(self) -> None:
        """Make it as it was allocated: what the buffers of all ranks need after a failure.

        Collective when there are several ranks, like destroy, and after all work of this GPU.
        """
        memory = self._required()
        self._meet_at_rest()
        memory.zero_()
        self._leave_without_tokens()
        self._meet_at_rest()

    def destroy(self) -> None:
        """Give the memory back, after all work of this GPU; a second call does nothing.

        Collective when there are several ranks: all wait until nobody reads a peer's memory.
        """
        if self.memory is None:
            return
        self._meet_at_rest()
        self._fields.clear()
        self.memory, self.peers, self.group = None, (), None

    def _leave_without_tokens(self) -> None:
        """Of cleared memory."""
        self.topk_idx.fill_(-1)
        if self.x_scale is not None:
            self.x_scale.fill_(1)

    def _meet_at_rest(self) -> None:
        """Afterwards no kernel of any rank uses the memory, and all that was written is there."""
        memory = self._required()
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)
        if self.group is not None:
            meet(self.group)

    def _row(self, name: str) -> Field:
        if not isinstance(name, str) or name not in self.layout.fields:
            raise LayoutError(
                f"the buffer has no field {name!r}, expected one of: "
                f"{', '.join(self.layout.fields)}"
            )
        return self.layout.fields[name]

    def _required(self) -> Tensor:
        if self.memory is None:
            raise BackendError(
                "the buffer was destroyed; allocate another with get_symm_buffer_for_nvfp4_mega_moe"
            )
        return self.memory


#: By handle, as long as somebody else holds them.
_BUFFERS: WeakValueDictionary[int, SymmBuffer] = WeakValueDictionary()


def find_buffer(handle: int) -> SymmBuffer:
    """The buffer of this process with this handle; BackendError if it is gone."""
    buffer = _BUFFERS.get(handle)
    if buffer is None:
        raise BackendError(
            f"there is no buffer {handle}: it was freed, or belongs to another process; keep the "
            "SymmBuffer as long as the graphs that were made with it"
        )
    return buffer


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
    ring_rows: int | None = None,
) -> SymmBuffer:
    """Allocate the buffer of one MoE layer's shape; layers of a model may share it.

    group: the expert-parallel ranks; None is this process alone. One rank gets plain memory.
        Several get torch's symmetric memory: collective, each on its own CUDA device. They are in
        one NVLink domain, at most 72, or all raise BackendError.
    num_experts: of the whole group, a multiple of its size. hidden and intermediate: multiples of
        128. num_topk: 1 to 32. ring_rows: see layer_layout.
    The buffer starts without tokens: every expert id is -1. ``SymmBuffer.destroy`` frees it.
    """
    check_buffer_activation(activation)
    check_aligned(hidden=hidden, intermediate=intermediate)
    check_width(hidden=hidden, intermediate=intermediate)
    if group is not None and not callable(getattr(group, "size", None)):
        raise DtypeError(f"group is a {type(group).__name__}, expected a ProcessGroup or None")
    num_ranks = 1 if group is None else group.size()
    check_num_ranks(num_ranks)
    if not is_integer(num_experts) or not 1 <= num_experts <= MOST_EXPERTS:
        raise ShapeError(f"num_experts is {num_experts}, expected 1 to {MOST_EXPERTS}")
    if not is_integer(num_topk) or not 1 <= num_topk <= min(32, num_experts):
        raise ShapeError(
            f"num_topk is {num_topk}, expected 1 to 32 and at most {num_experts} experts"
        )
    if ring_rows is not None and (
        not is_integer(ring_rows)
        or not 2 * LARGEST_TILE <= ring_rows <= MOST_TOKENS
        or ring_rows % LARGEST_TILE
    ):
        raise ShapeError(
            f"ring_rows is {ring_rows}, expected a multiple of {LARGEST_TILE} from "
            f"{2 * LARGEST_TILE} to {MOST_TOKENS}"
        )
    shape = MoEShape(num_experts, num_topk, hidden, intermediate)
    layout = layer_layout(shape, activation, num_ranks, num_max_tokens_per_rank, ring_rows)
    device = _checked_device(device)
    peers: tuple[int, ...]
    if group is None or num_ranks == 1:
        memory = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        rank_idx, peers, group = 0, (memory.data_ptr(),), None
    else:
        memory, peers = _allocate_symmetric(group, layout.nbytes, device)
        rank_idx = group.rank()
    buffer = SymmBuffer(
        activation, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate,
        rank_idx, num_ranks, layout, peers, memory, group,
    )  # fmt: skip
    buffer._leave_without_tokens()
    if group is not None:
        # A peer must not read, or signal into, memory that is not cleared yet.
        buffer._meet_at_rest()
    return buffer


def _checked_device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise BackendError(
            f"device is {device!r}, expected a device of torch such as 'cuda' or 'cpu'"
        ) from error
    if found.type not in ("cpu", "cuda"):
        raise BackendError(
            f"device is {str(found)!r}, expected 'cuda', or 'cpu' for the reference: kernels here "
            "are for NVIDIA GPUs"
        )
    if found.type == "cuda" and not torch.cuda.is_available():
        raise BackendError(
            f"device is {str(found)!r} and torch finds no GPU here; pass device='cpu' for the "
            "reference"
        )
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise BackendError(
            f"device is {str(found)!r} and torch finds {torch.cuda.device_count()} GPUs here"
        )
    return found


def _allocate_symmetric(
    group: ProcessGroup, nbytes: int, device: torch.device
) -> tuple[Tensor, tuple[int, ...]]:
    """Cleared memory that all ranks map, and every rank's address of it."""
    if device.type != "cuda":
        raise BackendError(
            f"the group has {group.size()} ranks and device is {device}; ranks share memory over "
            "NVLink, pass each rank's CUDA device. megamoe_kernel.reference.mega_moe computes "
            "several ranks in one process, on any device"
        )
    agree_on_domain(group, device)
    # Imported here: it costs a second, and one rank does without.
    from torch.distributed import _symmetric_memory as symmetric

    memory = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    try:
        handle = symmetric.rendezvous(memory, group)
    except RuntimeError as error:
        raise BackendError(
            f"the {group.size()} ranks cannot map each other's memory: {error}. They must be in "
            "one NVLink domain, with peer access between all GPUs"
        ) from error
    memory.zero_()
    return memory, tuple(handle.buffer_ptrs)


def check_buffer_activation(activation: str) -> None:
    if activation not in ("nvfp4", "bf16"):
        raise RecipeError(
            f"activation is {activation!r}, expected 'nvfp4' (sm_100a) or 'bf16' (sm_90a)"
        )
