"""transformers' own model and load-time renaming as oracles for the HF scheme."""

import itertools
import json
from pathlib import Path

import pytest

from nvfp4_codec.schemas.deepseek_v4 import (
    ModelConfig,
    Schema,
    from_official,
    fused_experts,
    to_official,
)

DATA = Path(__file__).with_name("data")
# transformers imports whatever it finds installed; what those packages warn of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model():
    """The tiny model on the meta device."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if not hasattr(transformers, "DeepseekV4ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no DeepSeek-V4")
    import torch

    raw = json.loads((DATA / "tiny.config.json").read_text())
    kept = {k: v for k, v in raw.items() if k not in ("quantization_config", "expert_dtype")}
    kept["compress_ratios"] = raw["compress_ratios"][: raw["num_hidden_layers"]]
    with torch.device("meta"):
        return transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**kept))


@pytest.fixture(scope="module")
def expected():
    """Official name -> shape of the main model, uncompressed: transformers has no MTP blocks."""
    schema = Schema(ModelConfig.from_file(DATA / "tiny.config.json").without_mtp())
    return {spec.name: spec.shape for spec in schema.tensors("plain")}


def test_hf_names_and_shapes_are_those_of_the_state_dict(model, expected):
    seen = set()
    for name, tensor in model.state_dict().items():
        if officials := fused_experts(name, 2):
            stacked = [expected[official] for official in officials]
            rows = sum(shape[0] for shape in stacked) // 2
            assert tuple(tensor.shape) == (2, rows, stacked[0][1])
            seen.update(officials)
        else:
            official = to_official(name, "hf")
            assert tuple(tensor.shape) == expected[official], name
            seen.add(official)
    assert seen == set(expected)


def test_renaming_on_load_gives_our_hf_names(model, expected):
    loading = pytest.importorskip("transformers.core_model_loading")
    mapping = pytest.importorskip("transformers.conversion_mapping")
    transforms = mapping.get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    state = model.state_dict()
    for official in expected:
        theirs, _ = loading.rename_source_key(
            official, renamings, converters, model.base_model_prefix, state
        )
        if ".ffn.experts." in official:
            assert official in fused_experts(theirs, 2)
        else:
            assert theirs == from_official(official, "hf")


def test_fused_experts_keep_gate_before_up():
    assert fused_experts("model.layers.3.mlp.experts.gate_up_proj", 2) == tuple(
        f"layers.3.ffn.experts.{e}.{w}.weight" for e, w in itertools.product("01", ("w1", "w3"))
    )
    assert fused_experts("model.layers.3.mlp.experts.0.gate_proj", 2) == ()
