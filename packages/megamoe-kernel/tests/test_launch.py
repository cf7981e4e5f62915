"""What every launch of a layer hands over: which rank it is, and where all ranks' memory lies."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamoe_kernel import MegaMoEWeights, get_symm_buffer_for_nvfp4_mega_moe, sm90_kernel
from megamoe_kernel.launch import CALL_FIELDS, rank_buffers_type, set_call
from megamoe_kernel.models import MoEShape
from megamoe_kernel.weights import Layer


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


@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize("with_shared", [False, True], ids=["alone", "shared"])
def test_what_the_hopper_launch_asks_for(
    monkeypatch: pytest.MonkeyPatch, tokens: int, with_shared: bool
) -> None:
    """The kernel for tokens of all ranks, boxes that divide its block, each field's own address."""
    pytest.importorskip("megamoe_kernel._native", reason="needs the compiled extension")
    hidden, intermediate, ranks = 512, 256, 4
    buffer = get_symm_buffer_for_nvfp4_mega_moe(
        num_experts=8, num_max_tokens_per_rank=64, num_topk=2, hidden=hidden,
        intermediate=intermediate, activation="bf16",
    )  # fmt: skip
    buffer.num_ranks = ranks

    def weights(layer: Layer, experts: int) -> MegaMoEWeights:
        rows, columns = (2 * intermediate, hidden) if layer == "l1" else (hidden, intermediate)
        tiles = torch.zeros(experts, rows // 64, columns // 128, 4608, dtype=torch.uint8)
        alpha = torch.ones(experts, 2 if layer == "l1" else 1)
        return MegaMoEWeights(layer, "sm_90a", rows, columns, tiles, None, alpha)

    asked: dict[str, Any] = {}

    class Kernel:
        def launch(self, arguments: Any, grid: tuple[int, ...], **options: Any) -> None:
            asked.update(arguments=arguments, grid=grid, options=options)

    def load(*key: Any) -> Kernel:
        asked["key"] = key
        return Kernel()

    def tensor_map(address: int, rows: int, columns: int, box_rows: int, box_columns: int) -> Any:
        asked.setdefault("maps", []).append((address, rows, columns, box_rows, box_columns))
        return (ctypes.c_ubyte * 128)(len(asked["maps"]))

    monkeypatch.setattr(sm90_kernel, "_load", load)
    monkeypatch.setattr(sm90_kernel, "tensor_map", tensor_map)
    properties = SimpleNamespace(multi_processor_count=131)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    pair = weights("l1", 1), weights("l2", 1)
    shared = (weights("l1", 1), weights("l2", 1)) if with_shared else None
    y = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    sm90_kernel.run_sm90_layer(y, *pair, buffer, swiglu_limit=7.0, shared=shared)

    shape = MoEShape(8, 2, hidden, intermediate)
    tiling = sm90_kernel.tiling_for(shape, tokens * ranks)
    assert tokens == 1 or tiling != sm90_kernel.tiling_for(shape, tokens)
    ring_rows = buffer.layout.fields["ring_x"].rows
    assert asked["key"] == (shape, ranks, ring_rows, tiling, int(with_shared), buffer.device)
    box_rows = 16 if tiling.block_rows % 16 == 0 else 8
    assert asked["maps"] == [
        (buffer.address("ring_x"), ring_rows, hidden, box_rows, 64),
        (buffer.address("ring_h"), ring_rows, intermediate, box_rows, 64),
    ]
    arguments = asked["arguments"]
    assert (arguments.ring_x_map[0], arguments.ring_h_map[0]) == (1, 2)
    given = [(w.tiles, w.alpha) for w in arguments.weights]
    own = [(w.weight.data_ptr(), w.alpha.data_ptr()) for w in (*pair, *(shared or ()))]
    assert given == [*own, *[(None, None)] * (4 - len(own))]
    assert asked["grid"] == (131 // tiling.ctas * tiling.ctas, 1, 1)
    assert asked["options"] == {
        "shared_bytes": 226 * 1024, "cluster": tiling.ctas, "cooperative": True,
    }  # fmt: skip
