"""DeepSeek-V4 as transformers defines it, with what training needs on top.

transformers' class is meant for inference: its eager attention scores every key for every query,
its experts loop over indices read back from the GPU, and it has no multi-token prediction. The
replacements here compute the same functions (``--smoke`` compares them) in fewer, larger steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as dsv4

ATTENTION = "windowed_with_sinks"
DROPOUT = 0.05  # on what each sublayer adds to the streams: the text is read many times over


def windowed_attention(
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

    query ``[B, H, S, D]``, S a multiple of the window W; key ``[B, 1, S + T, D]`` (the T
    compressed entries last; V4's values are its keys); attention_mask ``[B, 1, S, >= T]``, of
    which the last T columns say what is visible; s_aux ``[H]``. Returns ``[B, S, H, D]``.
    Each block of W queries sees two blocks of keys: S * 2W logits in place of S * S.
    """
    B, H, S, D = query.shape
    W, T = sliding_window, key.shape[2] - S
    blocks = key[:, 0, :S].reshape(B, S // W, W, D)
    near = torch.cat([F.pad(blocks, (0, 0, 0, 0, 1, 0))[:, :-1], blocks], dim=2)
    grouped = query.reshape(B, H, S // W, W, D).transpose(1, 2).reshape(B, S // W, H * W, D)
    logits = (grouped @ near.mT).view(B, S // W, H, W, 2 * W).transpose(1, 2).float() * scaling

    distance = torch.arange(W, 2 * W, device=key.device)[:, None] - torch.arange(
        2 * W, device=key.device
    )
    hidden = ((distance < 0) | (distance >= W)).expand(S // W, W, 2 * W).clone()
    hidden[0, :, :W] = True
    parts = [logits.masked_fill(hidden, float("-inf")).reshape(B, H, S, 2 * W)]
    far = key[:, 0, S:]
    if T:
        far_logits = (query.reshape(B, H * S, D) @ far.mT).view(B, H, S, T).float()
        visible = attention_mask[..., -T:].float()
        if module.training and module.far_drop is not None:
            visible = visible.masked_fill(module.far_drop.view(-1, 1, 1, 1), float("-inf"))
        parts.append(far_logits * scaling + visible)
    parts.append(s_aux.float().view(1, H, 1, 1).expand(B, H, S, 1))
    weights = torch.cat(parts, dim=-1).softmax(dim=-1)
    if getattr(module, "keep_far_weights", False):
        module.far_weights = weights[..., 2 * W : 2 * W + T].detach().mean(dim=1)

    near_weights = weights[..., : 2 * W].to(key.dtype).view(B, H, S // W, W, 2 * W)
    out = near_weights.transpose(1, 2).reshape(B, S // W, H * W, 2 * W) @ near
    out = out.view(B, S // W, H, W, D).permute(0, 1, 3, 2, 4).reshape(B, S, H, D)
    if T:
        far_weights = weights[..., 2 * W : 2 * W + T].to(key.dtype).reshape(B, H * S, T)
        out = out + (far_weights @ far).view(B, H, S, D).transpose(1, 2)
    return out, None


def no_mask(ids: Tensor) -> dict[str, Tensor]:
    """Return a mask of zero columns, in the dict that transformers takes as prebuilt.

    The window is built into the attention; the compressors append their visibility to this.
    """
    return {"sliding_attention": torch.zeros(*ids.shape, 0, device=ids.device)[:, None]}


def _dense_experts(self: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Run every expert on every token and weight the unchosen by zero: two matrix products.

    x ``[N, K]``, chosen and weights ``[N, top_k]``. Counts the load in ``self.load``.
    """
    E, K = self.num_experts, self.hidden_dim
    combine = torch.zeros(x.shape[0], E, device=x.device, dtype=weights.dtype)
    combine = combine.scatter(1, chosen, weights)
    self.load = (combine.detach() > 0).sum(dim=0)
    gate_up = F.linear(x, self.gate_up_proj.flatten(0, 1)).unflatten(-1, (E, -1))
    act = self._apply_gate(gate_up) * combine[..., None]
    return F.linear(act.flatten(1), self.down_proj.transpose(0, 1).reshape(K, -1))


def _all_visible(self: Any, hidden: Tensor, _q: Any, position_ids: Tensor, *_: Any) -> Tensor:
    """Stand in for the indexer while no context is long enough for it to leave anything out."""
    T = hidden.shape[1] // self.compress_rate
    entries = torch.arange(T, device=hidden.device).expand(*hidden.shape[:2], T)
    ready = ((position_ids + 1) // self.compress_rate)[..., None]
    return torch.where(entries < ready, entries, -1)


class MTP(nn.Module):
    """One multi-token-prediction layer: from position t's streams and token t+1, token t+2."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        K, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = dsv4.DeepseekV4RMSNorm(K, eps=eps)
        self.hnorm = dsv4.DeepseekV4RMSNorm(K, eps=eps)
        self.e_proj = nn.Linear(K, K, bias=False)
        self.h_proj = nn.Linear(K, K, bias=False)
        self.layer = dsv4.DeepseekV4DecoderLayer(config, config.num_hidden_layers - 1)
        self.hc_head = dsv4.DeepseekV4HyperHead(config)
        self.norm = dsv4.DeepseekV4RMSNorm(K, eps=eps)

    def forward(self, main: DeepseekV4ForCausalLM, streams: Tensor, next_ids: Tensor) -> Tensor:
        """streams ``[B, S, hc_mult, K]`` before the main model's hc_head; returns logits."""
        embeds = main.model.embed_tokens(next_ids)
        embeds[:, 0] = 0  # as served: position 0 gets no embedding
        x = self.h_proj(self.hnorm(streams)) + self.e_proj(self.enorm(embeds))[:, :, None]
        positions = torch.arange(next_ids.shape[1], device=next_ids.device)[None]
        rope = {"main": main.model.rotary_emb(embeds, position_ids=positions, layer_type="main")}
        x = self.layer(
            x,
            position_embeddings=rope,
            position_ids=positions,
            attention_mask=no_mask(next_ids)["sliding_attention"],
        )
        logits: Tensor = main.lm_head(self.norm(self.hc_head(x)))
        return logits


# Routing and the mixing of streams stay in float32 under autocast, as they are served.
_IN_FLOAT32 = (
    dsv4.DeepseekV4HyperConnection,
    dsv4.DeepseekV4HyperHead,
    dsv4.DeepseekV4TopKRouter,
    dsv4.DeepseekV4HashRouter,
)


def _keep_in_float32(module: Any) -> None:
    inner = module.forward

    def forward(x: Tensor, *args: Tensor) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return inner(x.float(), *args)

    module.forward = forward


class TinyDSV4(nn.Module):
    """The main model and its MTP layer, with the replacements above installed."""

    def __init__(self, keys: dict[str, Any], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, windowed_attention)
        build: Any = DeepseekV4ForCausalLM  # untyped upstream
        self.main = build(DeepseekV4Config(**keys))
        self.main.set_experts_implementation("eager")
        # compress_ratios has an entry for the MTP layer, so one more layer picks it up.
        deeper = DeepseekV4Config(**{**keys, "num_hidden_layers": keys["num_hidden_layers"] + 1})
        self.mtp = MTP(deeper)
        self.mtp.apply(self.main._init_weights)
        for config in (self.main.config, deeper):
            config._attn_implementation = ATTENTION
        self.streams: Tensor
        self.main.model.hc_head.register_forward_pre_hook(self._keep_streams)
        for name, module in self.named_modules():
            self._adapt(name, module)

    def _keep_streams(self, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.streams = args[0]

    def _adapt(self, name: str, module: Any) -> None:
        is_a = partial(isinstance, module)
        if is_a(dsv4.DeepseekV4Experts):
            module.forward = MethodType(_dense_experts, module)
        elif is_a(dsv4.DeepseekV4Attention):
            module.far_drop = None
            # Sinks of different strength per head, strong enough that leaving them out shows.
            module.sinks.data = torch.linspace(0.0, 3.0, module.num_heads)
        elif is_a(dsv4.DeepseekV4HashRouter):
            scores = torch.rand(module.tid2eid.shape[0], module.num_experts)
            module.tid2eid.copy_(scores.argsort(dim=-1)[:, : module.top_k])
        if is_a(_IN_FLOAT32):
            _keep_in_float32(module)
        if DROPOUT and name.endswith((".o_b_proj", ".mlp")):
            module.register_forward_hook(lambda m, _, out: F.dropout(out, DROPOUT, m.training))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the main model's logits ``[B, S, V]``; leaves ``streams`` for the MTP layer."""
        logits: Tensor = self.main(ids, attention_mask=no_mask(ids), use_cache=False).logits
        return logits

    def attentions(self, ratio: int) -> list[Any]:
        """Return the main model's attention modules with this compression ratio."""
        kind = {4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}[ratio]
        every = [layer.self_attn for layer in self.main.model.layers]
        return [attention for attention in every if attention.layer_type == kind]

    def balance(self, rate: float) -> None:
        """Move every router's correction bias towards even load (loss-free balancing)."""
        blocks: list[Any] = [m for m in self.modules() if type(m) is dsv4.DeepseekV4SparseMoeBlock]
        for block in blocks:
            if not block.is_hash:
                load = block.experts.load.float()
                block.gate.e_score_correction_bias += rate * (load.mean() - load).sign()


class IndexerTraining:
    """Trains the indexers, which get no gradient from the loss: their top-k cuts it off.

    The target is what attention gave each compressed entry; the loss is the cross entropy of the
    indexer's scores against it. Inputs are detached, so only the indexer learns from it.
    """

    def __init__(self, model: TinyDSV4) -> None:
        self.pairs = [(a, a.compressor.indexer) for a in model.attentions(4)]
        self.scores: dict[Any, Tensor] = {}
        self.topk = self.pairs[0][1].index_topk
        self.own_forward = {indexer: indexer.forward for _, indexer in self.pairs}
        for _, indexer in self.pairs:
            indexer.register_forward_pre_hook(
                lambda _m, args: (args[0].detach(), args[1].detach(), *args[2:])
            )
            indexer.scorer.register_forward_hook(self._keep(indexer))

    def _keep(self, indexer: Any) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
            self.scores[indexer] = output

        return hook

    def mode(self, mode: str) -> None:
        """Set "off" (everything visible, nothing learnt), "dense" (likewise, learning) or
        "sparse" (as served: top-k visible, learning)."""
        for attention, indexer in self.pairs:
            attention.keep_far_weights = mode != "off"
            indexer.forward = (
                MethodType(_all_visible, indexer) if mode == "off" else self.own_forward[indexer]
            )
            indexer.index_topk = self.topk if mode == "sparse" else 1 << 30
        self.scores.clear()

    def loss(self) -> Tensor:
        """Return the loss of the last forward pass, averaged over queries and layers."""
        losses = []
        for attention, indexer in self.pairs:
            target = attention.far_weights
            scores = self.scores[indexer].masked_fill(target == 0, -1e4)
            target = target / target.sum(dim=-1, keepdim=True).clamp_min(1e-6)
            losses.append(-(target * scores.log_softmax(dim=-1)).sum(dim=-1).mean())
        return torch.stack(losses).mean()


@contextmanager
def transformers_own(model: TinyDSV4) -> Iterator[DeepseekV4ForCausalLM]:
    """Run the main model with transformers' eager attention and expert loop, to compare."""
    model.main.config._attn_implementation = "eager"
    experts: Any
    held = []
    for experts in model.main.modules():
        if type(experts) is dsv4.DeepseekV4Experts:
            held.append((experts, experts.__dict__.pop("forward")))
    try:
        yield model.main
    finally:
        model.main.config._attn_implementation = ATTENTION
        for experts, forward in held:
            experts.forward = forward
