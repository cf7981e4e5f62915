"""GGML's records, against a reader and a writer that go element by element."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nvfp4_codec import (
    DtypeError,
    MXFP4Tensor,
    NonFiniteError,
    NVFP4Tensor,
    ShapeError,
    from_ggml_mxfp4,
    from_ggml_nvfp4,
    pack_e2m1,
    to_ggml_mxfp4,
    to_ggml_nvfp4,
    unpack_e2m1,
)


def _bytes(*shape: int, high: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, high, shape, generator=generator, dtype=torch.uint8)


def _mxfp4_codes(row: list[int]) -> list[int]:
    codes = []
    for start in range(0, len(row), 17):
        quants = row[start + 1 : start + 17]
        codes += [byte % 16 for byte in quants] + [byte // 16 for byte in quants]
    return codes


def _nvfp4_codes(row: list[int]) -> list[int]:
    codes = []
    for start in range(0, len(row), 36):
        for block in range(4):
            quants = row[start + 4 + 8 * block : start + 12 + 8 * block]
            codes += [byte % 16 for byte in quants] + [byte // 16 for byte in quants]
    return codes


def test_mxfp4_records() -> None:
    records = _bytes(5, 3 * 17)
    tensor = from_ggml_mxfp4(records)
    assert tensor.weight_scale.dtype == torch.float8_e8m0fnu
    for row, record in enumerate(records.tolist()):
        assert unpack_e2m1(tensor.weight)[row].tolist() == _mxfp4_codes(record)
        assert tensor.weight_scale.view(torch.uint8)[row].tolist() == record[::17]
    assert torch.equal(to_ggml_mxfp4(tensor), records)


def test_nvfp4_records() -> None:
    records = _bytes(5, 2 * 36, high=0x7F)
    scale_2 = torch.tensor(2.0**-12)
    tensor = from_ggml_nvfp4(records, scale_2)
    assert tensor.weight_scale.dtype == torch.float8_e4m3fn
    assert tensor.weight_scale_2 is scale_2
    for row, record in enumerate(records.tolist()):
        assert unpack_e2m1(tensor.weight)[row].tolist() == _nvfp4_codes(record)
        scales = record[0:4] + record[36:40]
        assert tensor.weight_scale.view(torch.uint8)[row].tolist() == scales
    written, written_scale = to_ggml_nvfp4(tensor)
    assert torch.equal(written, records)
    assert written_scale is scale_2


def test_stacks() -> None:
    records = _bytes(2, 3, 34)
    assert torch.equal(from_ggml_mxfp4(records).weight[1], from_ggml_mxfp4(records[1]).weight)
    assert torch.equal(to_ggml_mxfp4(from_ggml_mxfp4(records)), records)


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFF])
def test_scales_that_ggml_reads_otherwise_are_refused(byte: int) -> None:
    records = torch.zeros(1, 36, dtype=torch.uint8)
    records[0, 2] = byte
    with pytest.raises(NonFiniteError, match="1 of 4 scale bytes"):
        from_ggml_nvfp4(records, torch.tensor(1.0))


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ShapeError, match="17-byte"):
        from_ggml_mxfp4(_bytes(2, 16))
    with pytest.raises(ShapeError, match="36-byte"):
        from_ggml_nvfp4(_bytes(2, 35), torch.tensor(1.0))
    with pytest.raises(DtypeError):
        from_ggml_mxfp4(torch.zeros(1, 17))
    weight = pack_e2m1(_bytes(2, 32, high=16))
    scale = torch.ones(2, 2).to(torch.float8_e4m3fn)
    with pytest.raises(ShapeError, match="multiple of 4"):
        to_ggml_nvfp4(NVFP4Tensor(weight, scale, torch.tensor(1.0)))
    with pytest.raises(ShapeError, match="expected"):
        to_ggml_mxfp4(MXFP4Tensor(weight, scale))
