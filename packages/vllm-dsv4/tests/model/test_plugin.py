"""The entry point: what it registers, when, and for whom."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from vllm_dsv4.testing import RemoteError

from .conftest import Vllm


def test_it_is_an_entry_point() -> None:
    (own,) = entry_points(group="vllm.general_plugins", name="vllm_dsv4")
    assert own.value == "vllm_dsv4.plugin:register"


def test_it_registers_once_however_often_it_is_called(vllm: Vllm) -> None:
    first = vllm.unimported["first"]
    assert first == vllm.unimported["second"]
    assert first["models"] == {
        "DeepseekV4ForCausalLM": "vllm_dsv4.model:DSV4ForCausalLM",
        "DeepSeekV4MTPModel": "vllm_dsv4.mtp:DSV4MTP",
    }
    assert (first["others"], first["quantization"], first["hooks"]) == (2, 1, 1)
    assert first["hook"] == "vllm_dsv4.config_hook"
    assert first["claim"] == "vllm_dsv4.claim"


def test_it_imports_no_model(vllm: Vllm) -> None:
    """Before vLLM builds a DeepSeek-V4, neither vLLM's model nor ours, nor anything they need."""
    imported = set(vllm.unimported["imported"])
    assert "vllm_dsv4.plugin" in imported
    assert not [name for name in imported if name.startswith("vllm.models.")]
    heavy = {f"vllm_dsv4.{name}" for name in ("model", "mtp", "quant_config", "transform")}
    assert not heavy & imported


def test_vllm_inspects_our_class_in_a_process_of_its_own(
    vllm: Vllm, checkpoint: Any, tmp_path: Path
) -> None:
    vllm.call("inspected", folder=checkpoint("full"), cache=tmp_path)
    (found,) = tmp_path.glob("modelinfos/vllm_dsv4-model-*.json")
    info = json.loads(found.read_text())["modelinfo"]
    assert info["architecture"] == "DSV4ForCausalLM"


@pytest.mark.parametrize(
    "arguments",
    [{}, {"tp": 2, "rank": 1}, {"moe_backend": "deep_gemm_mega_moe", "expert_parallel": True}],
    ids=["alone", "tp", "mega"],
)
def test_an_official_checkpoint_is_left_to_vllm(
    vllm: Vllm, checkpoints: ModuleType, arguments: dict[str, Any]
) -> None:
    ours = vllm.load(checkpoints.TINY, **arguments)
    stock = vllm.load(checkpoints.TINY, without_plugin=True, **arguments)
    assert ours.quant_methods == stock.quant_methods
    assert ours.loaded_counts == stock.loaded_counts
    assert list(ours.parameters) == list(stock.parameters)
    for name, parameter in stock.parameters.items():
        assert torch.equal(*(_bytes(m.parameters[name]) for m in (ours, stock))), name
        assert parameter.dtype == ours.parameters[name].dtype


def test_another_model_is_left_to_vllm(vllm: Vllm, tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
        "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1,
        "num_key_value_heads": 4, "vocab_size": 512, "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = vllm.call("configured", folder=tmp_path)
    assert found["quantization"] == "modelopt_fp4"
    assert found["quant_config"] == "ModelOptNvFp4Config"
    assert not found["warnings"]


def test_nvidias_layout_is_left_to_vllm_while_vllm_can(vllm: Vllm, checkpoint: Any) -> None:
    folder = checkpoint("experts")
    mega = {"moe_backend": "deep_gemm_mega_moe", "expert_parallel": True}
    assert vllm.call("configured", folder=folder)["quantization"] == "deepseek_v4_fp8"
    taken: list[dict[str, Any]] = [
        {"options": {"wo_a_dtype": "bf16"}},
        {"options": {"verify_load": True}},
        mega,
    ]
    for arguments in taken:
        found = vllm.call("configured", folder=folder, **arguments)
        assert found["quantization"] == "dsv4_nvfp4"


@pytest.mark.parametrize(
    ("variant", "scheme", "message"),
    [
        ("full", "official", r"KeyError: 'layers\.0\.attn\.wo_a\.weight_scale_inv'"),
        ("all-nvfp4", "official",
         r"KeyError: 'layers\.1\.attn\.compressor\.fused_wkv_wgate\.input_scale'"),
        ("all-nvfp4", "hf", "ValueError: There is no module or parameter named 'lm_lm_head' in "),
        ("full", "half_converted", r"KeyError: 'hc_head\.hc_base'"),
    ],
)  # fmt: skip
def test_stock_vllm_refuses(
    vllm: Vllm, checkpoint: Any, variant: str, scheme: str, message: str
) -> None:
    """Its loader of weights finds no place for one."""
    loader = rf"^{message}(?s:.)*/vllm/model_executor/models/utils\.py"
    with pytest.raises(RemoteError, match=loader):
        vllm.load(checkpoint(variant, scheme), without_plugin=True)


def test_an_untested_vllm_is_refused_in_a_sentence(
    vllm: Vllm, checkpoint: Any, checkpoints: ModuleType
) -> None:
    found = vllm.call("with_another_vllm", folder=checkpoint("full"), version="0.34.1")
    assert "vllm-dsv4 is tested with vLLM 0.33.x and this is vLLM 0.34.1: install" in found["error"]
    assert found["model"] == "vllm.models.deepseek_v4"
    for other in (checkpoints.TINY, checkpoint("experts")):
        found = vllm.call("with_another_vllm", folder=other, version="0.34.1")
        assert found == {"model": "vllm.models.deepseek_v4", "error": ""}


def test_gaps_of_the_config_are_filled_with_one_warning(vllm: Vllm, checkpoint: Any) -> None:
    found = vllm.call("configured", folder=checkpoint("full", "hf"))
    assert found["topk_method"] == "noaux_tc"
    (warning,) = found["warnings"]
    assert "topk_method is missing" in warning
    whole = vllm.call("configured", folder=checkpoint("full"))
    assert not whole["warnings"]


def test_without_topk_method_the_gates_bias_is_loaded_all_the_same(
    vllm: Vllm, tmp_path: Path, checkpoint: Any, checkpoints: ModuleType
) -> None:
    for variant in ("full", "experts"):
        folder = tmp_path / variant
        shutil.copytree(checkpoint(variant), folder)
        checkpoints.change_config(folder, lambda config: config.pop("topk_method"))
        model = vllm.load(folder)
        assert "model.layers.1.ffn.gate.e_score_correction_bias" in model.loaded_counts
    with pytest.raises(RemoteError, match="e_score_correction_bias"):
        vllm.load(tmp_path / "experts", without_plugin=True)


def test_options_that_do_not_exist_are_refused_by_name(vllm: Vllm, checkpoint: Any) -> None:
    with pytest.raises(RemoteError, match="wo_dtype: no such option; known are wo_a_dtype"):
        vllm.call("configured", folder=checkpoint("full"), options={"wo_dtype": "fp8"})
    with pytest.raises(RemoteError, match="asks for NVFP4"):
        vllm.call("configured", folder=checkpoint("experts"), options={"attn_dtype": "nvfp4"})


def test_a_layer_that_is_a_word_is_refused_by_name(
    vllm: Vllm, tmp_path: Path, checkpoint: Any, checkpoints: ModuleType
) -> None:
    folder = shutil.copytree(checkpoint("full"), tmp_path / "word")
    edit = {"layers.0.attn.wq_b": "NVFP4"}
    checkpoints.change_config(
        folder, lambda config: config["quantization_config"]["quantized_layers"].update(edit)
    )
    message = r"config\.json: .*quantized_layers\['layers\.0\.attn\.wq_b'\] is 'NVFP4'; an object"
    with pytest.raises(RemoteError, match=message):
        vllm.call("configured", folder=folder)


def test_a_model_that_is_not_at_hand_is_read_from_its_config(vllm: Vllm, checkpoint: Any) -> None:
    promised, stored = vllm.call("promised_and_stored", folder=checkpoint("all-nvfp4", "hf"))
    assert promised == stored


def test_what_a_checkpoint_holds_travels_to_the_workers(
    vllm: Vllm, tmp_path: Path, checkpoint: Any
) -> None:
    folder = tmp_path / "here"
    shutil.copytree(checkpoint("all-nvfp4"), folder)
    formats = vllm.call("travelled", folder=folder)
    assert formats["layers.0.attn.wo_a"] == "fp8_block"
    assert formats["layers.1.attn.compressor.wkv"] == "bf16"
    assert formats["mtp.0.ffn.experts"] == "nvfp4"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
