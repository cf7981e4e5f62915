"""Entries of ignore lists: the same modules before and after, counted one by one."""

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import (
    SCHEMES,
    ModelConfig,
    Schema,
    spell_out,
    translate_entries,
    translate_entry,
)
from nvfp4_codec.schemas.deepseek_v4.entries import _modules_of, _spelled_out

DATA = Path(__file__).with_name("data")
TINY = Schema(ModelConfig.from_file(DATA / "tiny.config.json"))


def matrices(schema: Schema, scheme: str) -> dict[str, str]:
    """Module name in the scheme -> official name, of everything a quantizer could touch."""
    return {
        entry.module(scheme): entry.module()
        for entry in schema.entries()
        if len(entry.shape) == 2 and entry.name().endswith(".weight")
    }


def meant(entry: str, schema: Schema, scheme: str) -> set[str]:
    modules = matrices(schema, scheme)
    return {official for name, official in modules.items() if fnmatchcase(name, entry)}


GLOBS = {
    "hf": [
        "*",
        "model.*",
        "model.layers.*.self_attn*",
        "model.layers.0.self_attn*",
        "model.layers.2.self_attn.compressor*",
        "model.layers.[12].self_attn.compressor.*",
        "*compressor*",
        "*indexer*",
        "*gate_proj*",
        "*kv_proj",
        "*q_b_proj*",
        "*mlp.gate",
        "*.mlp.experts.*",
        "model.layers.3.mlp.experts.1.*",
        "model.layers.*.mlp.experts.0.up_proj",
        "*mlp.shared_experts*",
        "*weights_proj",
        "model.layers.?.self_attn.q_?_proj",
        "*self_attn.o_a_proj",
        "*embed*",
        "lm_*",
        "mtp.*",
        "mtp.0.attn*",
        "*1*",
    ],
    "half_converted": [
        "*",
        "model.*",
        "model.layers.*.attn*",
        "model.layers.3.attn*",
        "model.layers.0.ffn.shared_experts*",
        "*.attn.*",
        "*compressor*",
        "*attn.wkv",
        "*.ffn.experts.*",
        "model.layers.[!0]*wo_a",
        "mtp.*",
    ],
}


@pytest.mark.parametrize(
    ("scheme", "glob"), [(scheme, glob) for scheme, globs in GLOBS.items() for glob in globs]
)
def test_a_glob_means_the_same_matrices_afterwards(scheme, glob):
    before = meant(glob, TINY, scheme)
    assert before
    translated = translate_entry(glob, TINY, scheme)
    after = set().union(*(meant(entry, TINY, "official") for entry in translated))
    assert after == before


@pytest.mark.parametrize(
    ("entry", "scheme", "expected"),
    [
        ("model.layers.*.self_attn*", "hf", ("layers.*.attn*",)),
        ("model.layers.0.mlp.shared_experts*", "hf", ("layers.0.ffn.shared_experts*",)),
        ("model.layers.0.attn*", "half_converted", ("layers.0.attn*",)),
        ("model.embed_tokens", "hf", ("embed",)),
        ("model.layers.3.mlp.experts", "hf", ("layers.3.ffn.experts",)),
        ("*.attn.*", "official", ("*.attn.*",)),
        (
            "model.layers.2.self_attn.compressor*",
            "hf",
            tuple(
                f"layers.2.attn.{name}"
                for name in (
                    "compressor.wkv",
                    "compressor.wgate",
                    "indexer.wq_b",
                    "indexer.weights_proj",
                    "indexer.compressor.wkv",
                    "indexer.compressor.wgate",
                )
            ),
        ),
        ("*input_layernorm*", "hf", ("layers.*.attn_norm",)),
    ],
)
def test_translated_entries_stay_readable(entry, scheme, expected):
    assert translate_entry(entry, TINY, scheme) == expected


def test_hf_gate_proj_is_spelled_out():
    """One HF word for several official ones: the experts' w1 and the compressors' wgate."""
    assert set(translate_entry("*gate_proj*", TINY, "hf")) == {
        "layers.*.attn.compressor.wgate",
        "layers.*.attn.indexer.compressor.wgate",
        "layers.*.ffn.shared_experts.w1",
        "layers.*.ffn.experts.*.w1",
    }


def test_a_spelled_out_glob_does_not_reach_into_other_modules():
    """``*`` crosses dots: with compressed MTP blocks, mtp.*.norm would cover compressor norms."""
    raw = json.loads((DATA / "tiny.config.json").read_text())
    ratios = [0, 128, 4, 4, 4, 4]
    config = {**raw, "compress_ratios": ratios, "num_nextn_predict_layers": 2}
    modules = _modules_of(Schema(ModelConfig.from_dict(config)), "official")
    assert "mtp.1.attn.compressor.norm" in {module.official for module in modules}
    wanted = {"mtp.0.norm", "mtp.1.norm", "mtp.0.enorm", "mtp.1.enorm"}
    spelled = tuple(_spelled_out(wanted, modules))
    assert set(spelled) == {"mtp.*.enorm", "mtp.0.norm", "mtp.1.norm"}


@pytest.mark.parametrize("entry", ["model.layers.4.mlp.gate", "*q_proj*", "model.layers.0.mlp.up"])
def test_entries_that_mean_nothing_are_refused(entry):
    with pytest.raises(CheckpointError, match="of this model"):
        translate_entry(entry, TINY, "hf")


@pytest.mark.parametrize("source", sorted(path.name for path in DATA.glob("tiny.h*.txt")))
def test_ignore_lists_of_real_exports(source):
    line = (DATA / source).read_text().splitlines()[1]
    entries = json.loads(line.removeprefix("# ignore: "))
    scheme = "hf" if source.startswith("tiny.hf") else "half_converted"
    translated = translate_entries(entries, TINY)
    before = set().union(*(meant(e, TINY, scheme) for e in entries if e != "lm_head")) | {"head"}
    after = set().union(*(meant(e, TINY, "official") for e in translated))
    assert after == before
    assert {"head", "embed", "layers.0.ffn.gate"} <= set(translated)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_module_name_translates_alone(scheme):
    for name, official in matrices(TINY, scheme).items():
        assert translate_entry(name, TINY, scheme) == (official,)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("*.wo_a", {"layers.*.attn.wo_a", "mtp.*.attn.wo_a"}),
        ("layers.1.ffn.experts.*.w1", {"layers.1.ffn.experts.*.w1"}),
        ("layers.[012].attn.wo_a", {f"layers.{i}.attn.wo_a" for i in range(3)}),
        ("embed", {"embed"}),
    ],
)
def test_modules_are_spelled_out_exactly(wanted, expected):
    chosen = meant(wanted, TINY, "official")
    entries = spell_out(chosen, TINY)
    assert set(entries) == expected
    assert set().union(*(meant(entry, TINY, "official") for entry in entries)) == chosen
