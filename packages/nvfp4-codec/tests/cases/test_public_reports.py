"""Faults that users of other projects reported in public, each as the smallest input we know.

Every test names the thread it stands for. The comment says what went wrong there; the test
pins the right value, or the refusal, here. Only the public interface is used. Memory has a
file of its own; conversion speed (NVIDIA-NeMo/Megatron-Bridge#5523: 20-30 times slower than
necessary in eager torch) is covered by benchmarks/, not by a timed test.
"""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_codec import (
    Divisor,
    DtypeError,
    LayoutError,
    LosslessError,
    MXFP4Tensor,
    NVFP4Tensor,
    ShapeError,
    SwizzledScale,
    dequantize_fp8_block,
    dequantize_mxfp4,
    dequantize_nvfp4,
    explain_diff,
    fp32_to_e8m0,
    from_compressed_tensors,
    from_ggml_mxfp4,
    from_ggml_nvfp4,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
    mxfp4_to_nvfp4,
    nvfp4_to_fp8_block,
    pack_e2m1,
    quantize_fp8_block,
    quantize_mxfp4,
    quantize_nvfp4,
    swizzle_blockscale,
    to_ggml_nvfp4,
    unify_weight_scale_2,
    unpack_e2m1,
    unswizzle_blockscale,
)
from nvfp4_codec.scales import PROFILES

FP32 = torch.float32


def _codes(values: list[int], scale_byte: int) -> tuple[Tensor, Tensor]:
    """One block of codes and its E4M3 scale byte."""
    weight = pack_e2m1(torch.tensor([values], dtype=torch.uint8))
    return weight, torch.tensor([[scale_byte]], dtype=torch.uint8).view(torch.float8_e4m3fn)


def _weights(rows: int, cols: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 0.02


# ------------------------------------------------------------ direction of the global scale


def test_a_divisor_divides() -> None:
    # modular/modular#6600: weight_global_scale of compressed-tensors multiplied.
    weight, scale = _codes([7] * 16, 0x7E)
    layer = {
        "weight_packed": weight,
        "weight_scale": scale,
        "weight_global_scale": torch.tensor([3584.0]),
    }
    tensor = from_compressed_tensors(layer)
    assert dequantize_nvfp4(*tensor, dtype=FP32).unique().tolist() == [0.75]
    wrong = replace(tensor, weight_scale_2=torch.tensor(3584.0))
    assert dequantize_nvfp4(*wrong, dtype=FP32).max() > 9e6
    best = explain_diff(tensor, wrong).best
    assert best is not None
    assert best.name == "reciprocal-global-scale"


def test_a_bare_number_has_no_direction() -> None:
    # modular/modular#6600: the same number serves both ways without a word.
    with pytest.raises(DtypeError, match="direction"):
        dequantize_nvfp4(*_codes([7] * 16, 0x38), 3584.0)  # type: ignore[arg-type]


def test_scales_cannot_be_swizzled_twice() -> None:
    # modular/modular#6600: there, linear scales were rearranged a second time.
    once = swizzle_blockscale(torch.zeros(128, 4, dtype=torch.uint8))
    with pytest.raises(LayoutError):
        swizzle_blockscale(once)  # type: ignore[arg-type]


@pytest.mark.parametrize("gguf_scale", [torch.tensor(2.0**-12), Divisor(torch.tensor(2.0**12))])
def test_the_scale_beside_a_ggml_tensor_is_applied(gguf_scale: Tensor | Divisor) -> None:
    # ggml-org/llama.cpp#22897, #20845, #27178, charlie12345/ROCmFPX#85: the per-tensor scale
    # was dropped, not loaded, or used in the other direction.
    records = torch.full((1, 36), 0x77, dtype=torch.uint8)
    records[0, :4] = 0x7E
    tensor = from_ggml_nvfp4(records, gguf_scale)
    assert dequantize_nvfp4(*tensor, dtype=FP32).abs().max() == 6 * 448 * 2.0**-12
    assert to_ggml_nvfp4(tensor)[1] is gguf_scale
    with pytest.raises(TypeError):
        from_ggml_nvfp4(records)  # type: ignore[call-arg]


# ------------------------------------------------------------ NaN and tiny scales


@pytest.mark.parametrize("profile", PROFILES)
def test_a_zero_block_never_gets_a_nan_scale(profile: str) -> None:
    # NVIDIA/Model-Optimizer#1397: scale 1.0 of a zero block, times 448 * 6 / amax, overflowed.
    x = torch.zeros(1, 32)
    x[0, 16:] = 0.01
    weight, scale, scale_2 = quantize_nvfp4(x, profile=profile, backend="reference")
    assert isinstance(scale, Tensor)
    assert int((scale.view(torch.uint8) & 0x7F).max()) < 0x7F
    decoded = dequantize_nvfp4(weight, scale, scale_2, dtype=FP32)  # type: ignore[arg-type]
    assert decoded[0, :16].eq(0).all()
    assert decoded[0, 16:] == pytest.approx(0.01, rel=0.1)


def test_all_e4m3_scales_decode_by_the_format() -> None:
    # flashinfer-ai/flashinfer#3932, local-inference-lab/b12x#388, tile-ai/tilelang#2702:
    # subnormals decoded by the formula for normals, 0x7F decoded as 480.
    byte = torch.arange(256, dtype=torch.uint8)
    weight = torch.full((256, 8), 0x22, dtype=torch.uint8)  # code 2 is 1.0
    scale = byte.view(torch.float8_e4m3fn)[:, None]
    found = dequantize_nvfp4(weight, scale, torch.tensor(1.0), dtype=FP32)[:, 0]
    expected = byte.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(found.numpy(), expected)
    assert found[0x01] == 2.0**-9
    assert found[0x07] == 7 * 2.0**-9
    assert found[0x7F].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP32])
@pytest.mark.parametrize("exponent", [0, -100, -115])
def test_the_smallest_scale_does_not_underflow(exponent: int, dtype: torch.dtype) -> None:
    # vllm-project/vllm#37464: a kernel kept part of E4M3's range, small blocks became zero.
    weight, scale = _codes(list(range(16)), 0x01)
    scale_2 = torch.tensor(2.0**exponent)
    found = dequantize_nvfp4(weight, scale, scale_2, dtype=dtype)[0].double()
    e2m1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    assert found.tolist() == (e2m1 * 2.0 ** (exponent - 9)).tolist()


# ------------------------------------------------------------ layouts


def test_padding_of_swizzled_scales() -> None:
    # vllm-project/vllm#23140: the unpadded shape was used where the padded one was needed.
    scale = torch.arange(650, dtype=torch.int32).to(torch.uint8).view(130, 5)
    swizzled = swizzle_blockscale(scale)
    assert swizzled.data.numel() == 256 * 8
    assert torch.equal(unswizzle_blockscale(swizzled), scale)
    assert torch.equal(
        unswizzle_blockscale(SwizzledScale.wrap(swizzled.data.flatten(), 130, 5)), scale
    )


def test_ggml_blocks_are_split_in_halves() -> None:
    # kekzl/imp#567: fluent gibberish from every MXFP4 GGUF, read as consecutive pairs.
    codes = torch.arange(32).remainder(16).to(torch.uint8)
    linear = pack_e2m1(codes)
    assert linear[:3].tolist() == [0x10, 0x32, 0x54]
    ggml = torch.tensor([0x11 * j for j in range(16)], dtype=torch.uint8)
    record = torch.cat((torch.tensor([127], dtype=torch.uint8), ggml))
    assert torch.equal(from_ggml_mxfp4(record).weight, linear)


def test_the_first_value_is_in_the_low_nibble() -> None:
    # pytorch/ao#3123: the first value was in the high nibble.
    x = torch.zeros(1, 16)
    x[0, :2] = torch.tensor([0.5, 6.0])
    tensor = quantize_nvfp4(x, weight_scale_2=torch.tensor(1.0))
    assert int(tensor.weight[0, 0]) == 0x71
    assert dequantize_nvfp4(*tensor)[0, :2].tolist() == [0.5, 6.0]
    assert unpack_e2m1(torch.tensor([0x71], dtype=torch.uint8)).tolist() == [1, 7]


def test_a_flat_scale_tensor_is_refused() -> None:
    # NVIDIA/Model-Optimizer#2038: swizzled 1-D uint8 scales exported as if they were linear.
    tensor = quantize_nvfp4(_weights(128, 64))
    swizzled = swizzle_blockscale(tensor.weight_scale).data
    with pytest.raises(ShapeError, match="swizzled"):
        dequantize_nvfp4(tensor.weight, swizzled.flatten(), tensor.weight_scale_2)
    with pytest.raises(DtypeError):
        dequantize_nvfp4(tensor.weight, swizzled.view(torch.uint8), tensor.weight_scale_2)


# ------------------------------------------------------------ E8M0


def test_the_bias_of_e8m0_is_127() -> None:
    # vllm-project/compressed-tensors#538: one writer used 125, every reader 127.
    assert fp32_to_e8m0(torch.tensor([1.0, 4.0, 0.25])).tolist() == [127, 129, 125]
    x = _weights(32, 64)
    tensor = quantize_mxfp4(x)
    old = (tensor.weight_scale.view(torch.uint8) - 2).view(torch.float8_e8m0fnu)
    best = explain_diff(tensor, MXFP4Tensor(tensor.weight, old)).best
    assert best is not None
    assert best.name == "e8m0-bias"
    assert best.exact


@pytest.mark.parametrize("scale", [0.003, 1.5, 1.01 * 2.0**-8])
def test_a_float_scale_is_never_cut_to_its_exponent(scale: float) -> None:
    # sgl-project/sglang#35388 (device assert) and #39193 (25 % error without a word): float32
    # scales where the kernel takes powers of two.
    with pytest.raises(LosslessError, match="requantize"):
        get_mn_major_tma_aligned_packed_ue8m0_tensor(torch.full((128, 4), scale))
    x = torch.full((128, 128), 448 * scale)
    tensor = quantize_fp8_block(x, scale_fmt="ue8m0")
    power = float(tensor.weight_scale.float())
    assert math.log2(power).is_integer()
    assert scale <= power < 2 * scale
    packed = get_mn_major_tma_aligned_packed_ue8m0_tensor(tensor.weight_scale)
    assert packed.tolist() == [[127 + math.log2(power)]]


def test_a_truncated_scale_is_recognised() -> None:
    # sgl-project/sglang#39193: 1.5 became 1.0.
    scale = torch.tensor([[1.5, 1.0], [1.9, 1.1]])
    tensor = quantize_fp8_block(_weights(130, 130))
    trusted = dequantize_fp8_block(tensor.weight, scale, dtype=FP32)
    suspect = dequantize_fp8_block(tensor.weight, torch.ones(2, 2), dtype=FP32)
    best = explain_diff(trusted, suspect).best
    assert best is not None
    assert best.name == "truncated-ue8m0"
    assert "factors 1..1.9" in best.detail


def test_power_of_two_scales_cost_accuracy_and_the_cost_is_reported() -> None:
    # vllm-project/vllm#38083, #37804: -12 points after scales were rounded up to powers of two.
    x = _weights(128, 128)
    x *= 448 * 1.01 * 2.0**-8 / x.abs().max()
    exact_scales = quantize_fp8_block(x)
    assert float(exact_scales.weight_scale) == pytest.approx(1.01 * 2.0**-8)
    before = dequantize_fp8_block(*exact_scales, dtype=FP32)
    requantized = quantize_fp8_block(before, scale_fmt="ue8m0")
    assert float(requantized.weight_scale.float()) == 2.0**-7
    after = dequantize_fp8_block(*requantized, dtype=FP32)
    assert bool((after != before).any())

    _, report = nvfp4_to_fp8_block(*quantize_nvfp4(x), scale_fmt="ue8m0")
    assert report.inexact_values > 0
    assert report.max_relative_error > 0
    assert report.sqnr_db < 60


@pytest.mark.parametrize(
    ("mode", "byte", "decoded"), [("floor", 127, 6.0), ("rceil", 128, 8.0), ("even", 128, 8.0)]
)
def test_scale_rules_differ_and_have_names(mode: str, byte: int, decoded: float) -> None:
    # vllm-project/vllm#43557, microsoft/microxcaling#4: block maxima saturate, or the scale is
    # another than expected: floor(log2(amax)) - 2, ceil(amax / 6) and "even" are three rules.
    x = torch.zeros(1, 32)
    x[0, 0] = 7.0
    tensor = quantize_mxfp4(x, scale_mode=mode)
    assert int(tensor.weight_scale.view(torch.uint8)) == byte
    # 7 / 2 = 3.5 lies between 3 and 4 and goes to the even code, 4.
    assert float(dequantize_mxfp4(*tensor)[0, 0]) == decoded


# ------------------------------------------------------------ rounding


@pytest.mark.parametrize("profile", ["modelopt", "ieee"])
def test_ties_go_to_the_even_code(profile: str) -> None:
    # ROCm/aiter#974, #2247: halves went up among normals, and never among denormals.
    above = 0.25 + 2.0**-25  # one float32 ulp
    x = torch.tensor([[6.0, 1.25, 0.25, above, 1.75, 2.5, 3.5, 5.0, 0.75, 0, 0, 0, 0, 0, 0, 0]])
    tensor = quantize_nvfp4(x, weight_scale_2=torch.tensor(1.0), profile=profile)
    assert float(tensor.weight_scale.float()) == 1.0
    decoded = dequantize_nvfp4(*tensor, dtype=FP32)[0, :9]
    assert decoded.tolist() == [6.0, 1.0, 0.0, 0.5, 2.0, 2.0, 4.0, 4.0, 1.0]


def test_codes_come_from_a_true_division() -> None:
    """radixark/miles#1261, flashinfer-ai/flashinfer#3448, #3387: which of two block scales wins.

    There, four-over-six chose between two scales by an error computed through amax, through the
    decoded scale, or with an approximate reciprocal, and near ties came out differently. This
    package has no four-over-six quantizer. What decides a near tie here is that a value is
    divided by its decoded scale, rounded to float32 once: a reciprocal would flip this one.
    """
    d = torch.tensor(1.0 / 49)  # 49 * (1 / 49) rounds to something else than 1
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = torch.cat([(bounds * d).view(torch.int32).add(k).view(FP32) for k in range(-3, 4)])
    division, reciprocal = x / d, x * d.reciprocal()
    near = x[torch.bucketize(division, bounds) != torch.bucketize(reciprocal, bounds)]
    assert near.numel() > 0
    block = torch.zeros(near.numel(), 16)
    block[:, 0], block[:, 1] = 6 * d, near
    weight, scale, _ = quantize_nvfp4(block, weight_scale_2=d)
    assert isinstance(weight, Tensor)
    assert isinstance(scale, Tensor)
    assert scale.float().eq(1).all()
    quotient = (near / d).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert unpack_e2m1(weight)[:, 1].tolist() == quotient.tolist()


def test_a_256_normalised_tensor_decodes_by_its_own_scale() -> None:
    # The same threads: that recipe fills scales up to 256, not 448. The stored weight_scale_2
    # says so; a reader that derives it from amax and 448 is off by 1.75.
    x = _weights(16, 64)
    scale_2 = x.abs().max() / (6 * 256)
    tensor = quantize_nvfp4(x, weight_scale_2=scale_2)
    assert float(tensor.weight_scale.float().max()) == 256
    decoded = dequantize_nvfp4(*tensor, dtype=FP32)
    assert float(decoded.abs().max()) == pytest.approx(float(x.abs().max()), rel=1e-6)
    misread = NVFP4Tensor(tensor.weight, tensor.weight_scale, x.abs().max() / (6 * 448))
    best = explain_diff(tensor, misread).best
    assert best is not None
    assert best.name == "constant-factor"
    assert "448 / 256" in best.detail


# ------------------------------------------------------------ conversions


def test_ragged_fp8_blocks_are_normal() -> None:
    # huggingface/transformers#36026: 576 is no multiple of 128.
    generator = torch.Generator().manual_seed(0)
    byte = torch.randint(0, 0x7F, (130, 576), generator=generator, dtype=torch.uint8)
    scale = torch.rand(2, 5, generator=generator)
    found = dequantize_fp8_block(byte.view(torch.float8_e4m3fn), scale, dtype=FP32)
    values = byte.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    full = np.kron(scale.numpy(), np.ones((128, 128), np.float32))[:130, :576]
    np.testing.assert_array_equal(found.numpy(), values * full)
    assert quantize_fp8_block(found).weight_scale.shape == (2, 5)


def test_fused_gate_and_up_get_one_scale_and_the_cost_is_reported() -> None:
    # sgl-project/sglang#18950, vllm-project/vllm#34675: one half was scaled by the other's.
    w1 = quantize_nvfp4(_weights(16, 64, 1), weight_scale_2=torch.tensor(1e-4))
    for factor, exact in ((2.0, True), (3.0, False)):
        scale_2 = torch.tensor(1e-4) * factor
        w3 = quantize_nvfp4(_weights(16, 64, 2), weight_scale_2=scale_2)
        (new1, new3), (report1, report3) = unify_weight_scale_2([w1, w3])
        assert new1.weight_scale_2 is new3.weight_scale_2
        assert float(scale_2) == float(new1.weight_scale_2)  # type: ignore[arg-type]
        assert report3.exact
        assert report1.exact is exact
        before, after = (dequantize_nvfp4(*w, dtype=FP32) for w in (w1, new1))
        assert torch.equal(before, after) is exact
        error = ((after - before).abs() / before.abs().clamp(min=1e-30)).max()
        assert float(error) == pytest.approx(report1.max_relative_error, rel=1e-4)
        naive = NVFP4Tensor(w1.weight, w1.weight_scale, w3.weight_scale_2)
        assert not torch.equal(dequantize_nvfp4(*naive, dtype=FP32), before)


def test_mxfp4_exponents_fit_up_to_a_spread_of_17() -> None:
    # NVIDIA/Model-Optimizer#1653, #1372: blocks beyond that were clamped.
    weight = pack_e2m1(torch.tensor([[7] * 32 + [1, 2] * 16], dtype=torch.uint8))
    inside = torch.tensor([[127, 127 - 17]], dtype=torch.uint8)
    cast = mxfp4_to_nvfp4(weight, inside)
    assert cast.lossless_mask.all()
    assert torch.equal(
        dequantize_mxfp4(weight, inside, dtype=FP32), dequantize_nvfp4(*cast[:3], dtype=FP32)
    )
    outside = torch.tensor([[127, 127 - 18]], dtype=torch.uint8)
    with pytest.raises(LosslessError, match="spread over 18"):
        mxfp4_to_nvfp4(weight, outside)
    assert mxfp4_to_nvfp4(weight, outside, outside="requantize").lossless_mask.tolist() == [
        [True, False]
    ]


def test_negative_zero_survives_the_cast() -> None:
    # NVIDIA/Model-Optimizer's cast writes +0 for -0, so "bit-exact" differs in the bytes.
    weight = torch.full((1, 16), 0x8F, dtype=torch.uint8)
    cast = mxfp4_to_nvfp4(weight, torch.tensor([[120]], dtype=torch.uint8))
    assert torch.equal(cast.weight, weight)
    assert bool(dequantize_nvfp4(*cast[:3]).signbit().all())
