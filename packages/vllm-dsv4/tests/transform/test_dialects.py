"""config.json as different writers spell it: keys, cases and lists that mean the same."""

from __future__ import annotations

import copy
import json

import pytest

from nvfp4_codec.checkpoint.reader import TensorInfo
from vllm_dsv4.stored import (
    _format,
    complete_config,
    is_ours,
    linears,
    list_of_experts,
    promised,
    read_stored,
)


@pytest.fixture
def config_of(checkpoint):
    """A variant's config.json, to be changed."""

    def get(variant="full", scheme="official"):
        return json.loads((checkpoint(variant, scheme) / "config.json").read_text())

    return get


class TestIsOurs:
    @pytest.mark.parametrize(
        "block",
        [
            {"quant_method": "deepseek_v4_fp8", "moe_quant_algo": "NVFP4"},
            {"quant_method": "FP8", "moe_quant_algo": "nvfp4"},
            {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"},
            {"quant_method": "ModelOpt", "quant_algo": "W4A16_NVFP4"},
            {"quant_method": "modelopt", "quant_algo": "mixed_precision",
             "quantized_layers": {"x": {"quant_algo": "nvfp4"}, "y": {"quant_algo": "FP8"}}},
        ],
    )  # fmt: skip
    def test_true(self, block):
        assert is_ours({"model_type": "deepseek_v4", "quantization_config": block})

    @pytest.mark.parametrize("layers", [None, ["x"], {"x": 4}, {"x": "FP8_PB_WO"}])
    def test_what_is_not_understood_is_not(self, layers):
        block = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
                 "quantized_layers": layers}  # fmt: skip
        assert not is_ours({"model_type": "deepseek_v4", "quantization_config": block})


class TestGaps:
    def test_null_is_a_gap(self, config_of):
        config = config_of()
        whole = copy.deepcopy(config)
        config["topk_method"] = None
        config["quantization_config"] |= {"scale_fmt": None, "weight_block_size": None}
        found, notes = complete_config(config)
        assert found == whole
        assert len(notes) == 3

    def test_what_is_there_is_not_derived(self, config_of):
        config = config_of()
        types = ["sliding_attention"] * 4
        found, notes = complete_config(
            {**config, "layer_types": types, "mlp_layer_types": ["moe"] * 4}
        )
        assert (found["compress_ratios"], found["num_hash_layers"]) == ([0, 128, 4, 128, 0], 1)
        assert not notes

    def test_what_is_nowhere_is_not_made_up(self, config_of):
        config = config_of()
        for key in ("compress_ratios", "num_hash_layers", "quantization_config"):
            del config[key]
        found, notes = complete_config(config)
        assert found == config
        assert not notes

    def test_ratios_are_derived_without_the_hashed_layers(self, config_of):
        config = config_of("full", "hf")
        del config["mlp_layer_types"]
        found, _ = complete_config(config)
        assert found["compress_ratios"] == [0, 128, 4, 128, 0]
        assert "num_hash_layers" not in found

    def test_a_nested_rope_gives_both_thetas(self, config_of):
        config = config_of("full", "hf")
        del config["rope_theta"], config["compress_rope_theta"]
        config["rope_parameters"]["main"]["rope_theta"] = 1234.0
        config["rope_parameters"]["compress"]["rope_theta"] = 5678.0
        found, _ = complete_config(config)
        assert (found["rope_theta"], found["compress_rope_theta"]) == (1234.0, 5678.0)

    @pytest.mark.parametrize("main", [None, "default", {"rope_type": "default"}])
    def test_a_nested_rope_without_thetas(self, config_of, main):
        config = config_of("full", "hf")
        config["rope_parameters"]["main"] = main
        del config["rope_parameters"]["compress"]["rope_theta"]
        found, _ = complete_config(config)
        for key in ("rope_theta", "compress_rope_theta"):
            assert found[key] == config[key]
        assert found["rope_scaling"]["factor"] == 16

    @pytest.mark.parametrize(
        ("given", "kind"),
        [
            ({"type": "yarn"}, "yarn"),
            ({"rope_type": "yarn"}, "yarn"),
            ({"rope_type": "yarn", "type": "default"}, "yarn"),  # transformers' own key is newer
            ({"factor": 1}, "default"),
        ],
    )
    def test_the_ropes_kind_stands_under_both_keys(self, config_of, given, kind):
        config = config_of()
        del config["rope_scaling"]
        found, notes = complete_config({**config, "rope_parameters": given})
        assert (found["rope_scaling"]["type"], found["rope_scaling"]["rope_type"]) == (kind, kind)
        assert notes == ["rope_scaling is missing: taken from rope_parameters"]

    def test_an_attention_factor_that_is_none_of_transformers_stays(self, config_of):
        config = config_of("full", "hf")
        config["rope_parameters"]["compress"]["attention_factor"] = 0.8
        assert complete_config(config)[0]["rope_scaling"]["attention_factor"] == 0.8

    def test_an_empty_rope_is_none(self, config_of):
        config = config_of()
        del config["rope_scaling"]
        found, notes = complete_config({**config, "rope_parameters": {}})
        assert "rope_scaling" not in found
        assert "cannot be derived" in notes[0]


class TestStored:
    def test_both_ways_complete_the_config_and_tell(self, checkpoint, config_of):
        config = config_of("full", "hf")
        complete, notes = complete_config(config)
        assert len(notes) == 6
        for stored in (read_stored(checkpoint("full", "hf")), promised(config)):
            assert stored.config == complete
            assert list(stored.notes) == notes

    def test_mtp_blocks_are_those_of_the_config(self, config_of):
        config = config_of()
        assert promised(config).has_mtp
        config |= {"num_nextn_predict_layers": 0, "compress_ratios": [0, 128, 4, 128]}
        assert not promised(config).has_mtp

    def test_every_linear_is_listed_once(self, checkpoint):
        stored = read_stored(checkpoint())
        names = [name for name, _ in linears(stored.schema)]
        assert sorted(names) == sorted(stored.formats)

    def test_only_experts_go_by_their_list(self):
        assert list_of_experts("layers.3.ffn.experts.17.w1") == "layers.3.ffn.experts"
        for other in ("layers.3.ffn.shared_experts.w1", "layers.3.attn.wq_a"):
            assert list_of_experts(other) == other

    @pytest.mark.parametrize(
        ("dtype", "beside", "expected"),
        [
            ("U8", ("weight_scale", "weight_scale_2"), "nvfp4"),
            ("U8", (), "nvfp4"),  # its scales are missing, which is told elsewhere
            ("U8", ("scale", "weight_scale"), "nvfp4"),
            ("U8", ("scale", "weight_scale_2"), "nvfp4"),
            ("U8", ("scale",), "mxfp4"),
            ("I8", ("scale",), "mxfp4"),
            ("I8", (), "mxfp4"),
            ("F8_E4M3", ("scale",), "fp8_block"),
            ("BF16", (), "bf16"),
            ("F16", (), "bf16"),
            ("F32", (), "bf16"),
        ],
    )
    def test_a_format_by_dtype_and_scales(self, dtype, beside, expected):
        def info(name, dtype):
            return TensorInfo(name, dtype, (2, 2), "model.safetensors", 0, 4)

        weight = info("a.weight", dtype)
        tensors = {f"a.{part}": info(f"a.{part}", "F32") for part in beside}
        assert _format(weight, "a", tensors | {"a.weight": weight}) == expected


class TestPromised:
    def modelopt(self, config, **block):
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", **block}
        return config

    def test_without_a_quantization_it_is_official(self, config_of):
        config = config_of()
        del config["quantization_config"]
        said = promised(config)
        assert said.scheme == "official"
        assert said.formats["layers.1.attn.wq_a"] == "fp8_block"
        assert said.formats["layers.1.ffn.experts"] == "mxfp4"

    @pytest.mark.parametrize("key", ["ignore", "exclude_modules"])
    @pytest.mark.parametrize("method", ["modelopt", "ModelOpt_FP4"])
    def test_ignored_under_either_key(self, config_of, key, method):
        config = self.modelopt(config_of(), quant_method=method, **{key: ["layers.1.attn.wo_a"]})
        said = promised(config).formats
        assert (said["layers.1.attn.wo_a"], said["layers.2.attn.wo_a"]) == ("bf16", "nvfp4")

    def test_nothing_ignored(self, config_of):
        assert promised(self.modelopt(config_of())).formats["layers.1.attn.wo_a"] == "nvfp4"

    @pytest.mark.parametrize("glob", ["layers.?.attn.wo_a", "layers.[0-3].attn.wo_a",
                                      "layers.*.attn.wo_a"])  # fmt: skip
    def test_globs(self, config_of, glob):
        said = promised(self.modelopt(config_of(), ignore=[glob])).formats
        assert {said[f"layers.{i}.attn.wo_a"] for i in range(4)} == {"bf16"}

    def test_a_container_stands_for_what_it_holds(self, config_of):
        said = promised(self.modelopt(config_of(), ignore=["layers.1.ffn.shared_experts"])).formats
        assert {said[f"layers.1.ffn.shared_experts.{w}"] for w in ("w1", "w2", "w3")} == {"bf16"}
        assert said["layers.2.ffn.shared_experts.w1"] == "nvfp4"

    def test_what_is_listed_is_quantized_though_ignored(self, config_of):
        config = config_of()
        config["quantization_config"]["ignore"].append("layers.1.attn.wq_b")
        assert promised(config).formats["layers.1.attn.wq_b"] == "nvfp4"

    def test_a_list_of_experts_counts_more_than_one_of_them(self, config_of):
        config = config_of()
        layers = config["quantization_config"]["quantized_layers"]
        layers["layers.1.ffn.experts.0.w1"] = {"quant_algo": "FP8_PB_WO"}
        assert promised(config).formats["layers.1.ffn.experts"] == "nvfp4"

    def test_algorithms_in_lower_case(self, config_of):
        config = config_of()
        layers = config["quantization_config"]["quantized_layers"]
        layers["layers.1.attn.wq_b"] = {"quant_algo": "nvfp4"}
        assert promised(config).formats["layers.1.attn.wq_b"] == "nvfp4"
        experts = config_of("experts")
        del experts["quantization_config"]["quantized_layers"]
        experts["quantization_config"]["moe_quant_algo"] = "nvfp4"
        assert promised(experts).formats["layers.1.ffn.experts"] == "nvfp4"

    def test_what_is_quantized_has_the_names_scheme(self, config_of):
        """Half-converted exports ignore under transformers' names."""
        config = config_of("full", "half_converted")
        block = config["quantization_config"]
        block["quant_algo"] = "NVFP4"
        block["quantized_layers"] = {"model.layers.1.attn.wq_b": {"quant_algo": "NVFP4"}}
        block["ignore"] = ["model.layers.1.self_attn.o_a_proj", "model.layers.1.mlp.gate"]
        said = promised(config)
        assert said.scheme == "half_converted"
        assert said.formats["layers.1.attn.wo_a"] == "bf16"
        assert said.formats["layers.2.attn.wo_a"] == "nvfp4"

    def test_a_glob_means_what_it_means_in_its_scheme(self, config_of):
        """transformers keeps the indexer inside the compressor, DeepSeek beside it."""
        block = {"ignore": ["model.layers.1.mlp.gate", "*.compressor.*"]}
        said = promised(self.modelopt(config_of("full", "hf"), **block)).formats
        assert said["layers.2.attn.indexer.wq_b"] == "bf16"
        assert said["layers.2.attn.wq_b"] == "nvfp4"
