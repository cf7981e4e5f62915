"""What every launch of a layer hands over: which rank it is, and where all ranks' memory lies."""

from __future__ import annotations

import ctypes

import torch

from megamoe_kernel import get_symm_buffer_for_nvfp4_mega_moe
from megamoe_kernel.launch import CALL_FIELDS, rank_buffers_type, set_call


def test_a_call_carries_its_rank_and_all_peers() -> None:
    buffer = get_symm_buffer_for_nvfp4_mega_moe(
        num_experts=4, num_max_tokens_per_rank=8, num_topk=2, hidden=256, intermediate=128,
        activation="nvfp4",
    )  # fmt: skip
    buffer.rank_idx, buffer.peers = 1, (4096, 8192)
    rows = buffer.layout.fields.values()
    fields = (("buffers", rank_buffers_type(len(rows))), *CALL_FIELDS)
    arguments = type("Arguments", (ctypes.Structure,), {"_fields_": fields})()
    y = torch.empty(3, 256, dtype=torch.bfloat16)
    set_call(arguments, y, buffer, 7.0, 5)
    assert (arguments.rank_idx, arguments.num_tokens, arguments.output) == (1, 3, y.data_ptr())
    assert (arguments.limit, arguments.wait_limit) == (7.0, 5)
    assert arguments.buffers.base[:2] == [4096, 8192]
    assert arguments.buffers.offset[:] == [row.offset for row in rows]
    assert arguments.buffers.nbytes == buffer.layout.nbytes
    set_call(arguments, y, buffer, None, 5)
    assert arguments.limit == float("inf")
