"""Translation: a bijection on every model, and equal to what real exports and transformers say."""

import json
import re
from pathlib import Path

import pytest

from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import (
    SCHEMES,
    ModelConfig,
    Schema,
    detect_scheme,
    from_official,
    fused_with,
    to_official,
)

DATA = Path(__file__).with_name("data")
EXPORTS = {
    "hf-5.9": "hf",
    "hf-5.14": "hf",
    "hf-5.14-experts": "hf",
    "half-5.20": "half_converted",
    "half-5.24-experts": "half_converted",
}


def load(model: str, **changes: object) -> Schema:
    config = json.loads((DATA / f"{model}.config.json").read_text())
    return Schema(ModelConfig.from_dict({**config, **changes}))


def export(name: str) -> list[str]:
    lines = (DATA / f"tiny.{name}.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("layout", ["official", "plain", "nvfp4"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("model", ["tiny", "flash-0731"])
def test_translation_is_a_bijection(model, scheme, layout):
    schema = load(model, n_routed_experts=3)
    official = [spec.name for spec in schema.tensors(layout)]
    theirs = [spec.name for spec in schema.tensors(layout, scheme)]
    assert len(set(official)) == len(set(theirs)) == len(official)
    assert [to_official(name, scheme) for name in theirs] == official
    assert [from_official(name, scheme) for name in official] == theirs


@pytest.mark.parametrize(("source", "scheme"), EXPORTS.items())
def test_real_exports_match_completely(source, scheme):
    names = export(source)
    report = load("tiny").match(names)
    assert report.scheme == scheme
    assert report.ok, report.summary()
    assert set(report.matched) == set(names)
    # What came through transformers and modelopt is exactly what the table says.
    modules = {name.removesuffix(".weight") for name in report.matched.values()}
    assert {e.module() for e in load("tiny").entries()} <= modules


@pytest.mark.parametrize(
    ("half", "hf"),
    [("half-5.20", "hf-5.14"), ("half-5.24-experts", "hf-5.14-experts")],
)
def test_both_kinds_of_export_hold_the_same_official_tensors(half, hf):
    assert {to_official(name, "half_converted") for name in export(half)} == {
        to_official(name, "hf") for name in export(hf)
    }


def test_the_half_conversion_writes_attn_norm_for_kv_norm():
    assert "model.layers.0.attn.norm.weight" in export("half-5.20")
    assert "mtp.0.attn.norm.weight" in export("half-5.20")
    for block, expected in (("model.layers.0", "layers.0"), ("mtp.0", "mtp.0")):
        translated = to_official(f"{block}.attn.norm.weight", "half_converted")
        assert translated == f"{expected}.attn.kv_norm.weight"
    with pytest.raises(CheckpointError, match="half_converted"):
        to_official("model.layers.0.attn.norm.weight", "hf")


@pytest.mark.parametrize(
    ("name", "scheme", "official"),
    [
        # transformers 5.8 and 5.9 have no scorer around the projection
        ("model.layers.2.self_attn.compressor.indexer.weights_proj.weight", "hf",
         "layers.2.attn.indexer.weights_proj.weight"),
        # a half-converted export says head.weight in its files and lm_head in its ignore list
        ("lm_head", "half_converted", "head"),
        ("head.weight", "hf", "head.weight"),
        ("model.layers.0.mlp.experts.1.w3.weight", "hf", "layers.0.ffn.experts.1.w3.weight"),
        ("model.layers.0.attn.kv_norm.weight", "half_converted", "layers.0.attn.kv_norm.weight"),
        ("model.layers.0.self_attn.kv_proj.weight_scale_inv", "hf",
         "layers.0.attn.wkv.weight_scale_inv"),
        ("model.layers.7.mlp.experts", "hf", "layers.7.ffn.experts"),
        ("model.layers.7.self_attn.compressor.indexer", "hf", "layers.7.attn.indexer"),
        ("model.layers.7", "half_converted", "layers.7"),
        ("mtp.0.ffn.experts.3", "hf", "mtp.0.ffn.experts.3"),
        # the tensor whose own name ends like a companion
        ("model.layers.7.attn_hc.scale", "hf", "layers.7.hc_attn_scale"),
    ],
)  # fmt: skip
def test_second_spellings_modules_and_companions(name, scheme, official):
    assert to_official(name, scheme) == official


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.07.self_attn.q_a_proj.weight",
        "model.layers.٣.self_attn.q_a_proj.weight",
        "model.layers.x.self_attn.q_a_proj.weight",
        "model.layers.3.self_attn.q_a_proj.weight.scale",
        "model.layers.3.self_attn.q_a_proj.bias",
        "model.layers.3.input_layernorm.weight_scale",
        "model.layers.3.mlp.experts.gate_proj.weight",
        "layers.3.self_attn.q_a_proj.weight",
        "model.layers.3.self_attn.q_a_proj.weight ",
        "",
    ],
)
def test_near_misses_are_refused(name):
    with pytest.raises(CheckpointError, match="not a DeepSeek-V4 name"):
        to_official(name, "hf")


def test_detection_names_both_witnesses_of_a_mixture():
    mixed = ["lm_head.weight", "model.layers.0.attn.wq_a.weight"]
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn.*attn\.wq_a"):
        detect_scheme(["model.layers.0.self_attn.sinks", *mixed])
    with pytest.raises(CheckpointError, match="no name is one of"):
        detect_scheme(["transformer.h.0.attn.c_attn.weight"])


@pytest.mark.parametrize(
    ("names", "scheme"),
    [
        (["layers.0.attn.wq_a.weight"], "official"),
        (["mtp.0.e_proj.weight"], "official"),
        (["mtp.0.attn.norm.weight"], "half_converted"),
        (["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"], "official"),
        (["lm_head", "model.layers.17.ffn.shared_experts*"], "half_converted"),
        (["model.layers.*.self_attn*"], "hf"),
        (["garbage", "model.layers.0.mlp.gate"], "hf"),
    ],
)
def test_detection(names, scheme):
    assert detect_scheme(names) == scheme


def test_missing_unknown_and_duplicate_tensors_are_named():
    schema = load("tiny")
    names = export("hf-5.14")
    without = "model.layers.1.mlp.experts.0.up_proj.weight_scale"
    report = schema.match(
        [
            *(name for name in names if name != without),
            "model.layers.4.self_attn.sinks",  # there are four layers
            "model.layers.0.self_attn.compressor.position_bias",  # layer 0 has ratio 0
            "model.layers.0.mlp.gate.e_score_correction_bias",  # and routes by token id
            "model.layers.0.mlp.experts.2.up_proj.weight",  # there are two experts
            "model.layers.0.self_attn.rotary.inv_freq",
            "model.layers.0.self_attn.q_a_proj",  # a module is no tensor
            "model.layers.2.self_attn.compressor.indexer.weights_proj.weight",
        ]
    )
    assert report.missing == (without,)
    assert report.unknown == (
        "model.layers.0.mlp.experts.2.up_proj.weight",
        "model.layers.0.mlp.gate.e_score_correction_bias",
        "model.layers.0.self_attn.compressor.position_bias",
        "model.layers.0.self_attn.q_a_proj",
        "model.layers.0.self_attn.rotary.inv_freq",
        "model.layers.4.self_attn.sinks",
    )
    assert report.duplicate == ("model.layers.2.self_attn.compressor.indexer.weights_proj.weight",)
    assert not report.ok
    assert report.summary()["missing"] == {"model.layers.#.mlp.experts.#.up_proj.weight_scale": 1}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("layout", ["official", "plain", "nvfp4"])
def test_a_missing_tensor_of_any_kind_is_reported(layout, scheme):
    """Also without saying the layout: a tensor's siblings in other blocks tell that it is lacking.

    Where a kind of matrix occurs once, its companions are their own only witness.
    """
    schema = load("tiny", num_hidden_layers=3, compress_ratios=[4, 128, 4], n_routed_experts=2,
                  num_nextn_predict_layers=2)  # fmt: skip
    names = [spec.name for spec in schema.tensors(layout, scheme)]
    assert schema.match(names, scheme, layout).ok
    assert schema.match(names, scheme).ok
    one_of_each = {re.sub(r"\d+", "#", name): name for name in names}
    for name in one_of_each.values():
        rest = [other for other in names if other != name]
        if scheme == "official" and not name.endswith("input_scale"):
            assert schema.match(rest, scheme, layout).missing == (name,)
        lone = name.startswith(("lm_head", "head", "mtp.")) or "weights" in name
        if not lone:
            assert schema.match(rest, scheme).missing == (name,)


def test_layers_of_one_kind_stored_differently_need_a_layout_function():
    schema = load("tiny")

    def layout(entry):
        return "nvfp4" if entry.role == "wq_a" and entry.indices == ("1",) else "plain"

    names = [spec.name for spec in schema.tensors(layout)]
    assert schema.match(names, layout=layout).ok
    assert schema.match(names).missing  # one kind, two layouts: not assumed to be meant


def test_model_without_mtp():
    config = ModelConfig.from_file(DATA / "tiny.config.json")
    names = [name for name in export("half-5.20") if not name.startswith("mtp.")]
    assert Schema(config.without_mtp()).match(names).ok
    missing = Schema(config).match(names).missing
    assert missing
    assert all(name.startswith("mtp.0.") for name in missing)


def test_pro_translates_completely():
    schema = load("pro", n_routed_experts=12)  # every layer; the other experts differ by a number
    names = [spec.name for spec in schema.tensors("nvfp4", "hf")]
    report = schema.match(names)
    assert report.ok
    assert list(report.matched.values()) == [spec.name for spec in schema.tensors("nvfp4")]


@pytest.mark.parametrize("model", ["pro", "flash-0731"])
def test_fused_modules_are_linears_of_one_input_and_say_so_of_each_other(model):
    linears = {
        e.module(): e for e in load(model, n_routed_experts=2).entries() if e.template.row.linear
    }
    groups = {fused_with(module) for module in linears}
    fused = [group for group in groups if len(group) > 1]
    kinds = {tuple(name.rsplit(".", 1)[1] for name in group) for group in fused}
    assert kinds == {("wq_a", "wkv"), ("wkv", "wgate"), ("w1", "w3")}
    for group in fused:
        assert {linears[name].shape[1] for name in group} == {linears[group[0]].shape[1]}
        assert len({linears[name].block for name in group}) == 1
        assert {fused_with(name) for name in group} == {group}
    alone = {name.rsplit(".", 1)[-1] for group in groups if len(group) == 1 for name in group}
    assert alone >= {"wq_b", "wo_a", "wo_b", "w2", "weights_proj", "gate", "head"}
    # vLLM 0.33 fuses as many for each block: attention, compressors, shared and routed experts
    blocks = load(model, n_routed_experts=2).config.blocks
    compressors = sum((b.ratio > 0) + (b.ratio == 4) for b in blocks)
    assert len(fused) == len(blocks) * (1 + 1 + 2) + compressors
