"""The same bytes on a GPU as on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megamoe_kernel import (
    ExpertWeights,
    fp8_nvfp4_mega_moe,
    get_symm_buffer_for_nvfp4_mega_moe,
    prepare_inputs,
    quantize_tokens,
    transform_nvfp4_weights_for_mega_moe,
    untransform_nvfp4_weights,
)
from megamoe_kernel.api import ACTIVATIONS
from megamoe_kernel.weights import Arch

pytestmark = pytest.mark.gpu

ARCHS: tuple[Arch, ...] = ("sm_100a", "sm_90a")


def _random(experts: int, rows: int, columns: int, parts: int) -> ExpertWeights:
    generator = torch.Generator().manual_seed(rows + columns)
    shape = (experts, rows, columns // 2)
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    shape = (experts, rows, columns // 16)
    scale = torch.randint(0x20, 0x40, shape, generator=generator, dtype=torch.uint8)
    input_scale = torch.tensor(0.01) if parts == 1 else None
    scale_2 = torch.rand(experts, parts, generator=generator) * 0.05 + 0.01
    return ExpertWeights(codes, scale.view(torch.float8_e4m3fn), scale_2, input_scale)


def _equal(on_gpu: Tensor | None, on_cpu: Tensor | None) -> bool:
    if on_gpu is None or on_cpu is None:
        return on_gpu is on_cpu
    assert on_gpu.is_cuda
    assert on_gpu.stride() == on_cpu.stride()
    return torch.equal(on_gpu.cpu().view(on_cpu.dtype), on_cpu)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("size", [(1, 128, 128), (5, 512, 384)], ids=str)
def test_transforms(size: tuple[int, int, int], arch: Arch) -> None:
    experts, hidden, intermediate = size
    w13 = _random(experts, 2 * intermediate, hidden, 2)
    w2 = _random(experts, hidden, intermediate, 1)
    cpu = transform_nvfp4_weights_for_mega_moe(w13, w2, arch=arch)
    gpu = transform_nvfp4_weights_for_mega_moe(w13.to("cuda"), w2.to("cuda"), arch=arch)
    for on_gpu, on_cpu in zip(gpu, cpu, strict=True):
        assert _equal(on_gpu.weight, on_cpu.weight)
        assert _equal(on_gpu.scale, on_cpu.scale)
        assert _equal(on_gpu.alpha, on_cpu.alpha)
    for back, original in zip(untransform_nvfp4_weights(*gpu), (w13, w2), strict=True):
        assert _equal(back.weight, original.weight)
        assert _equal(back.weight_scale.view(torch.uint8), original.weight_scale.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tokens(dtype: torch.dtype) -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[3] = 0
    x[5] *= 1e-20
    gpu, cpu = quantize_tokens(x.cuda()), quantize_tokens(x)
    assert _equal(gpu.codes, cpu.codes)
    assert _equal(gpu.block_scale.view(torch.uint8), cpu.block_scale.view(torch.uint8))
    assert _equal(gpu.scale, cpu.scale)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_reference(arch: Arch) -> None:
    """Sums are formed in float64 and exp differs by an ulp: almost all results are the same."""
    w13, w2 = _random(4, 512, 256, 2), _random(4, 256, 256, 1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 256, generator=generator).to(torch.bfloat16)
    ids = torch.rand(32, 4, generator=generator).topk(2, -1).indices
    weights = torch.rand(32, 2, generator=generator)
    results = []
    for device in ("cpu", "cuda"):
        l1, l2 = transform_nvfp4_weights_for_mega_moe(w13.to(device), w2.to(device), arch=arch)
        buffer = get_symm_buffer_for_nvfp4_mega_moe(
            num_experts=4, num_max_tokens_per_rank=32, num_topk=2, hidden=256, intermediate=256,
            activation="nvfp4" if arch == "sm_100a" else "bf16", device=device,
        )  # fmt: skip
        prepare_inputs(
            x.to(device), buffer, topk_idx=ids.to(device), topk_weights=weights.to(device)
        )
        y = torch.empty(32, 256, dtype=torch.bfloat16, device=device)
        fp8_nvfp4_mega_moe(
            y, l1, l2, buffer, activation=ACTIVATIONS[arch], swiglu_limit=10.0, backend="reference"
        )
        results.append(y.cpu().double())
    cpu, gpu = results
    assert float((gpu - cpu).norm() / cpu.norm()) < 1e-3
    assert float((gpu == cpu).double().mean()) > 0.99
