"""The table: one row per kind of tensor, nothing computed.

A template holds ``#`` where a name has an index. Block rows are relative to their block
(``layers.#.`` or ``mtp.#.``). ``half`` is the form that transformers >= 5.20 writes when it
reverses its load-time renaming: official apart from the prefix ``model.``, a few root names, and
``attn.norm``, which should have become ``attn.kv_norm`` again.

Shapes are products of the dimension names of `ModelConfig.dimensions`, plus ``ratio``, ``overlap``
and ``mix`` of the block; they are logical, [out, in] before packing.

Sources: tensor listings of the official DeepSeek-V4-Pro, -Flash and -Flash-0731 checkpoints (names,
shapes, dtypes); transformers 5.8 to 5.24 ``conversion_mapping.py`` and exports by modelopt 0.45 and
0.47 (the other two schemes). The tests hold all of these against this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Format = Literal["fp8_block", "mxfp4", "bf16", "fp32", "int64"]
Role = Literal[
    "embed",
    "head",
    "norm",
    "wq_a",
    "wq_b",
    "wkv",
    "wo_a",
    "wo_b",
    "sink",
    "compressor",
    "position_bias",
    "indexer_wq_b",
    "indexer_weights",
    "gate",
    "gate_bias",
    "hash_table",
    "shared_expert",
    "routed_expert",
    "hyper_connection",
    "mtp_proj",
    "draft_head",
    "kv_scale",
]
When = Literal["always", "compressed", "indexed", "hashed", "scored", "first", "last"]


@dataclass(frozen=True)
class Row:
    """One kind of tensor.

    ``half`` None means: as the official name. ``hf_also`` and ``half_also`` are second spellings
    that some versions write; they are understood, never written. ``when`` says which blocks have
    the tensor: with a compressor (ratio 4 or 128), with an indexer (ratio 4), routed by token id
    or by score, first or last of their kind. ``optional`` tensors are no part of the model; some
    exports add them.
    """

    role: Role
    official: str
    hf: str
    format: Format
    shape: tuple[str, ...]
    when: When = "always"
    half: str | None = None
    hf_also: str | None = None
    half_also: str | None = None
    optional: bool = False

    @property
    def linear(self) -> bool:
        """Whether the tensor is a matrix that a quantizer may split into weight and scales."""
        return len(self.shape) == 2 and self.official.endswith(".weight") and self.role != "embed"


ROOT = (
    Row("embed", "embed.weight", "model.embed_tokens.weight", "bf16", ("vocab", "hidden"),
        half="model.embed_tokens.weight"),
    Row("norm", "norm.weight", "model.norm.weight", "bf16", ("hidden",), half="model.norm.weight"),
    # Half-converted exports write head.weight and still say lm_head in their ignore list;
    # transformers 5.9 to 5.14 write head.weight among HF names.
    Row("head", "head.weight", "lm_head.weight", "bf16", ("vocab", "hidden"), half="head.weight",
        hf_also="head.weight", half_also="lm_head.weight"),
    Row("hyper_connection", "hc_head_fn", "model.hc_head.hc_fn", "fp32",
        ("streams", "streams*hidden"), half="model.hc_head.hc_fn"),
    Row("hyper_connection", "hc_head_base", "model.hc_head.hc_base", "fp32", ("streams",),
        half="model.hc_head.hc_base"),
    Row("hyper_connection", "hc_head_scale", "model.hc_head.hc_scale", "fp32", ("1",),
        half="model.hc_head.hc_scale"),
)  # fmt: skip

BLOCK = (
    Row("norm", "attn_norm.weight", "input_layernorm.weight", "bf16", ("hidden",)),
    Row("norm", "ffn_norm.weight", "post_attention_layernorm.weight", "bf16", ("hidden",)),
    Row("hyper_connection", "hc_attn_fn", "attn_hc.fn", "fp32", ("mix", "streams*hidden")),
    Row("hyper_connection", "hc_attn_base", "attn_hc.base", "fp32", ("mix",)),
    Row("hyper_connection", "hc_attn_scale", "attn_hc.scale", "fp32", ("3",)),
    Row("hyper_connection", "hc_ffn_fn", "ffn_hc.fn", "fp32", ("mix", "streams*hidden")),
    Row("hyper_connection", "hc_ffn_base", "ffn_hc.base", "fp32", ("mix",)),
    Row("hyper_connection", "hc_ffn_scale", "ffn_hc.scale", "fp32", ("3",)),
    # Attention.
    Row("wq_a", "attn.wq_a.weight", "self_attn.q_a_proj.weight", "fp8_block",
        ("q_rank", "hidden")),
    Row("norm", "attn.q_norm.weight", "self_attn.q_a_norm.weight", "bf16", ("q_rank",)),
    Row("wq_b", "attn.wq_b.weight", "self_attn.q_b_proj.weight", "fp8_block",
        ("heads*head_dim", "q_rank")),
    Row("wkv", "attn.wkv.weight", "self_attn.kv_proj.weight", "fp8_block", ("head_dim", "hidden")),
    Row("norm", "attn.kv_norm.weight", "self_attn.kv_norm.weight", "bf16", ("head_dim",),
        half="attn.norm.weight", half_also="attn.kv_norm.weight"),
    Row("sink", "attn.attn_sink", "self_attn.sinks", "fp32", ("heads",)),
    Row("wo_a", "attn.wo_a.weight", "self_attn.o_a_proj.weight", "fp8_block",
        ("groups*o_rank", "heads*head_dim/groups")),
    Row("wo_b", "attn.wo_b.weight", "self_attn.o_b_proj.weight", "fp8_block",
        ("hidden", "groups*o_rank")),
    # modelopt adds these for an FP8 KV cache, on projections that the model does not have.
    Row("kv_scale", "attn.k_proj.k_scale", "self_attn.k_proj.k_scale", "fp32", (), optional=True),
    Row("kv_scale", "attn.v_proj.v_scale", "self_attn.v_proj.v_scale", "fp32", (), optional=True),
    # KV compressor: at ratio 4 windows overlap, so its width doubles.
    Row("compressor", "attn.compressor.wkv.weight", "self_attn.compressor.kv_proj.weight", "bf16",
        ("overlap*head_dim", "hidden"), "compressed"),
    Row("compressor", "attn.compressor.wgate.weight", "self_attn.compressor.gate_proj.weight",
        "bf16", ("overlap*head_dim", "hidden"), "compressed"),
    Row("position_bias", "attn.compressor.ape", "self_attn.compressor.position_bias", "fp32",
        ("ratio", "overlap*head_dim"), "compressed"),
    Row("norm", "attn.compressor.norm.weight", "self_attn.compressor.kv_norm.weight", "bf16",
        ("head_dim",), "compressed"),
    # Indexer, which has a compressor of its own. HF nests it the other way round.
    Row("indexer_wq_b", "attn.indexer.wq_b.weight", "self_attn.compressor.indexer.q_b_proj.weight",
        "fp8_block", ("index_heads*index_dim", "q_rank"), "indexed"),
    Row("indexer_weights", "attn.indexer.weights_proj.weight",
        "self_attn.compressor.indexer.scorer.weights_proj.weight", "bf16",
        ("index_heads", "hidden"), "indexed",
        hf_also="self_attn.compressor.indexer.weights_proj.weight"),  # transformers 5.8, 5.9
    Row("compressor", "attn.indexer.compressor.wkv.weight",
        "self_attn.compressor.indexer.kv_proj.weight", "bf16",
        ("overlap*index_dim", "hidden"), "indexed"),
    Row("compressor", "attn.indexer.compressor.wgate.weight",
        "self_attn.compressor.indexer.gate_proj.weight", "bf16",
        ("overlap*index_dim", "hidden"), "indexed"),
    Row("position_bias", "attn.indexer.compressor.ape",
        "self_attn.compressor.indexer.position_bias", "fp32",
        ("ratio", "overlap*index_dim"), "indexed"),
    Row("norm", "attn.indexer.compressor.norm.weight",
        "self_attn.compressor.indexer.kv_norm.weight", "bf16", ("index_dim",), "indexed"),
    # Mixture of experts. w1 is the gate, w3 the up and w2 the down projection.
    Row("gate", "ffn.gate.weight", "mlp.gate.weight", "bf16", ("experts", "hidden")),
    Row("gate_bias", "ffn.gate.bias", "mlp.gate.e_score_correction_bias", "fp32", ("experts",),
        "scored"),
    Row("hash_table", "ffn.gate.tid2eid", "mlp.gate.tid2eid", "int64", ("vocab", "top_k"),
        "hashed"),
    Row("shared_expert", "ffn.shared_experts.w1.weight", "mlp.shared_experts.gate_proj.weight",
        "fp8_block", ("inner", "hidden")),
    Row("shared_expert", "ffn.shared_experts.w2.weight", "mlp.shared_experts.down_proj.weight",
        "fp8_block", ("hidden", "inner")),
    Row("shared_expert", "ffn.shared_experts.w3.weight", "mlp.shared_experts.up_proj.weight",
        "fp8_block", ("inner", "hidden")),
    # transformers 5.9 to 5.14 write w1, w2, w3 when they save an unquantized model.
    Row("routed_expert", "ffn.experts.#.w1.weight", "mlp.experts.#.gate_proj.weight", "mxfp4",
        ("inner", "hidden"), hf_also="mlp.experts.#.w1.weight"),
    Row("routed_expert", "ffn.experts.#.w2.weight", "mlp.experts.#.down_proj.weight", "mxfp4",
        ("hidden", "inner"), hf_also="mlp.experts.#.w2.weight"),
    Row("routed_expert", "ffn.experts.#.w3.weight", "mlp.experts.#.up_proj.weight", "mxfp4",
        ("inner", "hidden"), hf_also="mlp.experts.#.w3.weight"),
)  # fmt: skip


def _mtp(role: Role, name: str, format: Format, *shape: str, when: When = "always") -> Row:
    # transformers does not know MTP blocks: every tool copies their official names.
    return Row(role, name, name, format, shape, when)


#: What an MTP block has besides the rows of a block.
MTP = (
    _mtp("norm", "enorm.weight", "bf16", "hidden"),
    _mtp("norm", "hnorm.weight", "bf16", "hidden"),
    _mtp("mtp_proj", "e_proj.weight", "fp8_block", "hidden", "hidden"),
    _mtp("mtp_proj", "h_proj.weight", "fp8_block", "hidden", "hidden"),
    _mtp("norm", "norm.weight", "bf16", "hidden"),
    _mtp("hyper_connection", "hc_head_fn", "fp32", "streams", "streams*hidden"),
    _mtp("hyper_connection", "hc_head_base", "fp32", "streams"),
    _mtp("hyper_connection", "hc_head_scale", "fp32", "1"),
)

#: The same for the block-draft variant, whose blocks are stages of one drafter.
DSPARK = (
    _mtp("mtp_proj", "main_proj.weight", "fp8_block", "hidden", "targets*hidden", when="first"),
    _mtp("norm", "main_norm.weight", "bf16", "hidden", when="first"),
    _mtp("norm", "norm.weight", "bf16", "hidden", when="last"),
    _mtp("hyper_connection", "hc_head_fn", "fp32", "streams", "streams*hidden", when="last"),
    _mtp("hyper_connection", "hc_head_base", "fp32", "streams", when="last"),
    _mtp("hyper_connection", "hc_head_scale", "fp32", "1", when="last"),
    _mtp("draft_head", "markov_head.markov_w1.weight", "bf16", "vocab", "markov", when="last"),
    _mtp("draft_head", "markov_head.markov_w2.weight", "bf16", "vocab", "markov", when="last"),
    _mtp("draft_head", "confidence_head.proj.weight", "bf16", "1", "hidden+markov", when="last"),
)

#: Modules that hold other modules, official and HF, relative to their block ("" is the block).
#: ``attn.indexer.compressor`` has no counterpart: HF keeps its tensors in the indexer itself.
CONTAINERS = (
    ("", ""),
    ("attn", "self_attn"),
    ("attn.compressor", "self_attn.compressor"),
    ("attn.indexer", "self_attn.compressor.indexer"),
    ("ffn", "mlp"),
    ("ffn.shared_experts", "mlp.shared_experts"),
    ("ffn.experts", "mlp.experts"),
    ("ffn.experts.#", "mlp.experts.#"),
)
