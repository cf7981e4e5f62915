"""DeepSeek-V4's forward pass for long contexts on the CPU: transformers' functions, fewer steps.

transformers' eager attention scores every key for every query and its indexer every entry for
every head at once, which for 4,096 tokens is gigabytes of logits that are masked out again.
`install` replaces the two, and the experts' loop, in one model instance. The results are the same
up to the order of float32 additions; a test compares them with transformers' own.
Written against transformers 5.20 (models/deepseek_v4).
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ATTENTION = "dsv4_blockwise"
_QUERY_BLOCK = 64  # of the usual window of 128: a quarter fewer keys than with blocks of 128
_SCORE_BLOCK = 32  # of 32 heads times 1,024 entries: the scores of a block stay in the cache


def install(model: nn.Module) -> None:
    """Replace attention, indexer scores and experts of a DeepseekV4ForCausalLM in place.

    Call the model with `no_mask` and ``use_cache=False`` afterwards: windows start at position 0.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as dsv4

    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, blockwise_attention)
    config: Any = model.config
    config._attn_implementation = _ATTENTION
    module: Any
    for module in model.modules():
        if isinstance(module, dsv4.DeepseekV4Indexer):
            module.scorer.forward = MethodType(_scores, module.scorer)
            module.scorer.topk, module.scorer.ratio = module.index_topk, module.compress_rate
        elif isinstance(module, dsv4.DeepseekV4Experts):
            module.forward = MethodType(_routed, module)
            module.quantize_input = module.quantize_inner = None


def no_mask(ids: Tensor) -> dict[str, Tensor]:
    """A mask of zero columns, in the dict that transformers takes as prebuilt.

    The window is built into the attention; the compressors append their visibility to this.
    """
    return {"sliding_attention": torch.zeros(ids.shape[0], 1, ids.shape[1], 0)}


def blockwise_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    s_aux: Tensor,
    sliding_window: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend to the last ``sliding_window`` keys, to the compressed entries and to the sink.

    query ``[B, H, S, D]``; key ``[B, 1, S + T, D]``, the T compressed entries last (V4's values
    are its keys); attention_mask ``[B, 1, S, T]``, added to the entries' logits; s_aux ``[H]``.
    Returns ``[B, S, H, D]``.
    """
    B, H, S, D = query.shape
    keys, entries = key[:, 0, :S], key[:, 0, S:]
    rate = module.compressor.compress_rate if entries.shape[1] else 1
    out = query.new_empty(B, S, H, D)
    for start in range(0, S, _QUERY_BLOCK):
        end = min(start + _QUERY_BLOCK, S)
        first = max(start - sliding_window + 1, 0)
        ready = min(end // rate, entries.shape[1])
        seen = torch.cat([keys[:, first:end], entries[:, :ready]], dim=1)
        flat = query[:, :, start:end].reshape(B, -1, D)
        logits = (flat @ seen.mT).mul_(scaling).view(B, H, end - start, -1)

        distance = torch.arange(start, end)[:, None] - torch.arange(first, end)
        outside = (distance < 0) | (distance >= sliding_window)
        logits[..., : end - first].masked_fill_(outside, float("-inf"))
        if ready:
            logits[..., end - first :] += attention_mask[:, :, start:end, :ready]
        sink = s_aux.view(1, H, 1, 1).expand(B, H, end - start, 1)
        weights = torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1]
        block = weights.reshape(B, -1, seen.shape[1]) @ seen
        out[:, start:end] = block.view(B, H, end - start, D).transpose(1, 2)
    return out, None


def _scores(self: Any, q: Tensor, compressed_kv: Tensor, hidden_states: Tensor) -> Tensor:
    """The indexer's ``sum_h w_h * relu(q_h . k)``: q ``[B, S, H, D]``, k ``[B, T, D]``.

    Returns ``[B, S, T]``, zero where the caller masks it, and for queries that see no more entries
    than the indexer may choose: those take all of them, whatever the scores.
    """
    B, S = q.shape[:2]
    T = compressed_kv.shape[1]
    out = q.new_zeros(B, S, T)
    first = min((self.topk + 1) * self.ratio - 1, S)  # the first query that has to choose
    weights = self.weights_proj(hidden_states[:, first:])
    weights = (weights * (self.weights_scaling * self.softmax_scale)).unsqueeze(-2)
    for start in range(first, S, _SCORE_BLOCK):
        end = min(start + _SCORE_BLOCK, S)
        ready = min(end // self.ratio, T)
        keys = compressed_kv[:, None, :ready].mT  # [B, 1, D, ready]
        scores = (q[:, start:end] @ keys).relu_()
        out[:, start:end, :ready] = (weights[:, start - first : end - first] @ scores).squeeze(-2)
    return out


def _routed(self: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Each expert on the tokens that chose it: x ``[N, K]``, chosen and weights ``[N, top_k]``.

    ``quantize_input`` and ``quantize_inner`` (None: as they are) see what enters w1 and w3, and w2.
    """
    if self.quantize_input is not None:
        x = self.quantize_input(x)
    out = torch.zeros_like(x)
    for expert in range(self.num_experts):
        tokens, place = torch.where(chosen == expert)
        if not tokens.numel():
            continue
        inner = self._apply_gate(F.linear(x[tokens], self.gate_up_proj[expert]))
        if self.quantize_inner is not None:
            inner = self.quantize_inner(inner)
        y = F.linear(inner, self.down_proj[expert])
        out.index_add_(0, tokens, y * weights[tokens, place, None])
    return out
