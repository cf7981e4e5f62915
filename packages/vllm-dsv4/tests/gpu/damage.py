"""A float32 model damaged in one way at a time, and what a sound GPU does to it.

To choose gates by: sound rounding must pass and damage must not. Everything here works on
transformers' DeepseekV4ForCausalLM with `quality.forward` installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_codec import dequantize_fp8_block, quantize_fp8_block

#: Attention counts this much more in the checkpoints called heavy: a power of two is exact.
EMPHASIS = 4.0
#: Whose inputs vLLM quantizes to FP8 when the weights are FP8, wo_a apart.
_FP8_LINEARS = re.compile(
    r"self_attn\.((q_a|q_b|kv|o_b)_proj|compressor\.indexer\.q_b_proj)$"
    r"|shared_experts\.(gate|up|down)_proj$"
)
_KV_GROUP = 64  # of the cache's scales; the last 64 columns, rope's, stay BF16

Damage = Callable[[Mapping[str, Tensor]], None]


def emphasize(model: nn.Module) -> None:
    """Multiply what attention adds to the residual stream."""
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if name.endswith("o_b_proj.weight"):
                parameter.mul_(EMPHASIS)


@contextmanager
def damaged(model: nn.Module, damage: Damage) -> Iterator[None]:
    """The model with the damage done, and undone at the end."""
    tensors = dict(model.state_dict())
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    with torch.inference_mode():
        damage(tensors)
    try:
        yield
    finally:
        with torch.inference_mode():
            for name, tensor in tensors.items():
                tensor.copy_(saved[name])


@contextmanager
def rounded(model: nn.Module, *, wo_a: str = "bf16", linears: str = "bf16") -> Iterator[None]:
    """What vLLM rounds on Hopper: BF16 activations and an FP8 KV cache, with options FP8 inputs.

    wo_a, linears: ``fp8`` or ``bf16``, the activations before wo_a and before the linears that the
    official checkpoint stores in FP8.
    """
    hooks = []
    module: Any
    for name, module in model.named_modules():
        if re.search(r"self_attn\.(compressor\.)?kv_norm$", name):
            hooks.append(module.register_forward_hook(lambda *a: _cached(a[2])))
        elif isinstance(module, nn.Linear) or "norm" in name.rpartition(".")[2]:
            hooks.append(module.register_forward_hook(lambda *a: a[2].bfloat16().float()))
        before = linears if _FP8_LINEARS.search(name) else "bf16"
        if (wo_a if name.endswith("o_a_proj") else before) == "fp8":
            hooks.append(module.register_forward_pre_hook(lambda _, a: (_fp8(a[0]), *a[1:])))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _fp8(x: Tensor, group: int = 128) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    packed = quantize_fp8_block(rows, block=(1, group), scale_fmt="ue8m0")
    values = dequantize_fp8_block(
        packed.weight, packed.weight_scale, block=(1, group), dtype=torch.float32
    )
    return values.view(x.shape)


def _cached(kv: Tensor) -> Tensor:
    body, rope = kv[..., :-_KV_GROUP], kv[..., -_KV_GROUP:]
    return torch.cat([_fp8(body, _KV_GROUP), rope.bfloat16().float()], dim=-1)


def _each(pattern: str, change: Callable[[Tensor], Any]) -> Damage:
    compiled = re.compile(pattern)

    def damage(tensors: Mapping[str, Tensor]) -> None:
        found = [tensor for name, tensor in tensors.items() if compiled.search(name)]
        assert found, pattern
        for tensor in found:
            change(tensor)

    return damage


def _noise(tensor: Tensor) -> None:
    generator = torch.Generator().manual_seed(1)
    tensor.mul_(1 + 0.05 * torch.randn(tensor.shape, generator=generator))


def _exchange_halves(tensor: Tensor) -> None:
    tensor.copy_(torch.cat([*tensor.chunk(2)][::-1]))


def _exchange_nibbles(tensor: Tensor) -> None:
    tensor.copy_(tensor.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


def _one_expert(layer: int, change: Callable[[Tensor], Any], part: str = "") -> Damage:
    return _each(
        rf"layers\.{layer}\.mlp\.experts\.{part}.*proj$", lambda experts: change(experts[0])
    )


_ATTN = r"layers\.[0-9]+\.self_attn\."
_OF_128 = r"layers\.[13]\.self_attn\.compressor\."  # the asset's ratios are 0, 128, 4, 128
_OF_4 = r"layers\.2\.self_attn\.compressor\."

#: By name, roughly from weak to strong.
DAMAGE: Mapping[str, Damage] = {
    "wo_a: 5 % noise": _each(_ATTN + "o_a_proj", _noise),
    "wkv: 5 % noise": _each(_ATTN + "kv_proj", _noise),
    "wo_a: 5 % too large": _each(_ATTN + "o_a_proj", lambda t: t.mul_(1.05)),
    "one expert: w1 and w3 exchanged": _one_expert(1, _exchange_halves, "gate_up"),
    "one expert: zero": _one_expert(1, Tensor.zero_, "down"),
    "one expert: nibbles exchanged": _one_expert(2, _exchange_nibbles),
    "sinks: zero": _each(_ATTN + "sinks", Tensor.zero_),
    "indexer: negated": _each(_OF_4 + "indexer.q_b_proj", Tensor.neg_),
    "ratio-128 compressors: zero": _each(_OF_128 + "kv_proj", Tensor.zero_),
    "ratio-4 compressor: zero": _each(_OF_4 + "kv_proj", Tensor.zero_),
    "w2: a fifth too large": _each(r"experts\.down_proj$", lambda t: t.mul_(1.2)),
    "one layer: w1 and w3 exchanged": _each(
        r"layers\.1\.mlp\.experts\.gate_up_proj",
        lambda experts: experts.copy_(experts.unflatten(1, (2, -1)).flip(1).flatten(1, 2)),
    ),
    "wo_a of one layer: groups exchanged": _each(
        r"layers\.1\.self_attn\.o_a_proj", _exchange_halves
    ),
}  # fmt: skip
