"""The patches on a real GPU: where state is after calibration, and what works with it there."""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelopt_v4_patches import apply_patches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # modelopt's own, of many kinds
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def calibrated(mtq: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)).bfloat16().cuda()
    samples = torch.linspace(-3, 3, 256).reshape(4, 64).bfloat16().cuda()
    with torch.no_grad():
        mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, lambda model: model(samples))
    return model


def amax_devices(model: nn.Module) -> set[str]:
    return {tensor.device.type for name, tensor in model.named_buffers() if "amax" in name}


def export(model: nn.Module) -> dict[str, Tensor]:
    module: Any = import_module("modelopt.torch.export.unified_export_hf")
    for linear in model.children():
        module._export_quantized_weight(linear, torch.bfloat16)
    return {n: t for n, t in model.state_dict().items() if "quantizer" not in n}


def test_calibrate_forward_and_export(modelopt: Any) -> None:
    inputs = torch.linspace(-2, 2, 128).reshape(2, 64).bfloat16().cuda()
    with torch.no_grad():
        unpatched = calibrated(modelopt)
        assert amax_devices(unpatched) == {"cuda"}
        expected = unpatched(inputs)
        expected_tensors = export(unpatched)
        apply_patches()
        model = calibrated(modelopt)
        assert amax_devices(model) == {"cpu"}
        assert torch.equal(model(inputs), expected)  # NVFP4 fake quantization on the GPU
        assert amax_devices(model) == {"cpu"}
        found = export(model)
    assert found.keys() == expected_tensors.keys()
    for name, tensor in found.items():
        assert tensor.device.type == "cpu", name
        same = expected_tensors[name].cpu()
        if tensor.dtype == torch.float32:  # amax / 2688, divided by another unit
            torch.testing.assert_close(tensor, same, rtol=2e-7, atol=0)
        else:
            assert tensor.dtype == same.dtype
            assert torch.equal(tensor.view(torch.uint8), same.view(torch.uint8)), name
