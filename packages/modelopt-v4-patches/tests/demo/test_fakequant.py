"""Activation rounding against modelopt's quantizer and plain torch formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor

from modelopt_v4_patches.quality.fakequant import fp8, largest, nvfp4, quantizer_for
from nvfp4_codec.checkpoint import Family, TensorInfo


def activations(columns: int = 512) -> Tensor:
    """Rows of very different size, with an all-zero block."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(3, 37, columns, generator=generator)
    x *= torch.exp(2 * torch.randn(3, 37, 1, generator=generator))
    x[1, 2, :128] = 0
    return x


@pytest.mark.parametrize("share", [1.0, 0.25], ids=["all in range", "some above the amax"])
@pytest.mark.filterwarnings("ignore")  # modelopt's own, while it is imported
def test_nvfp4_is_modelopts_quantizer(share: float) -> None:
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    x = activations()
    input_scale = share * x.abs().max() / (6 * 448)
    packed, scale, scale_2 = qtensor.NVFP4QTensor.quantize(
        x, 16, weights_scaling_factor_2=input_scale
    )
    theirs = packed.dequantize(
        torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16}
    )
    assert torch.equal(nvfp4(x, input_scale), theirs)
    assert not torch.equal(theirs, x)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("scale_fmt", ["ue8m0", "fp32"])
def test_fp8_is_the_formula(group: int, scale_fmt: Any) -> None:
    x = activations()
    groups = x.view(3, 37, -1, group)
    scale = groups.abs().amax(-1, keepdim=True) / torch.tensor(448.0)
    if scale_fmt == "ue8m0":
        scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
    scale[groups.abs().amax(-1, keepdim=True) == 0] = 1
    expected = (groups / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(fp8(x, group, scale_fmt), expected.view(x.shape))


def test_the_stored_format_chooses() -> None:
    def family(kind: Any, scale_dtype: str = "F8_E8M0") -> Family:
        info = TensorInfo("w", "U8", (128, 128), "f", 0, 1)
        scale = TensorInfo("s", scale_dtype, (1, 1), "f", 0, 1)
        return Family(kind, "m", (128, 128), info, scale)

    x, scale = activations(), torch.tensor(0.01)
    for kind, dtype, expected in (
        ("nvfp4", "F8_E4M3", nvfp4(x, scale)),
        ("mxfp4", "F8_E8M0", fp8(x, 32)),
        ("fp8-block", "F8_E8M0", fp8(x, 128)),
        ("fp8-block", "F32", fp8(x, 128, "fp32")),
    ):
        quantizer = quantizer_for(family(kind, dtype), scale)
        assert quantizer is not None
        assert torch.equal(quantizer(x), expected)
    assert quantizer_for(family("plain"), None) is None
    assert quantizer_for(family("nvfp4"), None) is None  # served weight-only


def test_experts_share_their_largest_scale() -> None:
    scales = [torch.tensor(0.5), torch.tensor([2.0]), torch.tensor(1.0)]
    assert largest(scales) == torch.tensor(2.0)
    assert largest([]) is None
