"""Other ways to compute the layer on one GPU, each as one callable over the same region.

A peer takes BF16 hidden states ``[T, hidden]``, top-k ids int32 or int64 ``[T, k]`` and float32
weights ``[T, k]``, and returns the combined BF16 result; gather, SwiGLU with its clamp, and combine
are all inside, weights are prepared before. CUDA graphs capture each of them. They compute with
BF16 activations, and get the same NVFP4 weights: vLLM's layer knows one global scale for gate and
up, so that weights to compare on come from ``with_one_scale``. DeepGEMM's FP8 products stand beside
them for the ratio: they round weights and activations to FP8. ``measure`` holds each result against
the reference before it is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from megamoe_kernel import ExpertWeights
from megamoe_kernel.reference import RankTokens, mega_moe
from nvfp4_codec import dequantize_nvfp4, quantize_fp8_block

Peer = Callable[[Tensor, Tensor, Tensor], Tensor]
_VERIFIED_TOKENS = 8
_TOLERANCE = 0.02  # they round to BF16 where the contract does not
_FP8_TOLERANCE = 0.1  # rounding weights and activations alone makes 0.06 to 0.07, vLLM's is 0.08
#: vLLM's contexts, which its layers look for when they run.
_OPEN = ExitStack()


class NotHereError(Exception):
    """A peer that cannot run on this machine; the message says why."""


@dataclass(frozen=True)
class Layer:
    """What all compute. w13, w2: see ExpertWeights; max_tokens: of one call at most."""

    w13: ExpertWeights
    w2: ExpertWeights
    num_topk: int
    max_tokens: int
    swiglu_limit: float | None

    @property
    def hidden(self) -> int:
        return self.w13.columns

    @property
    def intermediate(self) -> int:
        return self.w2.columns

    @property
    def num_experts(self) -> int:
        return self.w13.num_experts


def with_one_scale(w13: ExpertWeights) -> ExpertWeights:
    """Gate and up of each expert under the gate's global scale: other values, the same bytes."""
    gate = w13.weight_scale_2[:, :1]
    return replace(w13, weight_scale_2=gate.expand(-1, 2).contiguous())


def make_peer(name: str, layer: Layer) -> Peer:
    """The peer with its weights in place; raises NotHereError with the reason."""
    return PEERS[name](layer)


def reference(layer: Layer, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
    """The layer as the contract defines it, W4A16; slow."""
    (y,) = mega_moe(
        [RankTokens(x, topk_idx, topk_weights)],
        layer.w13,
        layer.w2,
        activation="bf16",
        swiglu_limit=layer.swiglu_limit,
    )
    return y


def measure(
    layer: Layer,
    inputs: Mapping[int, Sequence[tuple[Tensor, Tensor, Tensor]]],
    microseconds: Callable[[list[Callable[[], object]]], Sequence[float]],
) -> tuple[list[dict[str, object]], dict[str, str]]:
    """Time every peer that is here: its rows, and why the others have none.

    inputs: by number of tokens, the (x, topk_idx, topk_weights) that take turns. microseconds:
    times of one of these launches, each by a graph's replay.
    """
    rows: list[dict[str, object]] = []
    missing: dict[str, str] = {}
    for name in PEERS:
        try:
            peer = make_peer(name, layer)
            for tokens, turns in inputs.items():
                _verify(name, peer, layer, *(tensor[:_VERIFIED_TOKENS] for tensor in turns[0]))
                times = microseconds([partial(peer, *turn) for turn in turns])
                median, best = statistics.median(times), min(times)
                rows.append({"name": name, "tokens": tokens, "microseconds": median, "best": best})
            del peer
        except NotHereError as error:
            missing[name] = str(error)
        except Exception as error:  # one that stops does not cost the others' figures
            missing[name] = f"it stopped: {type(error).__name__}: {error}"
        torch.cuda.empty_cache()
    return rows, missing


def _verify(
    name: str, peer: Peer, layer: Layer, x: Tensor, topk_idx: Tensor, topk_weights: Tensor
) -> None:
    y = peer(x, topk_idx, topk_weights).float()
    expected = reference(layer, x, topk_idx, topk_weights).float()
    error = float((y - expected).norm() / expected.norm())
    if not error < (_FP8_TOLERANCE if "FP8" in name else _TOLERANCE):
        raise RuntimeError(f"it is wrong: a relative error of {error:.3g}")


def torch_grouped(layer: Layer) -> Peer:
    """torch's grouped matrix product over weights that are kept in BF16: 3.6 times the bytes."""
    if not hasattr(torch, "_grouped_mm"):
        raise NotHereError(f"torch {torch.__version__} has no _grouped_mm")
    w13, w2 = _dequantized(layer.w13), _dequantized(layer.w2)
    num_experts, limit = layer.num_experts, layer.swiglu_limit
    experts = torch.arange(num_experts, device=w13.device)

    def run(x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        tokens, num_topk = topk_idx.shape
        # Empty slots go last, beyond all groups; what comes out for them is not looked at.
        ids = torch.where(topk_idx < 0, num_experts, topk_idx).flatten()
        ordered, order = ids.sort(stable=True)
        ends = torch.searchsorted(ordered, experts.to(ordered.dtype), right=True).int()
        rows = x[order // num_topk]
        gate, up = torch._grouped_mm(rows, w13.mT, offs=ends).chunk(2, dim=-1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        h = torch.nn.functional.silu(gate) * up
        slots = torch._grouped_mm(h, w2.mT, offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        slots = slots[back].view(tokens, num_topk, -1)
        used = (topk_idx >= 0).unsqueeze(-1)
        weighted = slots.float() * topk_weights.unsqueeze(-1)
        return torch.where(used, weighted, 0.0).sum(1).to(torch.bfloat16)

    return run


def vllm_layer(layer: Layer, moe_backend: Literal["humming", "marlin", "deep_gemm"]) -> Peer:
    """vLLM's own MoE layer with one of its kernels, called behind its router: NVFP4, or FP8 blocks
    of the same weights for deep_gemm."""
    if find_spec("vllm") is None:
        raise NotHereError("vLLM is not installed")
    if not torch.cuda.is_available():
        raise NotHereError("vLLM's kernels need a GPU")
    try:
        experts = _vllm_experts(layer, moe_backend)
    except Exception as error:  # of whatever kind: another vLLM than this was written for
        found = getattr(__import__("vllm"), "__version__", "?")
        raise NotHereError(
            f"vLLM {found} makes no {moe_backend} layer here: {type(error).__name__}: {error}"
        ) from error
    method = experts.quant_method

    def run(x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        y: Tensor = method.apply(experts, x, topk_weights, topk_idx.int(), None, None)
        return y

    return run


#: In the order in which a report lists them.
PEERS: Mapping[str, Callable[[Layer], Peer]] = MappingProxyType(
    {
        "vLLM HUMMING": lambda layer: vllm_layer(layer, "humming"),
        "vLLM Marlin": lambda layer: vllm_layer(layer, "marlin"),
        "torch grouped BF16": torch_grouped,
        "vLLM DeepGEMM FP8": lambda layer: vllm_layer(layer, "deep_gemm"),
    }
)


def _dequantized(weights: ExpertWeights) -> Tensor:
    """BF16 ``[E, N, K]``, expert by expert: the float32 values of all at once are too many."""
    shape = (weights.num_experts, weights.rows, weights.columns)
    values = torch.empty(shape, dtype=torch.bfloat16, device=weights.weight.device)
    rows = weights.rows // weights.num_parts
    for expert in range(weights.num_experts):
        for part in range(weights.num_parts):
            at = slice(part * rows, (part + 1) * rows)
            values[expert, at] = dequantize_nvfp4(
                weights.weight[expert, at],
                weights.weight_scale[expert, at],
                weights.weight_scale_2[expert, part],
                dtype=torch.bfloat16,
            )
    return values


def _vllm_experts(layer: Layer, moe_backend: str) -> Any:
    """vLLM's module of routed experts with our weights, packed for its kernel.

    Written for vLLM 0.33, whose engine otherwise does what happens here around the layer.
    """
    from vllm.config import KernelConfig, VllmConfig, set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    fp8 = moe_backend == "deep_gemm"
    device = layer.w13.weight.device
    config = VllmConfig(kernel_config=KernelConfig(moe_backend=moe_backend))
    config.scheduler_config.max_num_batched_tokens = layer.max_tokens
    _OPEN.enter_context(set_current_vllm_config(config))
    _single_process(device)
    quant_config = (
        Fp8Config(weight_block_size=[128, 128]) if fp8 else ModelOptNvFp4Config("NVFP4", True)
    )
    with torch.device(device):
        runner = FusedMoEFactory(
            num_experts=layer.num_experts,
            top_k=layer.num_topk,
            hidden_size=layer.hidden,
            intermediate_size=layer.intermediate,
            params_dtype=torch.bfloat16,
            renormalize=True,
            quant_config=quant_config,
            swiglu_limit=layer.swiglu_limit,
            prefix=f"model.layers.{moe_backend}.experts",
        )
    experts = runner.routed_experts
    for name, weights in (("w13", layer.w13), ("w2", layer.w2)):
        for part, value in (_fp8_blocks(weights) if fp8 else _nvfp4(weights)).items():
            parameter = getattr(experts, f"{name}_{part}").data
            parameter.copy_(value.reshape(parameter.shape))
    method = experts.quant_method
    method.process_weights_after_loading(experts)
    chosen = method.fp8_backend if fp8 else method.nvfp4_backend
    if chosen.name.lower() != moe_backend.replace("_", ""):
        raise RuntimeError(f"it chose {chosen.name.lower()}")
    _OPEN.enter_context(set_forward_context(None, config, num_tokens=layer.max_tokens))
    return experts


def _nvfp4(weights: ExpertWeights) -> dict[str, Tensor]:
    """By the names of vLLM's parameters."""
    return {
        "weight": weights.weight,
        "weight_scale": weights.weight_scale,
        "weight_scale_2": weights.weight_scale_2,
        "input_scale": torch.full_like(weights.weight_scale_2, 0.01),  # not read in W4A16
    }


def _fp8_blocks(weights: ExpertWeights) -> dict[str, Tensor]:
    """The same values in E4M3 with a float32 scale for each 128 x 128 of them."""
    blocks = [quantize_fp8_block(values) for values in _dequantized(weights)]
    return {
        "weight": torch.stack([block.weight for block in blocks]),
        "weight_scale_inv": torch.stack([block.weight_scale for block in blocks]),
    }


def _single_process(device: torch.device) -> None:
    """The process groups and the workspace that vLLM's layers ask for; once."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from vllm.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
        model_parallel_is_initialized,
    )
    from vllm.v1.worker.workspace import init_workspace_manager

    if model_parallel_is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not torch.distributed.is_initialized():
        store = HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    init_distributed_environment(1, 0, local_rank=device.index or 0, backend=backend)
    initialize_model_parallel(1, 1)
    init_workspace_manager(device)
