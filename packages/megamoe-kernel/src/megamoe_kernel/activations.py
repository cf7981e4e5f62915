"""Hidden states as dispatch sends them: NVFP4 with one float32 scale per token, or BF16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_codec import dequantize_fp8_block, quantize_nvfp4, unpack_e2m1
from nvfp4_codec.formats import decode_e2m1, decode_e4m3
from nvfp4_codec.scales import AMAX_PER_SCALE, get_profile

from .errors import DtypeError, ShapeError
from .experts import BLOCK_SIZE, check_dtype

#: The codec's rules by which activations are quantized: IEEE rounding throughout, -0.0 kept.
PROFILE = "ieee"
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class QuantizedTokens:
    """Tokens in NVFP4: value = E2M1 code * block_scale * scale.

    codes: uint8 ``[T, K/2]``, even k in the low nibble. block_scale: float8_e4m3fn ``[T, K/16]``.
    scale: float32 ``[T]``, one for each token.
    """

    codes: Tensor
    block_scale: Tensor
    scale: Tensor

    def unscaled(self) -> Tensor:
        """E2M1 * block_scale as float64 ``[T, K]``: what the tensor cores sum up, exactly."""
        return unscaled_values(self.codes, self.block_scale)


def quantize_tokens(x: Tensor) -> QuantizedTokens:
    """Quantize ``[T, K]`` (bfloat16, float16 or float32), each token as a tensor of its own.

    A token gets the bytes and the scale that nvfp4_codec.quantize_nvfp4 gives its row alone, in
    profile "ieee" with zero_amax="one": scale = float32(amax) / 2688; block scales and codes from
    there. No value is looked at, so non-finite ones are not refused: their token gets an
    unspecified result. Raises DtypeError, ShapeError.
    """
    check_dtype("x", x, *FLOATS)
    if x.ndim != 2 or not x.shape[1] or x.shape[1] % BLOCK_SIZE:
        raise ShapeError(
            f"x has shape {tuple(x.shape)}, expected [tokens, K] with K a positive multiple of "
            f"{BLOCK_SIZE}"
        )
    rules = get_profile(PROFILE)
    blocks = x.float().unflatten(-1, (-1, BLOCK_SIZE))
    magnitude = blocks.abs().amax(-1)
    scale = magnitude.amax(-1, keepdim=True) / torch.full_like(magnitude[:, :1], AMAX_PER_SCALE)
    scale = torch.where(scale == 0, 1.0, scale)
    block_scale = rules.block_scale(magnitude, scale)
    codes = rules.encode(rules.normalize(blocks, block_scale, scale))
    packed = codes.flatten(-2)
    packed = packed[..., 0::2] | packed[..., 1::2] << 4
    return QuantizedTokens(packed, block_scale.view(torch.float8_e4m3fn), scale.squeeze(-1))


def quantize_intermediate(h: Tensor, input_scale: Tensor) -> QuantizedTokens:
    """Quantize SwiGLU's output, float32 ``[T, K]``, with one scale for all tokens of the layer.

    The bytes are those of nvfp4_codec.quantize_nvfp4(h, weight_scale_2=input_scale,
    profile="ieee"). Raises NonFiniteError (of nvfp4_codec) for NaN or Inf.
    """
    q = quantize_nvfp4(h, weight_scale_2=input_scale, profile=PROFILE)
    return QuantizedTokens(q.weight, q.weight_scale, input_scale.expand(h.shape[0]))


def decode_hidden_states(x: Tensor, scales: Tensor | None) -> Tensor:
    """Hidden states ``[T, K]`` as a float tensor: FP8 with its scales becomes float32.

    x: bfloat16, float16 or float32, without scales; or float8_e4m3fn with scales float32 or
        float8_e8m0fnu ``[T, K / g]``, one for g consecutive values (128 in DeepSeek-V4's FP8, K for
        one scale per token). e4m3 * scale is rounded to float32 once, exact for powers of two.
    """
    if not isinstance(x, Tensor) or x.ndim != 2:
        found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(f"x is {found}, expected hidden states [tokens, hidden]")
    if x.layout != torch.strided:
        raise DtypeError(f"x is {x.layout}, expected a dense tensor")
    if x.dtype in FLOATS:
        if scales is not None:
            raise DtypeError(f"x is {x.dtype} and has scales; only float8_e4m3fn comes with some")
        return x
    if x.dtype != torch.float8_e4m3fn:
        raise DtypeError(
            f"x is {x.dtype}, expected bfloat16, float16, float32, or float8_e4m3fn with scales"
        )
    if scales is None:
        raise DtypeError("x is float8_e4m3fn without scales; pass scales=[tokens, hidden / 128]")
    if not isinstance(scales, Tensor) or scales.layout != torch.strided:
        kind = scales.layout if isinstance(scales, Tensor) else f"a {type(scales).__name__}"
        raise DtypeError(f"scales is {kind}, expected a dense tensor")
    if scales.device != x.device:
        raise ShapeError(f"scales are on {scales.device}, x on {x.device}")
    tokens, hidden = x.shape
    if scales.dtype not in (torch.float32, torch.float8_e8m0fnu):
        raise DtypeError(
            f"scales are {scales.dtype}, expected float32 or float8_e8m0fnu; unpack int32 words of "
            "E8M0 bytes first (words.view(torch.float8_e8m0fnu))"
        )
    groups = scales.shape[-1] if scales.ndim == 2 else 0
    if tuple(scales.shape) != (tokens, groups) or not groups or hidden % groups:
        raise ShapeError(
            f"scales have shape {tuple(scales.shape)}, expected ({tokens}, {hidden} / g): one for "
            "each g consecutive values of a token"
        )
    block = (1, hidden // groups)
    return dequantize_fp8_block(x, scales, block=block, dtype=torch.float32)


def unscaled_values(codes: Tensor, block_scale: Tensor) -> Tensor:
    """E2M1 * UE4M3 as float64 ``[..., K]``, exact."""
    values: Tensor = decode_e2m1(unpack_e2m1(codes)).double().unflatten(-1, (-1, BLOCK_SIZE))
    return (values * decode_e4m3(block_scale).double().unsqueeze(-1)).flatten(-2)
