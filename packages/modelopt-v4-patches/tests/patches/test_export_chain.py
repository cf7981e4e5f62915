"""From calibration to packed weights on a GPU whose state goes stale, against the CPU's bytes."""

from importlib import import_module
from typing import Any

import pytest
import torch
from fake_gpu import DEVICE, FakeGpu, GpuTensor
from torch import Tensor, nn

from modelopt_v4_patches import apply_patches
from modelopt_v4_patches.errors import PatchError
from modelopt_v4_patches.patches.devices import STATE, state_to_cpu, to_cpu
from modelopt_v4_patches.patches.fused_experts import fused_experts
from modelopt_v4_patches.patches.modelopt import nvfp4_quantizer

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")  # modelopt's own, of many kinds


def two_linears() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16)).bfloat16()


def calibrate(mtq: Any, model: nn.Module, config: Any = None) -> nn.Module:
    """On the device on which the model is."""
    samples = torch.linspace(-3, 3, 128).reshape(4, 32).bfloat16().to(model[0].weight.device)
    with torch.no_grad():
        mtq.quantize(model, config or mtq.NVFP4_DEFAULT_CFG, lambda model: model(samples))
    return model


def state(model: nn.Module) -> dict[str, Tensor]:
    found = {n: t for n, t in model.named_buffers() if n.rpartition(".")[2] in STATE}
    assert found
    return found


def export(model: nn.Module) -> dict[str, Tensor]:
    module = import_module("modelopt.torch.export.unified_export_hf")
    for linear in model.children():
        module._export_quantized_weight(linear, torch.bfloat16)
    return {n: t for n, t in model.state_dict().items() if "quantizer" not in n}


def make_stale(model: nn.Module) -> None:
    for tensor in state(model).values():
        if isinstance(tensor, GpuTensor):
            tensor.stale = True


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert type(tensor) in (Tensor, nn.Parameter), f"{name} is still on the GPU"
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(
            tensor.contiguous().view(-1).view(torch.uint8),
            expected[name].contiguous().view(-1).view(torch.uint8),
        ), name


def test_stale_amax_ends_the_export_without_patches(modelopt: Any) -> None:
    with FakeGpu():
        model = calibrate(modelopt, two_linears().to(DEVICE))
        assert {t.device for t in state(model).values()} == {DEVICE}
        make_stale(model)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            export(model)


def test_amax_is_on_the_cpu_after_calibration_and_the_export_is_the_cpus(modelopt: Any) -> None:
    on_cpu = calibrate(modelopt, two_linears())
    expected_state = {name: tensor.clone() for name, tensor in state(on_cpu).items()}
    expected = export(on_cpu)
    apply_patches()
    with FakeGpu():
        model = calibrate(modelopt, two_linears().to(DEVICE))
        assert_same(state(model), expected_state)
        make_stale(model)
        assert_same(export(model), expected)


def test_fused_experts_are_exported_on_the_cpu() -> None:
    module = import_module("modelopt.torch.export.moe_utils")
    weights = torch.linspace(-1, 1, 512).reshape(1, 32, 16)

    def experts() -> Any:
        result = fused_experts(lambda tensor: tensor)
        result.gate_up_proj.data.copy_(weights)
        return result

    expected = experts()
    module._export_fused_experts(expected, torch.bfloat16)
    apply_patches()
    with FakeGpu():
        found = experts().to(DEVICE)
        module._export_fused_experts(found, torch.bfloat16)
    assert_same(found.state_dict(), expected.state_dict())
    assert "0.gate_proj.weight_scale_2" in found.state_dict()


@pytest.mark.parametrize("patched", [False, True], ids=["without", "with"])
def test_scales_computed_by_themselves(modelopt: Any, patched: bool) -> None:
    utils = import_module("modelopt.torch.export.quant_utils")
    on_cpu = calibrate(modelopt, two_linears())[0]
    block = utils.get_weight_scaling_factor(on_cpu)
    tensor = utils.get_weight_scaling_factor_2(on_cpu)
    packed = utils.to_quantized_weight(on_cpu.weight.data.clone(), block, "nvfp4", tensor, 16)
    with FakeGpu():
        if patched:
            apply_patches()
        model = calibrate(modelopt, two_linears().to(DEVICE))[0]
        weight = model.weight.data.clone()
        results = {
            "block": utils.get_weight_scaling_factor(model),
            "tensor": utils.get_weight_scaling_factor_2(model),
            "packed": utils.to_quantized_weight(weight, block.to(DEVICE), "nvfp4", tensor, 16),
        }
    if patched:
        assert_same(results, {"block": block, "tensor": tensor, "packed": packed})
    else:
        assert all(isinstance(result, GpuTensor) for result in results.values())


def test_pre_quant_scale_and_global_amax_move_and_shared_ones_stay_shared() -> None:
    with FakeGpu():
        model = nn.ModuleList([nn.Module(), nn.Module()])
        shared = torch.tensor(3.0).to(DEVICE)
        for module in model:
            module.register_buffer("_global_amax", shared)
            module.register_buffer("_pre_quant_scale", torch.ones(4).to(DEVICE))
            module.register_buffer("weights", torch.ones(4).to(DEVICE))
        state_to_cpu(model)
    assert {type(tensor) for tensor in state(model).values()} == {Tensor}
    assert model[0]._global_amax is model[1]._global_amax
    assert isinstance(model[0].weights, GpuTensor)  # not quantizer state


@pytest.mark.parametrize("patched", [False, True], ids=["without", "with"])
def test_a_forward_on_the_gpu_works_after_calibration(modelopt: Any, patched: bool) -> None:
    """The trap: with state on the CPU, upstream's forward on a GPU fails."""
    inputs = torch.linspace(-3, 3, 64).reshape(2, 32).bfloat16()
    expected = calibrate(modelopt, two_linears(), modelopt.INT8_DEFAULT_CFG)(inputs)
    if patched:
        apply_patches()
    with FakeGpu(), torch.no_grad():
        model = calibrate(modelopt, two_linears().to(DEVICE), modelopt.INT8_DEFAULT_CFG)
        scale = torch.ones(32).bfloat16()
        model[0].input_quantizer.register_buffer("_pre_quant_scale", scale)  # on the CPU
        if not patched:
            with pytest.raises(RuntimeError, match="same device"):
                model(inputs.to(DEVICE))
            return
        found = model(inputs.to(DEVICE))
        assert model[0].input_quantizer._pre_quant_scale is scale
    assert found.device == DEVICE
    assert torch.equal(found.inner, expected)
    assert {type(tensor) for tensor in state(model).values()} == {Tensor}


def test_within_a_calibration_state_stays_beside_the_weights(modelopt: Any) -> None:
    """Also in a second calibration, where it was on the CPU in between."""
    apply_patches()
    devices = []

    def loop(model: Any) -> None:
        quantizer = model[1].input_quantizer
        model(torch.ones(1, 32).bfloat16().to(DEVICE))
        quantizer.load_calib_amax()  # as each layer of a layerwise calibration does
        devices.append(quantizer._amax.device)

    with FakeGpu(), torch.no_grad():
        model = two_linears().to(DEVICE)
        modelopt.quantize(model, modelopt.NVFP4_DEFAULT_CFG, loop)
        assert {t.device.type for t in state(model).values()} == {"cpu"}
        modelopt.calibrate(model, "max", loop)
        assert {t.device.type for t in state(model).values()} == {"cpu"}
    assert devices == [DEVICE, DEVICE]


@pytest.mark.parametrize("distributed", [False, True], ids=["one-process", "distributed"])
def test_amax_loaded_by_a_script_moves_at_once(
    monkeypatch: pytest.MonkeyPatch, distributed: bool
) -> None:
    """Not where processes agree on amax afterwards: NCCL wants it on the GPU."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: distributed)
    apply_patches()
    with FakeGpu():
        quantizer = nvfp4_quantizer()
        quantizer._calibrator.collect(torch.tensor([-2.0, 1.0]).to(DEVICE))
        quantizer.load_calib_amax()
        assert (quantizer._amax.device == DEVICE) is distributed
        assert quantizer.export_amax().tolist() == 2.0
    assert quantizer._amax.device.type == "cpu"


def test_an_unreadable_tensor_is_named() -> None:
    with FakeGpu():
        model = nn.Sequential(nn.Linear(4, 4)).to(DEVICE)
        model[0].bias.stale = True
        with pytest.raises(
            PatchError, match=r"Sequential: 0\.bias, torch\.float32 \[4\] on maia:0, cannot be read"
        ):
            to_cpu(model)


def test_meta_tensors_stay_for_modelopt_to_refuse() -> None:
    model = nn.Linear(4, 4, device="meta")
    to_cpu(model)
    assert model.weight.is_meta
