"""How much memory the symmetric buffer of a layer takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from .buffer_layout import BufferLayout, BufferSizes, buffer_layout
from .errors import BackendError, ShapeError
from .experts import BLOCK_SIZE, is_integer
from .models import MoEShape, local_experts
from .reference import Activation

RING_TILE = 8  # kRingTile of buffer.hpp
LARGEST_TILE = 256
MOST_RING_ROWS = 32768
#: Of a rank: far more than a step has, and no size computed from it leaves 64 bits.
MOST_TOKENS = 1 << 20
MOST_EXPERTS = 1 << 16
MOST_WIDTH = 1 << 20
#: GPUs of the largest NVLink domain (NVL72).
MAX_RANKS = 72
ACROSS_NODES = "across nodes, use a runtime's own all-to-all with another MoE backend"
TOKENS = (256, 8192)


def layer_layout(
    shape: MoEShape,
    activation: Activation,
    num_ranks: int,
    max_tokens: int,
    ring_rows: int | None = None,
) -> BufferLayout:
    """Lay out one rank's buffer.

    max_tokens: a rank's tokens at most. ring_rows: tokens of all ranks that the ring holds at a
    time, a multiple of 256 from 512 on; None: all that may come, every expert's tile padded, but at
    most 32768. Raises ShapeError.
    """
    if not is_integer(max_tokens) or not 1 <= max_tokens <= MOST_TOKENS:
        raise ShapeError(
            f"num_max_tokens_per_rank is {max_tokens}, expected a positive integer of at most "
            f"{MOST_TOKENS}"
        )
    experts = local_experts(shape.num_experts, num_ranks)
    if ring_rows is None:
        most = num_ranks * max_tokens * shape.num_topk + experts * LARGEST_TILE
        ring_rows = min(-(-most // LARGEST_TILE) * LARGEST_TILE, MOST_RING_ROWS)
    fp4 = activation == "nvfp4"
    sizes = BufferSizes(
        num_ranks=num_ranks,
        num_local_experts=experts,
        max_tokens=max_tokens,
        num_topk=shape.num_topk,
        token_bytes=shape.hidden // 2 if fp4 else 2 * shape.hidden,
        token_scales=shape.hidden // BLOCK_SIZE if fp4 else 0,
        intermediate_bytes=shape.intermediate // 2 if fp4 else 2 * shape.intermediate,
        intermediate_scales=shape.intermediate // BLOCK_SIZE if fp4 else 0,
        token_scale_count=int(fp4),
        hidden=shape.hidden,
        ring_rows=ring_rows,
        ring_tiles=ring_rows // RING_TILE,
    )
    return buffer_layout(sizes)


def check_width(**sizes: int) -> None:
    """Refuse sizes of an expert from which no layout can be computed in 64 bits."""
    for name, size in sizes.items():
        if size > MOST_WIDTH:
            raise ShapeError(f"{name} is {size}, expected at most {MOST_WIDTH}")


def check_num_ranks(num_ranks: int) -> None:
    """Refuse what no group is, and more ranks than the largest NVLink domain has GPUs."""
    if num_ranks < 1:
        raise ShapeError(f"the number of ranks is {num_ranks}, expected at least 1")
    if num_ranks > MAX_RANKS:
        raise BackendError(
            f"the group has {num_ranks} ranks, the largest NVLink domain has {MAX_RANKS} GPUs; "
            f"expert parallelism is limited to one domain: {ACROSS_NODES}"
        )


def size_heads(tokens: tuple[int, ...] = TOKENS) -> list[str]:
    """The columns of size_rows."""
    return ["EP", "experts", *(f"{a}, {n:,} tokens" for a in get_args(Activation) for n in tokens)]


def size_rows(shape: MoEShape, tokens: tuple[int, ...] = TOKENS) -> Iterator[list[str]]:
    """Megabytes by number of ranks: the table of docs/kernel-contract.md.

    Each row: ranks, experts of a rank, then for each activation and number of tokens the whole
    buffer, and of it what peers and the caller touch. Where the experts do not divide, redundant
    ones fill up and the row says how many there are then.
    """
    for num_ranks in (1, 2, 4, 8, 16, 32, 64, MAX_RANKS):
        local = -(-shape.num_experts // num_ranks)
        experts = local * num_ranks
        padded = MoEShape(experts, shape.num_topk, shape.hidden, shape.intermediate)
        more = f" ({experts} in all)" if experts != shape.num_experts else ""
        row = [str(num_ranks), f"{local}{more}"]
        for activation in get_args(Activation):
            for count in tokens:
                layout = layer_layout(padded, activation, num_ranks, count)
                row.append(f"{layout.nbytes / 1e6:,.0f} ({layout.shared_bytes / 1e6:,.0f})")
        yield row
