"""The libraries that the profiles are named after, behind one signature, and their inputs."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable
from importlib import metadata
from unittest import mock

import pytest
import torch
from torch import Tensor

FP32 = torch.float32


@dataclasses.dataclass(frozen=True)
class Quantized:
    """What a library wrote: packed weight, E4M3 scale bytes, the global scale it stores."""

    weight: Tensor
    scale: Tensor
    global_scale: Tensor


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library's quantizer.

    quantize(x, amax): amax is the tensor's, or a larger one shared by several tensors, in
    x's dtype. The global scale follows from it by the library's own formula.
    """

    quantize: Callable[[Tensor, Tensor], Quantized]


def _modelopt() -> Peer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def quantize(x: Tensor, amax: Tensor) -> Quantized:
        scale_2 = NVFP4QTensor.get_weights_scaling_factor_2(amax.reshape(1, 1))
        tensor, scale, scale_2 = NVFP4QTensor.quantize(x, 16, weights_scaling_factor_2=scale_2)
        return Quantized(tensor._quantized_data, scale.view(torch.uint8), scale_2)

    return Peer(quantize)


def _modelopt_static() -> Peer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def quantize(x: Tensor, amax: Tensor) -> Quantized:
        calibrated = types.SimpleNamespace(
            block_sizes={-1: 16},
            global_amax=amax,
            _amax=x.unflatten(-1, (-1, 16)).abs().amax(-1).reshape(-1, 1),
        )
        scale, scale_2 = NVFP4QTensor.get_weights_scaling_factor_from_quantizer(calibrated, x)
        tensor, scale, scale_2 = NVFP4QTensor.quantize(x, 16, scale, scale_2)
        return Quantized(tensor._quantized_data, scale.view(torch.uint8), scale_2)

    return Peer(quantize)


def _compressed_tensors() -> Peer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
        from compressed_tensors.quantization import preset_name_to_scheme
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])

    @torch.compiler.set_stance("force_eager")  # its E2M1 cast would be compiled: slow, same bytes
    def quantize(x: Tensor, amax: Tensor) -> Quantized:
        blocks = x.unflatten(-1, (-1, 16))
        divisor = generate_gparam(-amax, amax)
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, divisor)
        state = {"weight": x, "weight_scale": scale, "weight_global_scale": divisor}
        packed = NVFP4PackedCompressor.compress(state, scheme)
        scale_bytes = packed["weight_scale"].view(torch.uint8)
        return Quantized(packed["weight_packed"], scale_bytes, packed["weight_global_scale"])

    return Peer(quantize)


def _torchao() -> Peer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype.mx_formats.nvfp4_tensor import (
            nvfp4_quantize,
            per_tensor_amax_to_scale,
        )

    def quantize(x: Tensor, amax: Tensor) -> Quantized:
        scale_2 = per_tensor_amax_to_scale(amax)
        scale, weight = nvfp4_quantize(x, 16, scale_2)
        return Quantized(weight, scale.view(torch.uint8), scale_2)

    return Peer(quantize)


def _transformer_engine() -> Peer:
    reference = _load_transformer_engine_reference()
    quantizer = reference.NVFP4QuantizerRef

    def quantize(x: Tensor, amax: Tensor) -> Quantized:
        amax = amax.float().view(1)
        weight, scale = quantizer._quantize_blockwise_reference(
            x, amax, 16, 1, pow_2_scales=False, eps=0.0
        )
        # The library stores amax and forms this quotient where it uses it.
        encode_scale = (448.0 * 6.0) / amax.double()
        encode_scale = encode_scale.float().clamp(max=torch.finfo(FP32).max)
        return Quantized(weight, scale.view(torch.uint8), encode_scale)

    return Peer(quantize)


def _load_transformer_engine_reference() -> types.ModuleType:
    """Import the quantizer's source file alone: the package needs its compiled CUDA core."""
    try:
        files = metadata.distribution("transformer-engine")
    except metadata.PackageNotFoundError:
        pytest.skip("needs the transformer-engine wheel (its Python files only)")
    package = "transformer_engine.pytorch"
    stubs = {name: types.ModuleType(name) for name in ("transformer_engine", package)}
    stubs[f"{package}.quantized_tensor"] = base = types.ModuleType("quantized_tensor")
    base.Quantizer = type("Quantizer", (), {})  # type: ignore[attr-defined]
    base.QuantizedTensorStorage = type("Storage", (), {})  # type: ignore[attr-defined]
    recipes = f"{package}.custom_recipes"
    stubs[recipes] = types.ModuleType(recipes)
    stubs[f"{recipes}.gemm"] = gemm = types.ModuleType("gemm")
    gemm.MMParams = object  # type: ignore[attr-defined]
    gemm.GEMMType = types.SimpleNamespace(FPROP=0)  # type: ignore[attr-defined]
    stubs[recipes].gemm = gemm  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, stubs):
        for name in ("reference_utils", "reference_nvfp4"):
            path = files.locate_file(f"transformer_engine/pytorch/custom_recipes/{name}.py")
            spec = importlib.util.spec_from_file_location(f"{recipes}.{name}", str(path))
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            setattr(stubs[recipes], name, module)
            spec.loader.exec_module(module)
    return module


_PEERS = {
    "modelopt": _modelopt,
    "modelopt-static": _modelopt_static,
    "compressed-tensors": _compressed_tensors,
    "torchao": _torchao,
    "te": _transformer_engine,
}


@pytest.fixture(params=list(_PEERS))
def profile(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def peers() -> dict[str, Peer]:
    return {}


@pytest.fixture
def peer(profile: str, peers: dict[str, Peer]) -> Peer:
    if profile not in peers:
        peers[profile] = _PEERS[profile]()
    return peers[profile]


def _row_scaled(x: Tensor) -> Tensor:
    return x * torch.exp2(torch.linspace(-20, 20, x.shape[0])).unsqueeze(1)


def _zero_blocks(x: Tensor) -> Tensor:
    return x * (torch.arange(x.numel() // 16) % 3 == 0).repeat_interleave(16).view_as(x)


def _signs(x: Tensor) -> Tensor:
    """Every block holds +-0, and negatives that round to zero."""
    zeros = torch.tensor([0.0, -0.0, 1e-3, -1e-3])
    return torch.cat((x.unflatten(-1, (-1, 4))[..., :3, :], zeros.expand(*x.shape[:-1], 1, 4)), -2)


def _all_finite(dtype: torch.dtype) -> Tensor:
    """Every finite number of a 16-bit dtype, in order; every 65,537th of float32."""
    if dtype == FP32:
        bits = torch.arange(0, 2**31, 65_537, dtype=torch.int64).to(torch.int32)
        bits = torch.cat((bits, bits | -(2**31)))
    else:
        bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    x = bits.view(dtype)
    x = x[x.isfinite()]
    return x[: x.numel() // 64 * 64].view(-1, 64)


def _middle_range(dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Those of them that one global scale can hold, shuffled: every code with every mantissa."""
    x = _all_finite(dtype)
    x = x[(x.abs() >= 2.0**-12) & (x.abs() < 4)]
    x = x[torch.randperm(x.numel(), generator=generator)]
    return x[: x.numel() // 64 * 64].view(-1, 64)


def _near_ties(generator: torch.Generator) -> Tensor:
    """Block amax at E4M3's midpoints and elements at E2M1's, give or take two float32 ulps.

    Only here do results show in which order, or by which reciprocal, a scale was computed.
    """

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    rows, blocks = 32, 64
    scale_2 = torch.rand((), generator=generator, dtype=torch.float64) + 1
    # Odd numerators of 16ths are the midpoints between E4M3's three-bit significands.
    scale = draw(16, 31, rows, blocks, 1) / 16 * torch.exp2(draw(-5, 7, rows, blocks, 1))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])[draw(0, 6, rows, blocks, 16)]
    jitter = 1 + draw(-2, 2, rows, blocks, 16) * 2.0**-23
    x = ties * scale * scale_2 * jitter
    x[..., :1] = 6 * scale * scale_2 * jitter[..., :1]
    x[0, 0, 0] = 2688 * scale_2
    return x.float().flatten(-2)


@pytest.fixture
def x(request: pytest.FixtureRequest, dtype: torch.dtype) -> Tensor:
    """A finite, non-zero matrix of the kind that the test's parameter names."""
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(40, 256, generator=generator)
    info = torch.finfo(dtype)
    make: dict[str, Callable[[], Tensor]] = {
        "normal": lambda: normal,
        "weights": lambda: 0.02 * normal,
        "heavy-tailed": lambda: normal**5,
        "row-scaled": lambda: _row_scaled(normal),
        "constant": lambda: torch.full((4, 64), -0.3),
        "tiny": lambda: normal.abs().clamp(min=0.1).copysign(normal) * info.tiny * 64,
        "huge": lambda: normal * (info.max / normal.abs().max()),
        "signs": lambda: _signs(normal).flatten(-2),
        "zero-blocks": lambda: _zero_blocks(normal),
        "near-ties": lambda: _near_ties(generator),
        "more-near-ties": lambda: _near_ties(generator.manual_seed(21)),
        "all-finite": lambda: _all_finite(dtype),
        "middle-range": lambda: _middle_range(dtype, generator),
    }
    return make[request.param]().clamp(info.min, info.max).to(dtype).contiguous()
