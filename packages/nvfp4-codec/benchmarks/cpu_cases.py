"""What cpu.py measures: per operation the inputs, our call and the installed peers' calls.

Every case is a function of a ``Setup`` that returns the call to time; a peer's library is
imported inside, so that each process holds only what it measures. A call returns the tensors
to compare (packed codes and scales, or values).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_codec import native
from nvfp4_codec.scales import get_profile

Call = Callable[[], tuple[Tensor, ...]]
BLOCK = (128, 128)
SCALE_2 = 3.1e-5


@dataclass(frozen=True)
class Setup:
    """One operation's input, made the same way in every process."""

    rows: int
    columns: int
    threads: int
    seed: int = 0

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    @functools.cached_property
    def x(self) -> Tensor:
        """A weight: N(0, 0.02), bfloat16."""
        x = torch.empty(self.rows, self.columns, dtype=torch.bfloat16)
        return x.normal_(0, 0.02, generator=self.generator)

    @functools.cached_property
    def codes(self) -> Tensor:
        return self._bytes(self.columns // 2, 0, 256)

    @functools.cached_property
    def e4m3(self) -> Tensor:
        return self._bytes(self.columns // 16, 1, 0x7E)

    @functools.cached_property
    def e8m0(self) -> Tensor:
        return self._bytes(self.columns // 32, 110, 124)

    @functools.cached_property
    def fp8(self) -> Tensor:
        found = self._bytes(self.columns, 0, 256)
        return found.masked_fill_((found & 0x7F) == 0x7F, 0x7E)

    @functools.cached_property
    def fp8_scale(self) -> Tensor:
        shape = -(-self.rows // BLOCK[0]), -(-self.columns // BLOCK[1])
        return torch.rand(shape, generator=self.generator) * 1e-3 + 1e-5

    def _bytes(self, columns: int, low: int, high: int) -> Tensor:
        shape = self.rows, columns
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=self.generator)

    def output(self, columns: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Preallocated, with its pages touched."""
        return torch.zeros(self.rows, columns, dtype=dtype)


@dataclass(frozen=True)
class Operation:
    """Bytes per element that must be read and written, and who can do it."""

    name: str
    bytes_in: float
    bytes_out: float
    ours: Callable[[Setup], Call]
    peers: dict[str, Callable[[Setup], Call]]


def _quantize(setup: Setup) -> Call:
    weight, scale = setup.output(setup.columns // 2), setup.output(setup.columns // 16)
    profile, x, threads = get_profile("modelopt"), setup.x, setup.threads

    def call() -> tuple[Tensor, ...]:
        amax, num_nonfinite = native.amax(x, threads=threads)
        scale_2 = profile.global_scale(torch.tensor(amax))
        assert isinstance(scale_2, Tensor)
        native.quantize_nvfp4(
            x, float(scale_2), profile, num_nonfinite > 0, weight, scale, threads=threads
        )
        return weight, scale

    return call


def _dequantize(setup: Setup) -> Call:
    out = setup.output(setup.columns, torch.bfloat16)
    codes, scale, threads = setup.codes, setup.e4m3, setup.threads
    scale_2 = float(torch.tensor(SCALE_2))

    def call() -> tuple[Tensor, ...]:
        native.dequantize_nvfp4(codes, scale, scale_2, False, out, threads=threads)
        return (out,)

    return call


def _dequantize_mxfp4(setup: Setup) -> Call:
    out = setup.output(setup.columns, torch.bfloat16)
    codes, scale, threads = setup.codes, setup.e8m0, setup.threads

    def call() -> tuple[Tensor, ...]:
        native.dequantize_mxfp4(codes, scale, out, threads=threads)
        return (out,)

    return call


def _dequantize_fp8(setup: Setup) -> Call:
    out = setup.output(setup.columns, torch.bfloat16)
    weight, scale, threads = setup.fp8, setup.fp8_scale, setup.threads

    def call() -> tuple[Tensor, ...]:
        native.dequantize_fp8_block(weight, scale, BLOCK, out, threads=threads)
        return (out,)

    return call


def _cast(setup: Setup) -> Call:
    codes, e8m0, threads = setup.codes, setup.e8m0, setup.threads
    weight, scale = setup.output(setup.columns // 2), setup.output(setup.columns // 16)
    lossless = setup.output(setup.columns // 32, torch.bool)
    shift = int(e8m0.max()) - 8

    def call() -> tuple[Tensor, ...]:
        native.mxfp4_to_nvfp4(codes, e8m0, shift, weight, scale, lossless, threads=threads)
        return weight, scale

    return call


# ---------------------------------------------------------------- peers


def _modelopt_quantize(setup: Setup) -> Call:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    x = setup.x

    def call() -> tuple[Tensor, ...]:
        packed, scale, _ = NVFP4QTensor.quantize(x, 16)
        return packed._quantized_data, scale.view(torch.uint8)

    return call


def _torchao_quantize(setup: Setup) -> Call:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    x = setup.x

    def call() -> tuple[Tensor, ...]:
        found = NVFP4Tensor.to_nvfp4(
            x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max().float())
        )
        return found.qdata, found.scale.view(torch.uint8)

    return call


def _modelopt_dequantize(setup: Setup) -> Call:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    shape = torch.Size((setup.rows, setup.columns))
    packed = NVFP4QTensor(shape, torch.bfloat16, setup.codes)
    scale, scale_2 = setup.e4m3.view(torch.float8_e4m3fn), torch.tensor(SCALE_2)
    return lambda: (
        packed.dequantize(torch.bfloat16, scale=scale, double_scale=scale_2, block_sizes={-1: 16}),
    )


def _compressed_tensors_dequantize(setup: Setup) -> Call:
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4

    scheme = QuantizationScheme(targets=["Linear"], **NVFP4)
    state = {
        "weight_packed": setup.codes,
        "weight_scale": setup.e4m3.view(torch.float8_e4m3fn),
        "weight_global_scale": (1 / torch.tensor(SCALE_2)).reshape(1),
    }
    return lambda: (NVFP4PackedCompressor.decompress(dict(state), scheme)["weight"],)


def _torchao_dequantize(setup: Setup) -> Call:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    scale = setup.e4m3.view(torch.float8_e4m3fn)
    packed = NVFP4Tensor(setup.codes, scale, 16, torch.bfloat16, torch.tensor(SCALE_2))
    return lambda: (packed.dequantize(torch.bfloat16),)


def _numpy_lut(setup: Setup, scale: Tensor, kind: str) -> Call:
    """What a careful user writes with numpy and ml_dtypes: a table of byte pairs."""
    import ml_dtypes
    import numpy as np

    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate((values, -values))
    pairs = np.stack((np.tile(values, 16), np.repeat(values, 16)), -1)
    codes = setup.codes.numpy()
    raw = scale.numpy()
    block = setup.columns // raw.shape[1]

    def call() -> tuple[Tensor, ...]:
        if kind == "e4m3":
            step = raw.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(SCALE_2)
        else:
            step = np.ldexp(np.float32(1), raw.astype(np.int32) - 127)
        blocks = pairs[codes].reshape(setup.rows, -1, block) * step[..., None]
        found = blocks.astype(ml_dtypes.bfloat16).view(np.int16)
        return (torch.from_numpy(found).view(torch.bfloat16).view(setup.rows, -1),)

    return call


def _modelopt_dequantize_mxfp4(setup: Setup) -> Call:
    from modelopt.torch.export.shard_cast_utils import dequantize_mxfp4_to_bf16

    codes, scale = setup.codes, setup.e8m0
    return lambda: (dequantize_mxfp4_to_bf16(codes, scale, "cpu"),)


def _torchao_dequantize_mxfp4(setup: Setup) -> Call:
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    codes, scale = setup.codes, setup.e8m0.view(torch.float8_e8m0fnu)
    return lambda: (to_dtype(codes, scale, torch.float4_e2m1fn_x2, 32, torch.bfloat16),)


def _transformers_dequantize_mxfp4(setup: Setup) -> Call:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = setup.codes.view(1, setup.rows, -1, 16)
    scale = setup.e8m0.view(1, setup.rows, -1)

    def call() -> tuple[Tensor, ...]:
        # It returns the transpose of what it was given.
        return (convert_moe_packed_tensors(blocks, scale)[0].T,)

    return call


def _modelopt_dequantize_fp8(setup: Setup) -> Call:
    from modelopt.torch.quantization.qtensor import FP8QTensor

    shape = torch.Size((setup.rows, setup.columns))
    packed = FP8QTensor(shape, torch.bfloat16, setup.fp8.view(torch.float8_e4m3fn))
    scale, sizes = setup.fp8_scale, {-1: BLOCK[1], -2: BLOCK[0]}
    return lambda: (packed.dequantize(torch.bfloat16, scale=scale, block_sizes=sizes),)


def _compressed_tensors_dequantize_fp8(setup: Setup) -> Call:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    weight, scale = setup.fp8.view(torch.float8_e4m3fn), setup.fp8_scale
    args = QuantizationArgs(
        num_bits=8, type="float", strategy="block", block_structure=list(BLOCK), symmetric=True
    )
    return lambda: (dequantize(weight, scale, args=args, dtype=torch.bfloat16),)


def _modelopt_cast(setup: Setup) -> Call:
    from modelopt.torch.export.shard_cast_utils import mxfp4_kmax, quantize_mxfp4_to_nvfp4_lossless

    codes, scale = setup.codes, setup.e8m0

    def call() -> tuple[Tensor, ...]:
        found = quantize_mxfp4_to_nvfp4_lossless(codes, scale, mxfp4_kmax(scale), "cpu")
        return found[0], found[1].view(torch.uint8)

    return call


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            "nvfp4_dequantize",
            1 / 2 + 1 / 16,
            2,
            _dequantize,
            {
                "modelopt": _modelopt_dequantize,
                "compressed-tensors": _compressed_tensors_dequantize,
                "torchao": _torchao_dequantize,
                "numpy+ml_dtypes": lambda setup: _numpy_lut(setup, setup.e4m3, "e4m3"),
            },
        ),
        Operation(
            "nvfp4_quantize",
            2,
            1 / 2 + 1 / 16,
            _quantize,
            {"modelopt": _modelopt_quantize, "torchao": _torchao_quantize},
        ),
        Operation(
            "mxfp4_dequantize",
            1 / 2 + 1 / 32,
            2,
            _dequantize_mxfp4,
            {
                "modelopt": _modelopt_dequantize_mxfp4,
                "torchao": _torchao_dequantize_mxfp4,
                "transformers": _transformers_dequantize_mxfp4,
                "numpy+ml_dtypes": lambda setup: _numpy_lut(setup, setup.e8m0, "e8m0"),
            },
        ),
        Operation(
            "fp8_block_dequantize",
            1,
            2,
            _dequantize_fp8,
            {
                "modelopt": _modelopt_dequantize_fp8,
                "compressed-tensors": _compressed_tensors_dequantize_fp8,
            },
        ),
        Operation(
            "mxfp4_to_nvfp4",
            1 / 2 + 1 / 32,
            1 / 2 + 1 / 16 + 1 / 32,
            _cast,
            {"modelopt": _modelopt_cast},
        ),
    )
}
