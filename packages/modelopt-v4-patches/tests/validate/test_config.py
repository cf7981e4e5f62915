"""config.json that lacks something, contradicts the tensors, or tells loaders a wrong format."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nvfp4_codec.errors import CheckpointError


def without(key: str) -> Any:
    return lambda c: c.config.pop(key)


def having(key: str, value: Any) -> Any:
    return lambda c: c.config.update({key: value})


def quantization(key: str, value: Any = None) -> Any:
    def change(content: Any) -> None:
        if value is None:
            del content.quantization[key]
        else:
            content.quantization[key] = value

    return change


def unlisted(content: Any) -> None:
    del content.quantization["quantized_layers"]["layers.1.attn.wq_b"]


def listed_as_fp8(content: Any) -> None:
    content.quantization["quantized_layers"]["layers.1.attn.wq_b"] = {"quant_algo": "FP8_PB_WO"}


def as_pure_nvfp4(content: Any) -> None:
    """What modelopt writes: NVFP4 throughout, but o_a_proj forgotten in ignore."""
    content.quantization["quant_algo"] = "NVFP4"
    del content.quantization["quantized_layers"]
    content.quantization["ignore"] = ["mtp.0.?_proj"]
    for name in [name for name in content.tensors if name.startswith("mtp.")]:
        del content.tensors[name]
    content.config["num_nextn_predict_layers"] = 0


def older_file(content: Any) -> None:
    block = content.quantization
    inner = {
        "quant_algo": "NVFP4",
        "exclude_modules": list(reversed(block["ignore"])),
        "quantized_layers": block["quantized_layers"],
    }
    content.files["hf_quant_config.json"] = json.dumps({"quantization": inner})


def older_with(**keys: Any) -> Any:
    """A hf_quant_config.json that says the same, but for these keys."""

    def change(content: Any) -> None:
        block = content.quantization
        inner = {
            "quant_algo": block["quant_algo"],
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": block["ignore"],
            "quantized_layers": block["quantized_layers"],
        }
        document = {"quantization": {**inner, **keys}}
        content.files["hf_quant_config.json"] = json.dumps(document)

    return change


def with_cache(scheme: Any, change: Any) -> Any:
    def both(content: Any) -> None:
        content.quantization["kv_cache_scheme"] = scheme
        change(content)

    return both


FP8_CACHE = {"dynamic": False, "num_bits": 8, "type": "float"}
NVFP4_CACHE = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}


def hf_ignore(content: Any) -> None:
    content.quantization["ignore"] = ["model.layers.0.self_attn.o_a_proj", "lm_head", "*.ffn.gate"]


def in_both(content: Any) -> None:
    content.quantization["ignore"] = [*content.quantization["ignore"], "layers.1.attn.wq_b"]


def in_both_by_a_glob(content: Any) -> None:
    content.quantization["ignore"] = [*content.quantization["ignore"], "layers.1.attn.wq_?"]


def layer_groups_of_32(content: Any) -> None:
    for name in ("layers.1.attn.wq_b", "layers.2.attn.wq_b"):
        content.quantization["quantized_layers"][name]["group_size"] = 32


def groups_of(size: int) -> Any:
    values = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": size}
    return quantization("config_groups", {
        "group_0": {"weights": values, "targets": ["Linear"]},
        "group_1": {"quant_algo": "FP8_PB_WO", "targets": ["Linear"]},
    })  # fmt: skip


def weight_only_with_a_scale(content: Any) -> None:
    content.quantization["quantized_layers"]["layers.1.attn.wq_b"]["quant_algo"] = "W4A16_NVFP4"


CASES = {
    "compress_ratios": (without("compress_ratios"), "config-missing-key", "compress_ratios"),
    "num_hash_layers": (without("num_hash_layers"), "config-missing-key", "num_hash_layers"),
    "topk_method": (without("topk_method"), "config-missing-key", "topk_method"),
    "architectures": (having("architectures", None), "config-missing-key", "architectures"),
    "scale_fmt": (quantization("scale_fmt"), "config-missing-key", "quantization_config.scale_fmt"),
    "another topk_method": (having("topk_method", "greedy"), "config-disagrees", "topk_method"),
    "another ratio": (having("compress_ratios", [0, 128, 4, 4, 0]), "config-disagrees",
                      "compress_ratios"),
    "a ratio too many": (having("compress_ratios", [0, 128, 4, 128, 4]), "missing-tensor", None),
    "another hash count": (having("num_hash_layers", 3), "config-disagrees", "num_hash_layers"),
    "no hash layer": (having("num_hash_layers", 0), "config-disagrees", "num_hash_layers"),
    "undeclared MTP": (having("num_nextn_predict_layers", 0), "config-disagrees",
                       "num_nextn_predict_layers"),
    "another quant_method": (quantization("quant_method", "awq"), "config-disagrees", None),
    "another quant_algo": (quantization("quant_algo", "FP4"), "config-disagrees", None),
    "an unlisted module": (unlisted, "config-disagrees", "layers.1.attn.wq_b.weight"),
    "a wrong algorithm": (listed_as_fp8, "config-disagrees", "layers.1.attn.wq_b.weight"),
    "o_a_proj not in ignore": (as_pure_nvfp4, "config-disagrees", "layers.0.attn.wo_a.weight"),
    "the older file": (older_file, "config-disagrees", "quantization.quant_algo"),
    "the older file's group_size": (older_with(group_size=32), "config-disagrees",
                                    "quantization.group_size"),
    "the older file's FP8 cache": (older_with(kv_cache_quant_algo="FP8"), "config-disagrees",
                                   "quantization.kv_cache_quant_algo"),
    "the older file's BF16 cache": (with_cache(FP8_CACHE, older_with()), "config-disagrees",
                                    "quantization.kv_cache_quant_algo"),
    "the older file's FP8 for an NVFP4 cache": (
        with_cache(NVFP4_CACHE, older_with(kv_cache_quant_algo="FP8")), "config-disagrees",
        "quantization.kv_cache_quant_algo"),
    "two caches in one config": (
        with_cache(FP8_CACHE, quantization("kv_cache_quant_algo", "NVFP4")),
        "config-contradicts-itself", "quantization_config.kv_cache_quant_algo"),
    "an algorithm without its scheme": (
        quantization("kv_cache_quant_algo", "FP8"), "config-contradicts-itself",
        "quantization_config.kv_cache_quant_algo"),
    "the block's group_size": (quantization("group_size", 32), "config-disagrees",
                               "quantization_config.group_size"),
    "in both lists": (in_both, "config-contradicts-itself", "quantization_config.ignore"),
    "in both lists by a glob": (in_both_by_a_glob, "config-contradicts-itself",
                                "quantization_config.ignore"),
    "a layer's group_size": (
        layer_groups_of_32, "config-disagrees",
        "quantization_config.quantized_layers.layers.1.attn.wq_b.group_size"),
    "a group's group_size": (groups_of(32), "config-disagrees",
                             "quantization_config.config_groups.group_0.weights.group_size"),
    "W4A16 with input_scale": (weight_only_with_a_scale, "unexpected-input-scale",
                               "layers.1.attn.wq_b.input_scale"),
    "names of another scheme": (hf_ignore, "config-other-names", "quantization_config.ignore"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_fault_is_named(check, case: str):
    change, code, key = CASES[case]
    findings = check(change).findings
    assert {finding.code for finding in findings} >= {code}, findings
    if key is not None:
        (finding,) = findings
        assert finding.tensor == key
        assert finding.fix


@pytest.mark.parametrize(
    ("change", "found", "expected"),
    [
        (having("compress_ratios", [0, 128, 4, 4, 0]), "4 for layers.3", "128, the rows of"),
        (having("num_hash_layers", 3), "3", "1, the layers that store ffn.gate.tid2eid"),
        (unlisted, "stored as NVFP4", "not quantized, as quantization_config"),
        (as_pure_nvfp4, "stored as FP8, as are 4 of its kind", "NVFP4, as quantization_config"),
        (in_both, "selects 1 entries of quantized_layers", "each module in one"),
        (groups_of(32), "32", "16, which NVFP4 has"),
        (weight_only_with_a_scale, "stored for 1 of its kind", "weights only"),
        (hf_ignore, "2 entries such as 'model.layers.0.self_attn.o_a_proj'", "(official)"),
    ],
)
def test_the_message_says_both_sides(check, change: Any, found: str, expected: str):
    (finding,) = check(change).findings
    assert found in finding.found
    assert expected in finding.expected


def test_experts_only_layout_that_loses_moe_quant_algo(check, only):
    made = check(quantization("moe_quant_algo"), "experts")
    assert {finding.code for finding in made.findings} == {"config-disagrees"}
    # six kinds: w1, w2, w3 of the main model and of the MTP block
    assert len(made.findings) == 6
    assert all(f.expected.startswith("its official format") for f in made.findings)


def test_experts_only_layout_without_a_list_follows_ignore(check):
    """NVIDIA's checkpoints leave the MTP block as it was: ignore says so."""

    def change(content: Any) -> None:
        del content.quantization["quantized_layers"]
        content.quantization["ignore"] += ["mtp.*"]

    findings = check(change, "experts").findings
    assert [finding.tensor for finding in findings] == [
        f"mtp.0.ffn.experts.0.{leaf}.weight" for leaf in ("w1", "w2", "w3")
    ]


def test_lost_mtp_blocks_are_one_finding(check, only):
    def change(content: Any) -> None:
        for name in [name for name in content.tensors if name.startswith("mtp.")]:
            del content.tensors[name]

    code, key, fix = only(check(change))
    assert (code, key) == ("missing-mtp", "num_nextn_predict_layers")
    assert "speculative decoding" in fix


def test_a_config_written_by_transformers(check):
    """It renames what loaders ask for; the tensors still tell the structure."""

    def change(content: Any) -> None:
        config = content.config
        kinds = {0: "sliding_attention", 4: "compressed_sparse_attention",
                 128: "heavily_compressed_attention"}  # fmt: skip
        config["layer_types"] = [kinds[ratio] for ratio in config.pop("compress_ratios")[:4]]
        del config["num_hash_layers"]
        config["mlp_layer_types"] = ["hash_moe", "moe", "moe", "moe"]

    found = {(f.code, f.tensor) for f in check(change).findings}
    assert found == {
        ("config-missing-key", "compress_ratios"),
        ("config-missing-key", "num_hash_layers"),
    }


def test_against_the_source_every_key_counts(check, tiny):
    def change(content: Any) -> None:
        content.config["swiglu_limit"] = 7.0
        del content.config["routed_scaling_factor"]

    found = {(f.code, f.tensor): f for f in check(change, against=tiny).findings}
    assert set(found) == {
        ("config-differs", "swiglu_limit"),
        ("config-missing-key", "routed_scaling_factor"),
    }
    assert found["config-differs", "swiglu_limit"].expected == "10.0, as in the source"


@pytest.mark.parametrize(
    ("scheme", "algorithm"),
    [(None, None), (FP8_CACHE, "FP8"), (NVFP4_CACHE, "NVFP4"), (NVFP4_CACHE, "NVFP4_AFFINE")],
)
def test_caches_that_agree_are_right(check, scheme: Any, algorithm: str | None):
    def change(content: Any) -> None:
        older_with(kv_cache_quant_algo=algorithm)(content)
        content.quantization["kv_cache_quant_algo"] = algorithm
        content.quantization["kv_cache_scheme"] = scheme

    assert check(change).findings == ()


def test_an_older_file_of_few_words_is_right(check):
    """Group size and cache are optional there; so is the cache in config.json."""

    def change(content: Any) -> None:
        older_with()(content)
        inner = json.loads(content.files["hf_quant_config.json"])["quantization"]
        del inner["group_size"], inner["kv_cache_quant_algo"]
        content.files["hf_quant_config.json"] = json.dumps({"quantization": inner})

    assert check(change).findings == ()


def test_groups_of_16_are_right(check):
    assert check(groups_of(16)).findings == ()


def test_entries_that_select_nothing_are_a_note(check):
    made = check(quantization("ignore", ["*.ffn.gate", "layers.9.*"]))
    assert made.findings == ()
    assert "'layers.9.*' in ignore select(s) no module of this model" in made.notes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (having("model_type", "llama"), "model_type is 'llama'"),
        (without("hidden_size"), "hidden_size is None"),
        (having("num_hash_layers", "three"), "a value is of the wrong type"),
        (quantization("quant_method", "compressed-tensors"), "nvfp4 convert --to nvfp4"),
        (having("quantization_config", "nvfp4"), "quantization_config is no object"),
        (quantization("ignore", "head"), "ignore is malformed; expected a list of names"),
        (quantization("quantized_layers", {"head": "NVFP4"}), "quantized_layers is malformed"),
    ],
)
def test_what_cannot_be_understood_is_refused(check, change: Any, message: str):
    with pytest.raises(CheckpointError, match=message):
        check(change)
