"""Each profile writes the bytes of the library it is named after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_codec import Divisor, NVFP4Tensor, quantize_nvfp4
from nvfp4_codec.scales import PROFILES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {
    "modelopt": (BF16, FP16, FP32),
    "modelopt-static": (BF16, FP16, FP32),
    "compressed-tensors": (BF16, FP16, FP32),
    "torchao": (BF16, FP32),  # it refuses float16
    "te": (BF16, FP16, FP32),
}
INPUTS = ["normal", "weights", "heavy-tailed", "row-scaled", "constant", "tiny", "huge", "signs"]
INPUTS += ["zero-blocks", "near-ties", "more-near-ties", "all-finite", "middle-range"]

each_library_and_dtype = pytest.mark.parametrize(
    ("profile", "dtype"),
    [
        pytest.param(profile, dtype, id=f"{profile}-{str(dtype).removeprefix('torch.')}")
        for profile, dtypes in DTYPES.items()
        for dtype in dtypes
    ],
)


def assert_same(ours: NVFP4Tensor, theirs: Any) -> None:
    scale_2 = ours.weight_scale_2
    value = scale_2.value if isinstance(scale_2, Divisor) else scale_2
    assert value.item() == theirs.global_scale.item()
    assert torch.equal(ours.weight_scale.view(torch.uint8), theirs.scale)
    assert torch.equal(ours.weight, theirs.weight)


@each_library_and_dtype
@pytest.mark.parametrize("x", INPUTS, indirect=True)
def test_bytes(profile: str, dtype: torch.dtype, peer: Any, x: Tensor) -> None:
    theirs = peer.quantize(x, x.abs().max())
    ours = quantize_nvfp4(x, profile=profile, backend="reference")
    assert_same(ours, theirs)


@each_library_and_dtype
@pytest.mark.parametrize("x", ["heavy-tailed", "huge", "near-ties", "middle-range"], indirect=True)
def test_bytes_with_the_global_scale_of_a_larger_tensor(
    profile: str, dtype: torch.dtype, peer: Any, x: Tensor
) -> None:
    """A fused projection shares one global scale: blocks then use part of the range."""
    amax = (x.abs().max().double() * 3).clamp(max=torch.finfo(dtype).max).to(dtype)
    theirs = peer.quantize(x, amax)
    given = PROFILES[profile].typed_scale(theirs.global_scale.float().reshape(()))
    ours = quantize_nvfp4(x, weight_scale_2=given, profile=profile, backend="reference")
    assert_same(ours, theirs)


def test_every_library_profile_is_tested() -> None:
    assert {*DTYPES, "ieee"} == set(PROFILES)
