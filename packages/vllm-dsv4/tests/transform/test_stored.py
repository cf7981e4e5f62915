"""What a checkpoint holds, from its headers; what its config promises; and the config's gaps."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from nvfp4_codec.errors import CheckpointError
from vllm_dsv4.errors import StoredError
from vllm_dsv4.stored import complete_config, is_ours, promised, read_stored

SCHEMES = ("official", "hf", "half_converted")


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.fixture
def copy(tmp_path, checkpoint):
    """A checkpoint that a test may change."""

    def make(variant="full", scheme="official"):
        return shutil.copytree(checkpoint(variant, scheme), tmp_path / "copy")

    return make


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        # what the exporter's own table says of each role, spelled out
        ("full", {"layers.2.attn.wq_a": "nvfp4", "layers.2.attn.wo_a": "fp8_block",
                  "layers.2.attn.compressor.wkv": "bf16", "layers.2.ffn.experts": "nvfp4",
                  "layers.2.ffn.shared_experts.w2": "nvfp4", "layers.2.attn.indexer.wq_b": "nvfp4",
                  "layers.2.ffn.gate": "bf16", "head": "bf16", "mtp.0.attn.wq_a": "fp8_block",
                  "mtp.0.ffn.experts": "nvfp4", "mtp.0.e_proj": "fp8_block"}),
        ("experts", {"layers.2.attn.wq_a": "fp8_block", "layers.2.ffn.experts": "nvfp4",
                     "layers.2.ffn.shared_experts.w1": "fp8_block", "layers.2.ffn.gate": "bf16"}),
        ("all-nvfp4", {"layers.2.attn.wo_a": "nvfp4", "layers.2.attn.compressor.wgate": "nvfp4",
                       "layers.2.attn.indexer.compressor.wkv": "nvfp4",
                       "layers.2.attn.indexer.weights_proj": "bf16"}),
        ("wo-a-bf16", {"layers.2.attn.wo_a": "bf16", "mtp.0.attn.wo_a": "fp8_block"}),
        ("mtp-bf16", {"mtp.0.attn.wq_a": "bf16", "mtp.0.h_proj": "bf16",
                      "mtp.0.ffn.experts": "nvfp4"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("scheme", SCHEMES)
def test_formats_are_those_of_the_tensors(checkpoint, variant, scheme, expected):
    stored = read_stored(checkpoint(variant, scheme))
    assert stored.scheme == scheme
    assert {module: stored.formats[module] for module in expected} == expected
    assert stored.has_mtp
    assert not stored.unknown
    assert not stored.missing


@pytest.mark.parametrize("variant", ["full", "experts", "all-nvfp4", "wo-a-bf16", "mtp-bf16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_true_config_promises_what_is_stored(checkpoint, variant, scheme):
    folder = checkpoint(variant, scheme)
    stored, said = read_stored(folder), promised(config_of(folder))
    assert said.formats == stored.formats
    assert said.weight_only == stored.weight_only
    assert said.scheme == scheme


def test_tensors_overrule_the_config(copy):
    folder = copy()
    config = config_of(folder)
    layers = config["quantization_config"]["quantized_layers"]
    layers["layers.1.attn.wo_a"] = {"quant_algo": "NVFP4"}
    del layers["layers.1.attn.wq_b"]
    (folder / "config.json").write_text(json.dumps(config))
    assert read_stored(folder).formats["layers.1.attn.wo_a"] == "fp8_block"
    assert read_stored(folder).formats["layers.1.attn.wq_b"] == "nvfp4"
    assert promised(config).formats["layers.1.attn.wo_a"] == "nvfp4"
    assert promised(config).formats["layers.1.attn.wq_b"] == "bf16"


def test_wo_a_without_an_activation_scale_is_told(checkpoint):
    stored = read_stored(checkpoint("all-nvfp4"))
    assert stored.weight_only == {f"layers.{i}.attn.wo_a" for i in range(4)}


def test_absent_mtp_is_noted_not_missing(checkpoint):
    stored = read_stored(checkpoint("no-mtp"))
    assert not stored.has_mtp
    assert not stored.missing
    assert not any(module.startswith("mtp.") for module in stored.formats)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_unknown_and_missing_tensors_are_listed(copy, checkpoints, scheme):
    folder = copy("full", scheme)
    names = {
        "official": "layers.1.attn.wq_b.weight_scale_2",
        "hf": "model.layers.1.self_attn.q_b_proj.weight_scale_2",
        "half_converted": "model.layers.1.attn.wq_b.weight_scale_2",
    }

    def edit(tensors):
        del tensors[names[scheme]]
        tensors["model.layers.0.position_bias"] = torch.zeros(2)

    checkpoints.change(folder, edit)
    stored = read_stored(folder)
    assert stored.missing == (names[scheme],)
    assert stored.unknown == ("model.layers.0.position_bias",)


def test_a_linear_without_its_weight_has_no_format(copy, checkpoints):
    folder = copy()
    checkpoints.change(folder, lambda tensors: tensors.pop("layers.1.attn.wq_b.weight"))
    stored = read_stored(folder)
    assert "layers.1.attn.wq_b" not in stored.formats
    assert "layers.1.attn.wq_b.weight" in stored.missing


def test_a_second_spelling_is_unknown(copy, checkpoints):
    folder = copy("full", "half_converted")
    checkpoints.change(folder, lambda t: t.update({"lm_head.weight": t["head.weight"].clone()}))
    unknown = read_stored(folder).unknown
    assert len(unknown) == 1
    assert unknown[0] in ("lm_head.weight", "head.weight")


def test_mxfp4_experts_are_seen_as_such(tmp_path, checkpoints):
    stored = read_stored(checkpoints.TINY)
    assert stored.formats["layers.0.ffn.experts"] == "mxfp4"
    assert not is_ours(stored.config)
    # some writers label the codes U8: the scale tells
    folder = shutil.copytree(checkpoints.TINY, tmp_path / "u8")

    def relabel(tensors):
        for name, tensor in tensors.items():
            if tensor.dtype == torch.int8:
                tensors[name] = tensor.view(torch.uint8)

    checkpoints.change(folder, relabel)
    assert read_stored(folder).formats["layers.0.ffn.experts"] == "mxfp4"


def test_experts_of_two_formats_are_refused(copy, checkpoints):
    folder = copy()

    def edit(tensors):
        module = "layers.1.ffn.experts.3.w2"
        for part in ("weight_scale", "weight_scale_2", "input_scale"):
            del tensors[f"{module}.{part}"]
        tensors[f"{module}.weight"] = torch.zeros(256, 128, dtype=torch.bfloat16)

    checkpoints.change(folder, edit)
    with pytest.raises(CheckpointError, match=r"layers.1.ffn.experts.3.w2.weight.*stored as bf16"):
        read_stored(folder)


def test_an_unknown_weight_dtype_is_refused(copy, checkpoints):
    folder = copy()
    checkpoints.change(
        folder, lambda t: t.update({"layers.0.attn.wq_b.weight": torch.zeros(2048, 128).double()})
    )
    with pytest.raises(CheckpointError, match=r"layers.0.attn.wq_b.weight.*dtype F64"):
        read_stored(folder)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no config.json"):
        read_stored(tmp_path)


class TestPromised:
    def test_one_algorithm_for_all_but_what_is_ignored(self, checkpoint):
        config = config_of(checkpoint("full", "hf"))
        quantization = config["quantization_config"]
        del quantization["quantized_layers"]
        quantization["quant_algo"] = "NVFP4"
        quantization["ignore"] = ["lm_head", "model.layers.*.mlp.gate", "*.o_a_proj"]
        said = promised(config)
        assert said.scheme == "hf"
        assert said.formats["layers.1.attn.wo_a"] == "bf16"
        assert said.formats["layers.1.ffn.gate"] == "bf16"
        assert said.formats["head"] == "bf16"
        assert said.formats["layers.1.attn.compressor.wkv"] == "nvfp4"
        assert said.formats["layers.1.ffn.experts"] == "nvfp4"
        assert said.formats["mtp.0.attn.wq_a"] == "fp8_block"

    def test_experts_listed_one_by_one(self, checkpoint):
        config = config_of(checkpoint("full", "hf"))
        layers = config["quantization_config"]["quantized_layers"]
        del layers["model.layers.1.mlp.experts"]
        layers["model.layers.1.mlp.experts.0.gate_proj"] = {"quant_algo": "NVFP4"}
        assert promised(config).formats["layers.1.ffn.experts"] == "nvfp4"

    def test_experts_by_moe_quant_algo_alone(self, checkpoint):
        config = config_of(checkpoint("experts"))
        del config["quantization_config"]["quantized_layers"]
        said = promised(config)
        assert said.formats["layers.1.ffn.experts"] == "nvfp4"
        assert said.formats["layers.1.attn.wq_a"] == "fp8_block"

    def test_weight_only(self, checkpoint):
        config = config_of(checkpoint())
        layers = config["quantization_config"]["quantized_layers"]
        layers["layers.1.attn.wq_b"] = {"quant_algo": "W4A16_NVFP4"}
        assert promised(config).weight_only == {"layers.1.attn.wq_b"}

    def test_an_unknown_algorithm_is_refused(self, checkpoint):
        config = config_of(checkpoint())
        config["quantization_config"]["quantized_layers"]["layers.1.attn.wq_b"] = {
            "quant_algo": "INT8_SQ"
        }
        with pytest.raises(StoredError, match=r"layers.1.attn.wq_b has quant_algo 'INT8_SQ'"):
            promised(config)


class TestIsOurs:
    @pytest.mark.parametrize("scheme", SCHEMES)
    @pytest.mark.parametrize("variant", ["full", "experts"])
    def test_true(self, checkpoint, variant, scheme):
        assert is_ours(config_of(checkpoint(variant, scheme)))

    @pytest.mark.parametrize(
        "change",
        [
            {"model_type": "deepseek_v3"},
            {"quantization_config": None},
            {"quantization_config": {"quant_method": "fp8"}},
            {"quantization_config": {"quant_method": "fp8", "moe_quant_algo": "MXFP4"}},
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
                                     "quantized_layers": {"x": {"quant_algo": "FP8"}}}},
            {"quantization_config": {"quant_method": "quark", "quant_algo": "NVFP4"}},
        ],
    )  # fmt: skip
    def test_false(self, checkpoint, change):
        assert not is_ours({**config_of(checkpoint()), **change})

    def test_modelopt_for_everything(self, checkpoint):
        block = {"quant_method": "modelopt", "quant_algo": "nvfp4"}
        assert is_ours({**config_of(checkpoint()), "quantization_config": block})


class TestCompleteConfig:
    @pytest.mark.parametrize("scheme", ["hf", "half_converted"])
    def test_an_export_gets_the_official_values_back(self, checkpoint, checkpoints, scheme):
        official = json.loads((checkpoints.TINY / "config.json").read_text())
        lost = config_of(checkpoint("full", scheme))
        before = json.dumps(lost)
        found, notes = complete_config(lost)
        assert json.dumps(lost) == before
        for key in ("topk_method", "compress_ratios", "num_hash_layers", "rope_theta",
                    "compress_rope_theta"):  # fmt: skip
            assert found[key] == official[key], key
        for key in ("scale_fmt", "weight_block_size"):
            expected = official["quantization_config"][key]
            assert found["quantization_config"][key] == expected, key
        rope = {k: v for k, v in official["rope_scaling"].items() if k != "rope_theta"}
        assert found["rope_scaling"] == rope
        assert "rope_parameters" not in found
        for word in ("topk_method", "compress_ratios", "num_hash_layers", "scale_fmt",
                     "weight_block_size", "rope_scaling"):  # fmt: skip
            assert sum(word in note.split(" is missing")[0] for note in notes) == 1, word
        assert len(notes) == 6

    def test_a_complete_one_is_left_alone(self, checkpoint):
        config = config_of(checkpoint())
        assert complete_config(config) == (config, [])

    def test_rope_that_is_nowhere_is_told(self, checkpoint):
        config = config_of(checkpoint())
        del config["rope_scaling"]
        found, notes = complete_config(config)
        assert "rope_scaling" not in found
        assert [note for note in notes if "cannot be derived" in note]

    def test_a_flat_rope_under_the_other_name(self, checkpoint):
        config = config_of(checkpoint())
        rope = config.pop("rope_scaling")
        config["rope_parameters"] = {k: v for k, v in rope.items() if k != "type"}
        found, _ = complete_config(config)
        assert found["rope_scaling"]["factor"] == rope["factor"]
        assert found["rope_scaling"]["type"] == "yarn"

    def test_fp8_experts_have_float_scales(self, checkpoint):
        config = config_of(checkpoint())
        del config["quantization_config"]["scale_fmt"]
        found, _ = complete_config({**config, "expert_dtype": "fp8"})
        assert found["quantization_config"]["scale_fmt"] == "float32"
