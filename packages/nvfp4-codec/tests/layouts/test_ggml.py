"""GGML's records, against a reader and a writer that go element by element."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nvfp4_codec import (
    CodecError,
    DtypeError,
    LayoutError,
    MXFP4Tensor,
    NonFiniteError,
    NVFP4Tensor,
    ShapeError,
    from_ggml_mxfp4,
    from_ggml_nvfp4,
    pack_e2m1,
    swizzle_blockscale,
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
        to_ggml_mxfp4(MXFP4Tensor(weight, scale.view(torch.uint8)))


def test_scales_of_another_format_and_other_types_are_refused() -> None:
    mxfp4 = from_ggml_mxfp4(_bytes(2, 34))
    e4m3 = mxfp4.weight_scale.view(torch.float8_e4m3fn)
    with pytest.raises(DtypeError, match="float8_e4m3fn, expected torch.float8_e8m0fnu"):
        to_ggml_mxfp4(MXFP4Tensor(mxfp4.weight, e4m3))
    nvfp4 = from_ggml_nvfp4(_bytes(128, 36, high=0x7F), torch.tensor(1.0))
    with pytest.raises(DtypeError, match="expected an MXFP4Tensor"):
        to_ggml_mxfp4(nvfp4)  # type: ignore[arg-type]
    for bad in (mxfp4, tuple(nvfp4), [nvfp4]):
        with pytest.raises(DtypeError, match="expected an NVFP4Tensor"):
            to_ggml_nvfp4(bad)  # type: ignore[arg-type]
    swizzled = swizzle_blockscale(nvfp4.weight_scale)
    with pytest.raises(LayoutError, match="unswizzle"):
        to_ggml_nvfp4(NVFP4Tensor(nvfp4.weight, swizzled, torch.tensor(1.0)))  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="records are list"):
        from_ggml_mxfp4([0] * 17)  # type: ignore[arg-type]
    for scale in (1.0, None):
        with pytest.raises(DtypeError, match="Divisor"):
            from_ggml_nvfp4(_bytes(1, 36, high=0x7F), scale)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(0, 72), (2, 0, 72), (3, 0), (0, 0)])
def test_no_rows_and_no_columns(shape: tuple[int, ...]) -> None:
    records = torch.empty(shape, dtype=torch.uint8)
    nvfp4 = from_ggml_nvfp4(records, torch.tensor(1.0))
    assert nvfp4.weight.shape == (*shape[:-1], shape[-1] // 36 * 32)
    assert nvfp4.weight_scale.shape == (*shape[:-1], shape[-1] // 36 * 4)
    assert to_ggml_nvfp4(nvfp4)[0].shape == shape
    records = torch.empty(*shape[:-1], shape[-1] // 36 * 17, dtype=torch.uint8)
    mxfp4 = from_ggml_mxfp4(records)
    assert mxfp4.weight_scale.shape == (*shape[:-1], shape[-1] // 36)
    assert to_ggml_mxfp4(mxfp4).shape == records.shape


def test_codes_above_15_and_packed_floats_are_refused() -> None:
    with pytest.raises(CodecError, match="largest code is 16"):
        pack_e2m1(torch.tensor([[3, 16]], dtype=torch.uint8))
    for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float8_e5m2):
        with pytest.raises(DtypeError, match=str(dtype)):
            unpack_e2m1(torch.zeros(2, 2, dtype=torch.uint8).view(dtype))
