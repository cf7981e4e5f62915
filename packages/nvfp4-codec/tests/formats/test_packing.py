"""Two codes per byte, the even element in the low nibble."""

from __future__ import annotations

import pytest
import torch

from nvfp4_codec import DtypeError, ShapeError, pack_e2m1, unpack_e2m1
from nvfp4_codec.formats import encode_e2m1

BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def test_low_nibble_first() -> None:
    codes = encode_e2m1(torch.tensor([0.5, 6.0]))
    assert pack_e2m1(codes).tolist() == [0x71]
    assert unpack_e2m1(torch.tensor([0x71], dtype=torch.uint8)).tolist() == [1, 7]


def test_every_byte_survives_a_round_trip() -> None:
    assert torch.equal(pack_e2m1(unpack_e2m1(BYTES)), BYTES)
    assert torch.equal(pack_e2m1(unpack_e2m1(BYTES.view(4, 8, 8))), BYTES.view(4, 8, 8))


def test_int8_and_float4_containers() -> None:
    expected = unpack_e2m1(BYTES)
    assert torch.equal(unpack_e2m1(BYTES.view(torch.int8)), expected)
    assert torch.equal(unpack_e2m1(BYTES.view(torch.float4_e2m1fn_x2)), expected)


def test_strided_input() -> None:
    codes = (torch.arange(64) % 16).to(torch.uint8).view(4, 16).t()
    assert torch.equal(pack_e2m1(codes), pack_e2m1(codes.contiguous()))
    assert torch.equal(unpack_e2m1(BYTES[::2]), unpack_e2m1(BYTES[::2].contiguous()))


def test_empty() -> None:
    assert pack_e2m1(torch.empty(3, 0, dtype=torch.uint8)).shape == (3, 0)
    assert unpack_e2m1(torch.empty(0, 4, dtype=torch.uint8)).shape == (0, 8)


def test_refusals() -> None:
    with pytest.raises(ShapeError, match="even"):
        pack_e2m1(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ShapeError, match="even"):
        pack_e2m1(torch.tensor(1, dtype=torch.uint8))
    with pytest.raises(DtypeError, match="uint8"):
        pack_e2m1(torch.zeros(4, dtype=torch.int32))
    with pytest.raises(DtypeError, match="two E2M1 codes per byte"):
        unpack_e2m1(torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ShapeError, match="scalar"):
        unpack_e2m1(torch.tensor(1, dtype=torch.uint8))
