"""The order of columns in which fetched tokens meet sm_90a's weights."""

from __future__ import annotations

import ctypes

import torch

from megamoe_kernel import layout_sm90
from nvfp4_codec.packing import pack_e2m1


def _ordered(library: ctypes.CDLL, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    library.megamoe_place_order(
        ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(x.numel() * 2 // 16), ctypes.c_uint64(1),
    )  # fmt: skip
    return out


def test_columns_go_to_their_places(host_library: ctypes.CDLL) -> None:
    x = torch.arange(1024, dtype=torch.int16)
    expected = [
        64 * group + 16 * t + 4 * j + 2 * h + e
        for group in range(16)
        for j in range(4)
        for h in range(2)
        for t in range(4)
        for e in range(2)
    ]
    assert _ordered(host_library, x).tolist() == expected


def test_l1_makes_its_outputs_in_the_same_order(host_library: ctypes.CDLL) -> None:
    """Row r of l1 as its scale bytes tell: outputs stand in the tiles where l2 has the columns."""
    outputs = torch.arange(64, dtype=torch.uint8)
    scale = torch.cat([outputs, outputs + 64])[:, None].expand(128, 8).contiguous()[None]
    codes = torch.zeros(1, 128, 128, dtype=torch.uint8)
    tiles = layout_sm90.to_tiles(pack_e2m1(codes), scale, gate_up=True)
    # A thread's two scales, gate and up, of the first quarter of a quad.
    pairs = tiles[0, :, 0, 4096:].view(2, 2, 4, 8, 4, 2)[:, 0, :, :, 0]
    order = _ordered(host_library, torch.arange(1024, dtype=torch.int16))[:64]
    assert pairs[..., 0].flatten().tolist() == order.tolist()
    assert pairs[..., 1].flatten().tolist() == (order + 64).tolist()
