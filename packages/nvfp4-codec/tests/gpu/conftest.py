"""Lets the GPU tests of the Triton kernels run without a GPU, in Triton's interpreter.

With TRITON_INTERPRET=1 kernels run on CPU tensors, in numpy. Where its arithmetic differs from
the GPU's it is replaced here: the interpreter's fused multiply-add rounds twice, its conversion
to bfloat16 is not to nearest even, and its NaNs keep whatever sign and payload the CPU gave them.
"""

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU_NAN = np.uint32(0x7FFFFFFF)


@pytest.fixture
def device() -> torch.device:
    """Where the kernels under test run."""
    return torch.device("cpu" if INTERPRETED else "cuda")


if INTERPRETED:
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def _like_the_gpu(values: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        return np.where(np.isnan(values), GPU_NAN, bits).view(np.float32)

    def _fma(self: InterpreterBuilder, x, y, z):  # type: ignore[no-untyped-def]
        # Exact product; the sum is rounded to 53 bits and then to 24, which could only matter
        # within 2^-29 of the middle between two float32.
        total = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return TensorHandle(_like_the_gpu(total.astype(np.float32)), z.dtype.scalar)

    def _fmul(self: InterpreterBuilder, x, y):  # type: ignore[no-untyped-def]
        return TensorHandle(_like_the_gpu(x.data * y.data), x.dtype.scalar)

    def _cast(original):  # type: ignore[no-untyped-def]
        def cast(self: InterpreterBuilder, source, target):  # type: ignore[no-untyped-def]
            kind = target.scalar
            if source.dtype.scalar != tl.float32 or kind not in (tl.bfloat16, tl.float16):
                return original(self, source, target)
            dtype = torch.bfloat16 if kind == tl.bfloat16 else torch.float16
            rounded = torch.from_numpy(np.array(source.data, dtype=np.float32)).to(dtype)
            bits = rounded.view(torch.int16).masked_fill(rounded.isnan(), 0x7FFF).numpy()
            return TensorHandle(bits.view(np.uint16 if kind == tl.bfloat16 else np.float16), kind)

        return cast

    @pytest.fixture(autouse=True)
    def gpu_arithmetic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        from nvfp4_codec import triton_kernels

        # A program costs the interpreter about the same whatever its size.
        for name in ("QUANTIZE_NVFP4", "QUANTIZE_MXFP4", "DEQUANTIZE_E2M1"):
            monkeypatch.setattr(triton_kernels, name, triton_kernels.Launch(256, 1))
        monkeypatch.setattr(triton_kernels, "DEQUANTIZE_E4M3", triton_kernels.Launch(64, 1))
        monkeypatch.setattr(InterpreterBuilder, "create_fma", _fma)
        monkeypatch.setattr(InterpreterBuilder, "create_fmul", _fmul)
        monkeypatch.setattr(InterpreterBuilder, "cast_impl", _cast(InterpreterBuilder.cast_impl))
        with np.errstate(all="ignore"):
            yield
