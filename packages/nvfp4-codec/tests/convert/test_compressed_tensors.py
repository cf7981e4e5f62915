"""The boundary to compressed-tensors: a divisor stays a divisor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nvfp4_codec import (
    CodecError,
    Divisor,
    DtypeError,
    LayoutError,
    MXFP4Tensor,
    NVFP4Tensor,
    ScaleError,
    ShapeError,
    dequantize_nvfp4,
    divisor_to_multiplier,
    from_compressed_tensors,
    multiplier_to_divisor,
    swizzle_blockscale,
    to_compressed_tensors,
)


def test_the_two_directions_are_reciprocals() -> None:
    assert float(divisor_to_multiplier(torch.tensor([3584.0]))) == torch.tensor(1 / 3584).item()
    assert float(multiplier_to_divisor(torch.tensor(2.0**-12)).value) == 4096.0


def test_reading_keeps_the_divisor_and_writing_gives_it_back() -> None:
    layer = {
        "mlp.weight_packed": torch.arange(16, dtype=torch.uint8).view(2, 8),
        "mlp.weight_scale": torch.tensor([[448.0], [3.25]]).to(torch.float8_e4m3fn),
        "mlp.weight_global_scale": torch.tensor([3333.0]),
    }
    tensor = from_compressed_tensors(layer, prefix="mlp.")
    assert isinstance(tensor.weight_scale_2, Divisor)
    written = to_compressed_tensors(tensor, prefix="mlp.")
    assert written.keys() == layer.keys()
    for name, value in layer.items():
        assert written[name].shape == value.shape
        assert torch.equal(written[name].view(torch.uint8), value.view(torch.uint8))
    scale = torch.tensor(448.0) / torch.tensor(3333.0)
    decoded = dequantize_nvfp4(*tensor, dtype=torch.float32, backend="reference")
    assert float(decoded[0, 15]) == float(scale * 0.5 * 0)  # byte 7: codes 7, then 0
    assert float(decoded[0, 14]) == float(scale * 6)


def test_a_multiplier_is_written_as_a_divisor() -> None:
    tensor = NVFP4Tensor(
        torch.zeros(1, 8, dtype=torch.uint8),
        torch.ones(1, 1).to(torch.float8_e4m3fn),
        torch.tensor(2.0**-9),
    )
    assert to_compressed_tensors(tensor)["weight_global_scale"].tolist() == [512.0]


@pytest.mark.parametrize("value", [0.0, -2.0, float("inf"), float("nan"), 2.0**-140, 2.0**127])
def test_scales_without_a_usable_reciprocal_are_refused(value: float) -> None:
    with pytest.raises(ScaleError, match="reciprocal"):
        divisor_to_multiplier(torch.tensor([value]))
    with pytest.raises(ScaleError, match="reciprocal"):
        multiplier_to_divisor(torch.tensor(value))


def test_missing_names_and_bare_numbers_are_refused() -> None:
    with pytest.raises(CodecError, match="missing weight_scale, weight_global_scale"):
        from_compressed_tensors({"weight_packed": torch.zeros(1, 8, dtype=torch.uint8)})
    with pytest.raises(DtypeError):
        multiplier_to_divisor(0.5)  # type: ignore[arg-type]


def _layer(**changes: Tensor) -> dict[str, Tensor]:
    return {
        "weight_packed": torch.zeros(128, 32, dtype=torch.uint8),
        "weight_scale": torch.ones(128, 4).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([512.0]),
    } | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"weight_packed": torch.zeros(128, 32)}, DtypeError, "weight_packed is torch.float32"),
        ({"weight_packed": [0]}, DtypeError, "weight_packed is list"),
        ({"weight_packed": torch.zeros(128, 31, dtype=torch.uint8)}, ShapeError, r"\(128, 31\)"),
        ({"weight_packed": torch.tensor(1, dtype=torch.uint8)}, ShapeError, "weight_packed"),
        ({"weight_scale": torch.ones(128, 4)}, DtypeError, "weight_scale is torch.float32"),
        ({"weight_scale": torch.ones(512).to(torch.float8_e4m3fn)}, ShapeError, r"\(512,\), exp"),
        ({"weight_scale": torch.ones(128, 2).to(torch.float8_e4m3fn)}, ShapeError, r"\(128, 2\)"),
    ],
)
def test_other_contents_are_refused(
    changes: dict[str, Tensor], error: type[Exception], message: str
) -> None:
    from_compressed_tensors(_layer())
    with pytest.raises(error, match=message):
        from_compressed_tensors(_layer(**changes))


def test_other_types_are_refused() -> None:
    with pytest.raises(DtypeError, match="tensors is a list"):
        from_compressed_tensors(list(_layer()))  # type: ignore[arg-type]
    tensor = from_compressed_tensors(_layer())
    for bad in (tuple(tensor), list(tensor), MXFP4Tensor(tensor.weight, tensor.weight_scale)):
        with pytest.raises(DtypeError, match="expected NVFP4Tensor"):
            to_compressed_tensors(bad)  # type: ignore[arg-type]
    swizzled = swizzle_blockscale(tensor.weight_scale)
    with pytest.raises(LayoutError):
        to_compressed_tensors(NVFP4Tensor(tensor.weight, swizzled, tensor.weight_scale_2))  # type: ignore[arg-type]
