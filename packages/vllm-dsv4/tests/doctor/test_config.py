"""config.json: each gap and contradiction, and whether the plugin or nobody fills it."""

from __future__ import annotations

from typing import Any

import pytest

from nvfp4_codec.errors import CheckpointError


def drop(key: str) -> Any:
    return lambda content: content.config.pop(key)


def put(key: str, value: object) -> Any:
    return lambda content: content.config.update({key: value})


def drop_inner(key: str) -> Any:
    return lambda content: content.quantization.pop(key)


def hf_types(content: Any) -> None:
    """What transformers writes instead of the two lists."""
    types = {0: "sliding_attention", 4: "compressed_sparse_attention",
             128: "heavily_compressed_attention"}  # fmt: skip
    ratios = content.config.pop("compress_ratios")
    content.config["layer_types"] = [types[ratio] for ratio in ratios[:4]]
    content.config["mlp_layer_types"] = ["hash_moe", "moe", "moe", "moe"]


def nest(content: Any) -> None:
    rope = content.config.pop("rope_scaling")
    content.config["rope_parameters"] = {"main": {"rope_theta": 10000.0}, "compress": rope}


CASES = {
    "compress_ratios renamed": (hf_types, "config-missing-key", "compress_ratios", "handled"),
    "compress_ratios gone": (drop("compress_ratios"), "config-lost-key", "compress_ratios",
                             "error"),
    "num_hash_layers gone": (drop("num_hash_layers"), "config-lost-key", "num_hash_layers",
                             "error"),
    "topk_method gone": (drop("topk_method"), "config-missing-key", "topk_method", "handled"),
    "another topk_method": (put("topk_method", "greedy"), "config-value", "topk_method", "error"),
    "scale_fmt gone": (drop_inner("scale_fmt"), "config-missing-key",
                       "quantization_config.scale_fmt", "handled"),
    "weight_block_size gone": (drop_inner("weight_block_size"), "config-missing-key",
                               "quantization_config.weight_block_size", "handled"),
    "rope nested": (nest, "nested-rope", "rope_parameters", "handled"),
    "rope gone": (drop("rope_scaling"), "rope-missing", "rope_scaling", "error"),
    "architectures gone": (drop("architectures"), "config-lost-key", "architectures", "error"),
    "expert_dtype gone": (drop("expert_dtype"), "config-lost-key", "expert_dtype", "error"),
    "another ratio": (put("compress_ratios", [0, 4, 4, 128, 0]), "config-structure",
                      "compress_ratios", "error"),
    "too many hash layers": (put("num_hash_layers", 2), "config-structure", "num_hash_layers",
                             "error"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_gap_is_named(check, only, case: str):
    change, code, key, level = CASES[case]
    found = only(check(change))
    assert (found.code, found.tensor, found.level) == (code, key, level)
    assert (found.file, found.evidence) == ("config.json", "certain")
    assert "config" in found.fix


@pytest.mark.parametrize(
    "key",
    ["rope_theta", "compress_rope_theta", "sliding_window", "index_topk",
     "max_position_embeddings", "routed_scaling_factor"],
)  # fmt: skip
def test_a_number_that_nothing_else_tells_is_missed(check, only, key: str, tiny):
    for reference in (None, tiny):
        found = only(check(drop(key), reference=reference))
        assert (found.code, found.tensor, found.level) == ("config-lost-key", key, "error")
        assert "official config.json" in found.fix or "source's config.json" in found.fix
        assert found.effect == "Nothing else in the folder says it: loading stops, or guesses."


NO_NUMBERS = {
    "rope_theta": "10000", "compress_rope_theta": -1.0, "sliding_window": 128.5,
    "index_topk": [512], "max_position_embeddings": 10**400, "routed_scaling_factor": {},
    "swiglu_limit": "ten", "rms_norm_eps": 0, "hc_eps": True, "hc_sinkhorn_iters": "20",
}  # fmt: skip


@pytest.mark.parametrize("key", NO_NUMBERS)
def test_a_number_that_is_none_is_named(check, only, key: str):
    found = only(check(put(key, NO_NUMBERS[key])))
    assert (found.code, found.tensor, found.level) == ("config-value", key, "error")
    assert found.found.startswith(repr(NO_NUMBERS[key])[:9])
    assert found.expected.startswith("a positive")


WRONG = {
    "scoring_func": ("softmax", [], None),
    "qk_rope_head_dim": ("x", 10**9, -1, 0, 63, 64.0, True),
    "architectures": (["LlamaForCausalLM"], "LlamaForCausalLM", {"DeepseekV4ForCausalLM": 1}),
    "hidden_act": ("gelu", None, ["silu"]),
    "norm_topk_prob": ("true", 1, None),
    "tie_word_embeddings": ("no", 0, None),
    "torch_dtype": ("float16", "half"),
    "dtype": ("torch.float16",),
}  # fmt: skip


@pytest.mark.parametrize("key", WRONG)
def test_a_value_that_vllm_cannot_serve_by_is_named(check, only, key: str):
    for value in WRONG[key]:
        found = only(check(put(key, value)))
        assert (found.code, found.tensor, found.level) == ("config-value", key, "error"), value
        assert found.found == repr(value)
        assert found.expected
        assert "official config.json" in found.fix


def test_one_that_is_told_as_another_than_the_references_is_told_once(check, only, tiny):
    found = only(check(put("scoring_func", "softmax"), reference=tiny))
    assert (found.code, found.level) == ("config-differs", "error")


def test_a_head_that_is_called_the_embedding_is_loaded_all_the_same(check, only):
    for variant in ("full", "experts", "official"):
        found = only(check(put("tie_word_embeddings", True), variant))
        assert (found.code, found.level) == ("config-tied-head", "handled")


@pytest.mark.parametrize(
    "key",
    ["scoring_func", "qk_rope_head_dim", "hidden_act", "norm_topk_prob", "tie_word_embeddings",
     "torch_dtype"],
)  # fmt: skip
def test_what_vllm_has_for_every_deepseek_v4_may_be_absent(check, key: str):
    assert not check(drop(key)).findings


def put_rope(key: str, value: object) -> Any:
    return lambda content: content.config["rope_scaling"].update({key: value})


def without_a_kind(content: Any) -> None:
    for key in ("type", "rope_type"):
        content.config["rope_scaling"].pop(key)


SCALINGS = {
    "a word": (put("rope_scaling", "yarn"), "config-value", "rope_scaling"),
    "no kind": (without_a_kind, "rope-missing", "rope_scaling.type"),
    "a kind that is none": (put_rope("rope_type", ["yarn"]), "rope-missing", "rope_scaling.type"),
    "no factor": (put_rope("factor", None), "rope-missing", "rope_scaling.factor"),
    "no length": (put_rope("original_max_position_embeddings", None), "rope-missing",
                  "rope_scaling.original_max_position_embeddings"),
    "a factor that is none": (put_rope("factor", "16"), "config-value", "rope_scaling.factor"),
    "a beta that is none": (put_rope("beta_slow", -1), "config-value", "rope_scaling.beta_slow"),
}  # fmt: skip


@pytest.mark.parametrize("case", SCALINGS)
def test_a_rope_that_vllm_cannot_scale_by_is_named(check, only, case: str):
    """Without a kind it scales by nothing and says nothing."""
    change, code, key = SCALINGS[case]
    found = only(check(change))
    assert (found.code, found.tensor, found.level) == (code, key, "error")


def test_nor_one_that_is_nested(check):
    def change(content: Any) -> None:
        content.config["rope_scaling"].pop("factor")
        nest(content)

    found = {f.tensor: (f.code, f.level) for f in check(change).findings}
    assert found.pop("rope_parameters.compress.factor") == ("rope-missing", "error")
    assert found == {"rope_parameters": ("nested-rope", "handled")}


def test_half_of_a_nested_rope_is_no_flat_one(check):
    def change(content: Any) -> None:
        nest(content)
        del content.config["rope_parameters"]["compress"]

    found = {f.tensor: (f.code, f.level) for f in check(change).findings}
    assert found == {
        "rope_parameters.type": ("rope-missing", "error"),
        "rope_scaling": ("config-missing-key", "handled"),
    }


def test_thetas_in_a_nested_rope_are_not_missed(check):
    def change(content: Any) -> None:
        main, compress = (content.config.pop(k) for k in ("rope_theta", "compress_rope_theta"))
        nest(content)
        content.config["rope_parameters"]["main"]["rope_theta"] = main
        content.config["rope_parameters"]["compress"]["rope_theta"] = compress

    assert {found.code for found in check(change).findings} == {"nested-rope"}


def test_a_gap_in_the_official_checkpoint_is_an_error(check, only):
    """No plugin takes part in serving it."""
    found = only(check(drop("topk_method"), "official"))
    assert (found.code, found.level) == ("config-missing-key", "error")


def test_entries_in_other_names_are_translated(check, only):
    def change(content: Any) -> None:
        content.quantization["ignore"] = ["model.layers.0.self_attn.o_a_proj"]

    found = [f for f in check(change).findings if f.code == "config-other-names"]
    assert [(f.tensor, f.level) for f in found] == [("quantization_config.ignore", "handled")]


def test_a_wrong_group_size(check):
    def change(content: Any) -> None:
        for layer in content.quantization["quantized_layers"].values():
            if layer["quant_algo"] == "NVFP4":
                layer["group_size"] = 32

    codes = {(f.code, f.level) for f in check(change).findings}
    assert codes == {("config-value", "error")}


def test_a_module_that_is_quantized_and_ignored(check, only):
    def change(content: Any) -> None:
        content.quantization["ignore"].append("layers.0.attn.wq_b")

    found = only(check(change))
    assert (found.code, found.level) == ("config-contradicts-itself", "handled")


def test_two_keys_for_the_kv_cache(check, only):
    def change(content: Any) -> None:
        content.quantization["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
        content.quantization["kv_cache_quant_algo"] = "NVFP4"

    found = only(check(change))
    assert (found.code, found.level) == ("kv-cache-disagrees", "handled")


def test_a_key_that_the_reference_has_otherwise(check, only, tiny):
    found = only(check(put("routed_scaling_factor", 2.5), reference=tiny))
    assert (found.code, found.tensor) == ("config-differs", "routed_scaling_factor")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("model_type", "llama"), "deepseek_v4"),
        (put("hidden_size", "big"), "hidden_size"),
        (put("quantization_config", ["a"]), "quantization_config"),
        (put("compress_ratios", {"a": 1}), "compress_ratios"),
        (put("n_routed_experts", 1 << 40), "n_routed_experts"),
        (put("num_hidden_layers", -1), "num_hidden_layers"),
    ],
    ids=["another model", "text", "a list", "an object", "absurd", "negative"],
)
def test_a_config_that_is_none_is_refused(check, change: Any, message: str):
    with pytest.raises(CheckpointError, match=message):
        check(change)
