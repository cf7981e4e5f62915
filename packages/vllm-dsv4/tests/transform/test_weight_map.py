"""Names: the place of every stored tensor, and the modules behind vLLM's."""

from __future__ import annotations

import json

import pytest

from nvfp4_codec.schemas.deepseek_v4 import ModelConfig, Schema, from_official
from vllm_dsv4.stored import read_stored
from vllm_dsv4.weight_map import WeightMap, official_modules

SCHEMES = ("official", "hf", "half_converted")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_tensor_has_its_place(checkpoint, checkpoints, scheme):
    official = checkpoints.read(checkpoint("all-nvfp4"))
    stored = read_stored(checkpoint("all-nvfp4", scheme))
    names = WeightMap(stored.schema, scheme)
    placed = {name: names.place(from_official(name, scheme)) for name in official}
    assert {name: p.name if p else None for name, p in placed.items()} == {n: n for n in official}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "name",
    [
        "layers.0.attn.nothing.weight",       # no such tensor in any model
        "layers.0.attn.compressor.wkv.weight",  # not in an uncompressed layer
        "layers.9.attn.wq_a.weight",          # not in a model of four layers
        "layers.1.ffn.experts.16.w1.weight",  # not among 16 experts
        "layers.1.attn.wq_a",                 # a module, no tensor
        "mtp.1.enorm.weight",
    ],
)  # fmt: skip
def test_what_the_model_does_not_have_is_nowhere(checkpoint, scheme, name):
    stored = read_stored(checkpoint("full", scheme))
    names = WeightMap(stored.schema, scheme)
    written = name if "nothing" in name else from_official(name, scheme)
    assert names.place(written) is None


def test_a_place_says_what_the_tensor_is(checkpoint):
    stored = read_stored(checkpoint("full", "hf"))
    names = WeightMap(stored.schema, "hf")
    expert = names.place("model.layers.2.mlp.experts.7.up_proj.weight_scale_2")
    assert expert.name == "layers.2.ffn.experts.7.w3.weight_scale_2"
    assert (expert.module, expert.part) == ("layers.2.ffn.experts.7.w3", "weight_scale_2")
    assert expert.formatted == "layers.2.ffn.experts"
    assert expert.kind.is_expert
    assert not expert.kind.is_shared
    shared = names.place("model.layers.2.mlp.shared_experts.down_proj.weight")
    assert shared.kind.is_shared
    assert not shared.kind.is_expert
    scale = names.place("mtp.0.e_proj.weight_scale_inv")
    assert (scale.name, scale.part) == ("mtp.0.e_proj.scale", "scale")
    assert not names.place("model.layers.0.self_attn.sinks").kind.is_linear
    cache = names.place("model.layers.0.self_attn.k_proj.k_scale")
    assert cache.kind.is_unused
    assert expert.kind.is_linear
    assert (expert.leaf, expert.kind.path) == ("w3", "layers.*.ffn.experts")
    assert (shared.formatted, shared.leaf) == ("layers.2.ffn.shared_experts.w2", "w2")
    assert shared.kind.path == "layers.*.ffn.shared_experts.w2"


def test_mtp_and_dspark_blocks_have_tensors_of_their_own(checkpoints):
    config = json.loads((checkpoints.TINY / "config.json").read_text())
    drafting = config | {"dspark_target_layer_ids": [1, 2], "dspark_markov_rank": 8}
    plain, dspark = (
        WeightMap(Schema(ModelConfig.from_dict(one)), "official") for one in (config, drafting)
    )
    for name, in_plain, in_dspark in (
        ("mtp.0.main_proj.weight", False, True),
        ("mtp.0.e_proj.weight", True, False),
        ("mtp.0.attn.wq_a.weight", True, True),
    ):
        assert (plain.place(name) is not None) == in_plain
        assert (dspark.place(name) is not None) == in_dspark


def test_layers_of_two_digits():
    assert official_modules("model.layers.42.attn.wq_b", 43) == ("layers.42.attn.wq_b",)
    assert official_modules("model.layers.43.attn.wq_b", 43) == ("mtp.0.attn.wq_b",)
    assert official_modules("visual.layers.3.attn.wq_b", 43) == ()


@pytest.mark.parametrize(
    ("prefix", "modules"),
    [
        ("model.layers.3.attn.fused_wqa_wkv", ("layers.3.attn.wq_a", "layers.3.attn.wkv")),
        ("layers.3.attn.fused_wqa_wkv", ("layers.3.attn.wq_a", "layers.3.attn.wkv")),
        ("model.layers.3.attn.wq_b", ("layers.3.attn.wq_b",)),
        ("model.layers.3.attn.indexer.wq_b", ("layers.3.attn.indexer.wq_b",)),
        ("model.layers.3.attn.compressor.fused_wkv_wgate",
         ("layers.3.attn.compressor.wkv", "layers.3.attn.compressor.wgate")),
        ("model.layers.3.attn.indexer.compressor.fused_wkv_wgate",
         ("layers.3.attn.indexer.compressor.wkv", "layers.3.attn.indexer.compressor.wgate")),
        ("model.layers.3.ffn.shared_experts.gate_up_proj",
         ("layers.3.ffn.shared_experts.w1", "layers.3.ffn.shared_experts.w3")),
        ("model.layers.3.ffn.shared_experts.down_proj", ("layers.3.ffn.shared_experts.w2",)),
        ("model.layers.3.ffn.experts", ("layers.3.ffn.experts",)),
        ("model.layers.3.ffn.experts.routed_experts", ("layers.3.ffn.experts",)),
        ("model.layers.4.mtp_block.attn.wo_a", ("mtp.0.attn.wo_a",)),
        ("model.layers.4.attn.wo_b", ("mtp.0.attn.wo_b",)),
        ("model.layers.5.e_proj", ("mtp.1.e_proj",)),
        ("model.layers.0.ffn.gate", ("layers.0.ffn.gate",)),
        ("lm_head", ("head",)),
        ("model.layers.4.shared_head.head", ("head",)),
        ("model.embed_tokens", ()),
    ],
)  # fmt: skip
def test_modules_behind_vllms(prefix, modules):
    assert official_modules(prefix, num_layers=4) == modules


def test_every_linear_is_behind_exactly_one_vllm_module(checkpoint):
    formats = read_stored(checkpoint("all-nvfp4")).formats
    built = ["lm_head"]
    for i in range(5):
        block = f"model.layers.{i}" + (".mtp_block" if i == 4 else "")
        built += [f"{block}.attn.{n}" for n in ("fused_wqa_wkv", "wq_b", "wo_a", "wo_b")]
        built += [f"{block}.ffn.{n}" for n in ("gate", "experts", "shared_experts.gate_up_proj",
                                               "shared_experts.down_proj")]  # fmt: skip
    built += [f"model.layers.{i}.attn.compressor.fused_wkv_wgate" for i in (1, 2, 3)]
    indexer = ("wq_b", "weights_proj", "compressor.fused_wkv_wgate")
    built += [f"model.layers.2.attn.indexer.{n}" for n in indexer]
    built += [f"model.layers.4.{n}" for n in ("e_proj", "h_proj")]
    behind = [module for prefix in built for module in official_modules(prefix, 4)]
    assert sorted(behind) == sorted(formats)
