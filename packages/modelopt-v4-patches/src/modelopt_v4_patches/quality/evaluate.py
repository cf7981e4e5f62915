"""Perplexity of a DeepSeek-V4 checkpoint on the CPU, whatever format it is stored in.

Every weight is dequantized with the codec into transformers' DeepseekV4ForCausalLM (float32);
with ``activations`` the inputs of quantized linears are rounded as a serving GPU would round them
(see `fakequant`). Everything else stays float32: what BF16 arithmetic, an FP8 KV cache and the
indexer's FP8 cache cost is not in these numbers. Made for models that fit into memory in float32.
Needs transformers >= 5.20.2 (extra ``modelopt``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from nvfp4_codec.checkpoint import Checkpoint, Family, find_families
from nvfp4_codec.checkpoint.values import load_values
from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import detect_scheme, fused_experts, parse, to_official

from ..errors import VersionError
from . import forward
from .fakequant import Quantizer, largest, quantizer_for

Losses = NDArray[np.float64]
_LEAST_TRANSFORMERS = "5.20.2"

ReadWeight = Callable[[Checkpoint, Family], Tensor]


def load_model(
    folder: Path,
    *,
    activations: bool = False,
    read: ReadWeight = load_values,
    fast: bool = True,
) -> nn.Module:
    """A float32 DeepseekV4ForCausalLM with the checkpoint's weights, in eval mode.

    folder: official, dequantized or NVFP4, in any scheme of names; MTP blocks are not read.
    read: gives a family's values as float32; other readings show what a wrong one costs.
    fast: `forward.install`; False leaves transformers' own eager code, without ``activations``.
    Raises CheckpointError naming the tensor that is missing or has another shape, VersionError for
    an older transformers.
    """
    if activations and not fast:
        raise ValueError("activations=True needs fast=True: eager experts would not be rounded")
    _check_version()
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    config = DeepseekV4Config.from_pretrained(folder)
    build: Any = DeepseekV4ForCausalLM  # untyped upstream
    with torch.random.fork_rng(devices=[]):  # initial weights are drawn, then overwritten
        model: nn.Module = build(config).float().eval()
    with Checkpoint.open(folder) as checkpoint, torch.inference_mode():
        families = official_families(checkpoint)
        for name, target in model.state_dict().items():
            _fill(name, target, checkpoint, families, read)
        if fast:
            forward.install(model)
        else:
            model.set_experts_implementation("eager")  # type: ignore[operator]
        if activations:
            _quantize_activations(model, checkpoint, families)
    return model


def official_families(checkpoint: Checkpoint) -> dict[str, Family]:
    """The checkpoint's families by the official name of their weight, without unknown ones."""
    scheme = detect_scheme(checkpoint.tensors)
    return {
        to_official(family.weight.name, scheme): family
        for family in find_families(checkpoint.tensors)
        if parse(family.weight.name, scheme) is not None
    }


def token_losses(model: nn.Module, windows: NDArray[np.int64]) -> Losses:
    """Every token's negative log-likelihood in nats, ``[windows, length - 1]``.

    Each window is a context of its own; its first token is given, not predicted.
    """
    losses = []
    for window in torch.from_numpy(windows):
        with torch.inference_mode():
            ids = window[None]
            logits = model(ids, attention_mask=forward.no_mask(ids), use_cache=False).logits[0]
            loss = F.cross_entropy(logits[:-1], window[1:], reduction="none")
        losses.append(loss.double().numpy())
    return np.stack(losses)


def perplexity(losses: Losses) -> float:
    """exp of the mean loss per token."""
    return float(np.exp(losses.mean()))


def _check_version() -> None:
    from packaging.version import Version

    if Version(found := version("transformers")) < Version(_LEAST_TRANSFORMERS):
        raise VersionError(
            f"transformers {found} has another DeepSeek-V4 than perplexities are measured with "
            f"here; install {_LEAST_TRANSFORMERS} or later"
        )


def _fill(
    name: str,
    target: Tensor,
    checkpoint: Checkpoint,
    families: Mapping[str, Family],
    read: ReadWeight,
) -> None:
    """Copy the values behind one of transformers' tensors into it."""
    if parts := fused_experts(name, len(target)):
        per_expert = len(parts) // len(target)
        for expert, matrix in enumerate(target):
            names = parts[expert * per_expert : (expert + 1) * per_expert]
            stacked = [read(checkpoint, _family(families, part)) for part in names]
            _copy(torch.cat(stacked), matrix, parts[0])
        return
    official = to_official(name, "hf")
    family = _family(families, official)
    if target.is_floating_point():
        _copy(read(checkpoint, family), target, official)
    else:
        _copy(checkpoint.tensor(family.weight.name), target, official)


def _copy(values: Tensor, target: Tensor, name: str) -> None:
    if values.shape != target.shape:
        raise CheckpointError(
            f"has shape {tuple(values.shape)}, config.json makes it {tuple(target.shape)}; "
            "weights and config are of different models",
            tensor=name,
        )
    target.copy_(values)


def _family(families: Mapping[str, Family], official: str) -> Family:
    if official not in families:
        raise CheckpointError(
            "is missing; `dsv4-quantize validate` lists everything that is", tensor=official
        )
    return families[official]


def _quantize_activations(
    model: nn.Module, checkpoint: Checkpoint, families: Mapping[str, Family]
) -> None:
    module: Any
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            family = families[to_official(f"{name}.weight", "hf")]
            quantizer = quantizer_for(family, _input_scale(checkpoint, family))
            if quantizer is not None:
                module.register_forward_pre_hook(partial(_quantize_input, quantizer))
        elif name.endswith(".mlp.experts"):
            module.quantize_input = _for_experts(
                f"{name}.gate_up_proj", module, families, checkpoint
            )
            module.quantize_inner = _for_experts(f"{name}.down_proj", module, families, checkpoint)


def _quantize_input(
    quantizer: Quantizer, _module: nn.Module, args: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    return (quantizer(args[0]), *args[1:])


def _for_experts(
    name: str, module: Any, families: Mapping[str, Family], checkpoint: Checkpoint
) -> Quantizer | None:
    members = [families[part] for part in fused_experts(name, module.num_experts)]
    scales = [_input_scale(checkpoint, family) for family in members]
    return quantizer_for(members[0], largest([scale for scale in scales if scale is not None]))


def _input_scale(checkpoint: Checkpoint, family: Family) -> Tensor | None:
    for extra in family.extras:
        if extra.name.endswith("input_scale"):
            return checkpoint.tensor(extra.name)
    return None
