"""Tokens are quantized by the codec's rules, each as a tensor of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megamoe_kernel import DtypeError, ShapeError, quantize_tokens
from megamoe_kernel.activations import decode_hidden_states, quantize_intermediate
from nvfp4_codec import dequantize_fp8_block, quantize_fp8_block, quantize_nvfp4


def _hidden_states() -> Tensor:
    """Ordinary, heavy-tailed, tiny, huge, zero, constant and barely non-zero tokens."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 128, generator=generator)
    x[1] = x[1] ** 5
    x[2] *= 1e-30
    x[3] *= 1e30
    x[4] = 0
    x[5] = -3
    x[6, 16:] = 0
    x[7] = torch.where(x[7] > 0, 0.0, -0.0)
    x[8] *= torch.exp2(torch.arange(128) // 16 * -4.0)
    x[9] = 0
    x[9, 5] = 1e-40  # its scale underflows
    x[10] = 0
    x[10, 5] = 1e-36  # a float32 subnormal as scale
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_token_gets_the_bytes_of_its_row_alone(dtype: torch.dtype) -> None:
    x = _hidden_states()
    x = x.clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else x.to(dtype)
    tokens = quantize_tokens(x)
    for row in range(x.shape[0]):
        alone = quantize_nvfp4(x[row : row + 1], profile="ieee", zero_amax="one")
        assert torch.equal(tokens.codes[row], alone.weight[0]), row
        assert torch.equal(
            tokens.block_scale[row].view(torch.uint8), alone.weight_scale[0].view(torch.uint8)
        ), row
        assert isinstance(alone.weight_scale_2, Tensor)
        assert torch.equal(tokens.scale[row], alone.weight_scale_2), row


def test_the_token_scale_follows_the_token() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    tokens, doubled = quantize_tokens(x), quantize_tokens(x * 4)
    assert torch.equal(doubled.scale, tokens.scale * 4)
    assert torch.equal(doubled.codes, tokens.codes)
    error = tokens.unscaled() * tokens.scale.double()[:, None] - x.double()
    assert 0.05 < float(error.norm() / x.double().norm()) < 0.13


def test_what_cannot_be_quantized() -> None:
    x = torch.zeros(2, 32)
    wrong = (x.int(), x.double(), x.bool(), x.to(torch.float8_e4m3fn), [1.0])
    for value in wrong:
        with pytest.raises(
            DtypeError, match="x is .*, expected torch.bfloat16 or torch.float16 or"
        ):
            quantize_tokens(value)  # type: ignore[arg-type]
    for tensor in (x[0], x[None], x[:, :20], x[:, :0]):
        with pytest.raises(ShapeError, match="K a positive multiple of 16"):
            quantize_tokens(tensor)


def test_no_tokens() -> None:
    tokens = quantize_tokens(torch.zeros(0, 128, dtype=torch.bfloat16))
    assert tokens.codes.shape == (0, 64)
    assert tokens.block_scale.shape == (0, 8)
    assert tokens.scale.shape == (0,)


def test_the_intermediate_has_one_scale_for_all() -> None:
    h = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)) * 3
    scale = torch.tensor(0.004)
    tokens = quantize_intermediate(h, scale)
    expected = quantize_nvfp4(h, weight_scale_2=scale, profile="ieee")
    assert torch.equal(tokens.codes, expected.weight)
    assert torch.equal(
        tokens.block_scale.view(torch.uint8), expected.weight_scale.view(torch.uint8)
    )
    assert tokens.scale.tolist() == [scale.item()] * 5


@pytest.mark.parametrize("scale_fmt", ["fp32", "ue8m0"])
@pytest.mark.parametrize("group", [32, 128, 256], ids=["by 32", "by 128", "by token"])
def test_fp8_hidden_states_are_decoded_before_anything_else(group: int, scale_fmt: str) -> None:
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(3))
    fp8 = quantize_fp8_block(x, block=(1, group), scale_fmt=scale_fmt)  # type: ignore[arg-type]
    decoded = decode_hidden_states(fp8.weight, fp8.weight_scale)
    expected = dequantize_fp8_block(
        fp8.weight, fp8.weight_scale, block=(1, group), dtype=torch.float32
    )
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded, expected)
    assert torch.allclose(decoded, x, rtol=0.07, atol=0.02)


def test_what_cannot_be_hidden_states() -> None:
    x = torch.zeros(2, 256, dtype=torch.bfloat16)
    fp8 = x.to(torch.float8_e4m3fn)
    with pytest.raises(ShapeError, match=r"expected hidden states \[tokens, hidden\]"):
        decode_hidden_states(x[0], None)
    with pytest.raises(DtypeError, match="has scales; only float8_e4m3fn"):
        decode_hidden_states(x, torch.ones(2, 2))
    with pytest.raises(DtypeError, match="torch.float8_e5m2, expected"):
        decode_hidden_states(x.to(torch.float8_e5m2), torch.ones(2, 2))
    with pytest.raises(DtypeError, match="without scales"):
        decode_hidden_states(fp8, None)
    with pytest.raises(DtypeError, match="unpack int32 words"):
        decode_hidden_states(fp8, torch.ones(2, 1, dtype=torch.int32))
    for shape in ((2,), (2, 3), (1, 2), (2, 0), (2, 2, 1)):
        with pytest.raises(ShapeError, match="scales have shape"):
            decode_hidden_states(fp8, torch.ones(shape))
