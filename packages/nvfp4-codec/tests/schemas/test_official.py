"""The table against the tensor listings of the official checkpoints, and the field's counts."""

import math
from collections import Counter
from pathlib import Path

import pytest

from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig, Schema

DATA = Path(__file__).with_name("data")
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I64": 8}


def load(model: str) -> Schema:
    return Schema(ModelConfig.from_file(DATA / f"{model}.config.json"))


def indices(spec: str) -> list[str]:
    """``0-1,3-59:2`` as indices; ``-`` is no index."""
    if spec == "-":
        return [""]
    found: list[str] = []
    for part in spec.split(","):
        bounds, _, step = part.partition(":")
        first, _, last = bounds.partition("-")
        found += map(str, range(int(first), int(last or first) + 1, int(step or 1)))
    return found


def listing(model: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The listing file, expanded: name -> dtype and shape."""
    expanded = {}
    for line in (DATA / f"{model}.tensors.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        name, blocks, experts, dtype, shape = line.split()
        for block in indices(blocks):
            for expert in indices(experts):
                full = name.replace("#", block, 1).replace("#", expert, 1)
                assert full not in expanded
                expanded[full] = (dtype, tuple(map(int, shape.split("x"))))
    return expanded


@pytest.mark.parametrize(
    ("model", "num_tensors"), [("pro", 145_116), ("flash", 69_187), ("flash-0731", 72_317)]
)
def test_every_official_tensor_has_its_name_dtype_and_shape(model, num_tensors):
    expected = listing(model)
    found = {name: (dtype, shape) for name, dtype, shape in load(model).tensors()}
    assert len(expected) == num_tensors  # as the checkpoints' indices have it
    assert found == expected


@pytest.mark.parametrize(
    ("model", "elements"), [("pro", 861_608_274_846), ("flash", 158_069_433_298)]
)
def test_stored_elements_are_those_of_the_published_files(model, elements):
    assert sum(math.prod(spec.shape) for spec in load(model).tensors()) == elements


def test_bytes_and_dtypes_of_flash_0731_are_those_of_its_index():
    specs = list(load("flash-0731").tensors())
    total = sum(BYTES[spec.dtype] * math.prod(spec.shape) for spec in specs)
    assert total == 166_878_536_440
    assert Counter(spec.dtype for spec in specs) == {
        "I8": 35_328,
        "F8_E8M0": 35_718,
        "F8_E4M3": 390,
        "BF16": 445,
        "F32": 433,
        "I64": 3,
    }


def test_pro_has_the_counts_seen_in_the_field():
    """61 wo_a, 305 attention and shared linears, 91 compressors, counted on a served Pro model.

    All three speak of the main model; its MTP block adds one wo_a and no compressor. 305 are
    five per layer as vLLM fuses them: wq_a with wkv, wq_b, wo_b, shared w1 with w3, shared w2
    (wo_a is counted apart, the indexer's wq_b is quantized apart). 91 are the outer compressors of
    all 61 layers (Pro has no layer of ratio 0) and the indexers' of the 30 layers of ratio 4, each
    a fused wkv and wgate.
    """
    entries = [entry for entry in load("pro").entries() if not entry.in_mtp]
    modules = Counter(entry.role for entry in entries)
    assert modules["wo_a"] == 61

    fused = {"wkv": "wq_a", "w3": "w1"}
    linears = set()
    compressors = set()
    for entry in entries:
        parent, _, leaf = entry.module().rpartition(".")
        if entry.role in ("wq_a", "wkv", "wq_b", "wo_b", "shared_expert"):
            linears.add((parent, fused.get(leaf, leaf)))
        if entry.role == "compressor":
            compressors.add(parent)
    assert len(linears) == 305
    assert len(compressors) == 91
    assert sum(entry.role == "wo_a" for entry in load("pro").entries()) == 62


def test_routed_expert_matrices_of_pro():
    experts = [e for e in load("pro").entries() if e.role == "routed_expert" and not e.in_mtp]
    assert len(experts) == 61 * 384 * 3 == 70_272
    assert {math.prod(e.shape) for e in experts} == {22_020_096}


def test_nvfp4_and_plain_layouts_of_an_expert():
    schema = load("pro")
    expert = schema.find("layers.5.ffn.experts.7.w2.weight")
    assert expert is not None
    assert expert.format == "mxfp4"
    assert list(schema.stored(expert, "plain")) == [
        ("layers.5.ffn.experts.7.w2.weight", "BF16", (7168, 3072))
    ]
    assert list(schema.stored(expert, "nvfp4", "hf")) == [
        ("model.layers.5.mlp.experts.7.down_proj.weight", "U8", (7168, 1536)),
        ("model.layers.5.mlp.experts.7.down_proj.weight_scale", "F8_E4M3", (7168, 192)),
        ("model.layers.5.mlp.experts.7.down_proj.weight_scale_2", "F32", ()),
        ("model.layers.5.mlp.experts.7.down_proj.input_scale", "F32", ()),
    ]


def test_base_models_have_fp8_experts_and_float_scales():
    config = {**raw("flash"), "expert_dtype": "fp8"}
    config["quantization_config"] = {**config["quantization_config"], "scale_fmt": "float32"}
    schema = Schema(ModelConfig.from_dict(config))
    expert = schema.find("layers.0.ffn.experts.255.w1.weight")
    assert expert is not None
    assert [spec[1:] for spec in schema.stored(expert)] == [
        ("F8_E4M3", (2048, 4096)),
        ("F32", (16, 32)),
    ]


def raw(model: str) -> dict:
    import json

    return json.loads((DATA / f"{model}.config.json").read_text())


def test_config_written_by_transformers_describes_the_same_main_model():
    """It has layer_types and mlp_layer_types instead, and the MTP block's ratio is gone."""
    official = raw("flash")
    config = {k: v for k, v in official.items() if k not in ("compress_ratios", "num_hash_layers")}
    kinds = {
        0: "sliding_attention",
        4: "compressed_sparse_attention",
        128: "heavily_compressed_attention",
    }
    config["layer_types"] = [kinds[ratio] for ratio in official["compress_ratios"][:43]]
    config["mlp_layer_types"] = ["hash_moe"] * 3 + ["moe"] * 40
    assert ModelConfig.from_dict(config) == ModelConfig.from_dict(official)


def test_any_layer_count_ratios_and_mtp_count():
    config = {
        **raw("tiny"),
        "num_hidden_layers": 2,
        "compress_ratios": [4, 0, 128, 4, 0],
        "num_hash_layers": 0,
        "num_nextn_predict_layers": 3,
    }
    names = {spec.name for spec in Schema(ModelConfig.from_dict(config)).tensors()}
    assert {name.split(".")[1] for name in names if name.startswith("mtp.")} == {"0", "1", "2"}
    assert {
        name.partition(".attn.compressor.ape")[0] for name in names if name.endswith("ape")
    } >= {
        "layers.0",
        "mtp.0",
        "mtp.1",
    }
    assert "mtp.1.attn.indexer.wq_b.scale" in names
    assert "mtp.0.attn.indexer.wq_b.scale" not in names
    assert not any("tid2eid" in name for name in names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v41"}, "model_type is 'deepseek_v41'"),
        ({"compress_ratios": [0, 8, 4, 4, 0]}, "compress_ratios holds 8"),
        ({"compress_ratios": [0, 4]}, "2 entries for 4 layers"),
        ({"compress_ratios": None}, "neither compress_ratios nor layer_types"),
        ({"num_hash_layers": None}, "neither num_hash_layers nor mlp_layer_types"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2"),
        ({"expert_dtype": "int4"}, "expert_dtype is 'int4'"),
        ({"hidden_size": "256"}, "hidden_size is '256'"),
        ({"num_hash_layers": "three"}, "a value is of the wrong type"),
        ({"compress_ratios": 4}, "a value is of the wrong type"),
        ({"num_hash_layers": None, "mlp_layer_types": ["moe", "hash_moe"]}, "they come first"),
    ],
)
def test_contradictory_configs_are_refused_by_name(change, message):
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict({**raw("tiny"), **change})


def test_pure_data_modules_do_not_import_torch():
    import ast

    import nvfp4_codec.schemas as package

    files = list(Path(package.__file__).parent.rglob("*.py"))
    assert len(files) >= 6
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module or ""]
            else:
                continue
            assert not {m.split(".")[0] for m in modules} & {"torch", "numpy", "safetensors"}
