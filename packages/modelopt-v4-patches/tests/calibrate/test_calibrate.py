"""The library route on the tiny model, against what hooks on the plain model measure."""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from modelopt_v4_patches import Snapshot
from modelopt_v4_patches.calibrate import (
    CalibrationOptions,
    CalibrationReport,
    calibrate,
    calibrate_model,
)
from modelopt_v4_patches.errors import CalibrationError
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig, Schema, to_official

pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
# modelopt and transformers import what they find installed; what that warns of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

OPTIONS = CalibrationOptions(num_samples=3, sequence_length=160, device="cpu")


@pytest.fixture(scope="module")
def calibrated(
    bf16: Path, texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, CalibrationReport]:
    path = tmp_path_factory.mktemp("calibrated") / "amax.safetensors"
    return path, calibrate(bf16, path, texts, OPTIONS)


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    from modelopt_v4_patches import apply_patches

    apply_patches()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16").eval()
    model.set_experts_implementation("eager")
    return model


def ids(texts: Sequence[str]) -> list[torch.Tensor]:
    return [torch.tensor([list(text.encode()[:160])]) for text in texts]


@pytest.fixture(scope="module")
def measured(bf16: Path, texts: list[str]) -> tuple[dict[str, float], dict[str, set[int]]]:
    """Largest input of each linear, and the experts that tokens chose, without modelopt."""
    amax: dict[str, float] = {}
    chosen: dict[str, set[int]] = {}

    def see(name: str, value: torch.Tensor) -> None:
        if value.numel():
            amax[name] = max(amax.get(name, 0.0), float(value.abs().max()))

    def linear(name: str) -> Callable[..., None]:
        return lambda module, arguments: see(name, arguments[0])

    def experts(name: str) -> Callable[..., None]:
        def hook(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
            hidden, index = arguments[:2]
            for expert in range(module.num_experts):
                tokens = (index == expert).any(-1)
                if tokens.any():
                    chosen.setdefault(name, set()).add(expert)
                    see(f"{name}.w1", hidden[tokens])
                    gate_up = hidden[tokens] @ module.gate_up_proj[expert].T
                    see(f"{name}.w2", module._apply_gate(gate_up))

        return hook

    model = load(bf16)
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and "lm_head" not in name:
            module.register_forward_pre_hook(linear(to_official(name, "hf")))
        elif name.endswith(".experts"):
            module.register_forward_pre_hook(experts(to_official(name, "hf")))
    with torch.no_grad():
        for batch in ids(texts):
            model(input_ids=batch)
    return amax, chosen


def test_amax_are_the_largest_inputs(
    calibrated: tuple[Path, CalibrationReport],
    measured: tuple[dict[str, float], dict[str, set[int]]],
) -> None:
    snapshot = Snapshot.load(calibrated[0])
    amax, _ = measured
    for module, value in amax.items():
        found = snapshot.input_amax(module.replace(".experts.w", ".experts.5.w"))
        # Per expert, the oracle multiplies fewer rows at once, which may round another way.
        assert found == pytest.approx(value, rel=2**-7 if module.endswith("experts.w2") else 0)
    assert sum(".experts." in module and ".shared" not in module for module in amax) == 8
    assert len(amax) > 40


def test_covers_what_export_quantizes(
    official: Path, calibrated: tuple[Path, CalibrationReport]
) -> None:
    snapshot = calibrated[1].snapshot
    schema = Schema(ModelConfig.from_file(official / "config.json").without_mtp())
    covered = {entry.role for entry in schema.entries() if snapshot.input_amax(entry.module())}
    assert covered == {
        "wq_a", "wq_b", "wkv", "wo_b", "shared_expert", "routed_expert",
        "indexer_wq_b", "indexer_weights", "compressor",
    }  # fmt: skip
    for entry in schema.entries():
        if entry.template.row.linear and entry.role in covered:
            assert snapshot.input_amax(entry.module()), entry.module()


def test_unseen_experts_are_named_and_counted(
    calibrated: tuple[Path, CalibrationReport],
    measured: tuple[dict[str, float], dict[str, set[int]]],
) -> None:
    _, chosen = measured
    expected = {f"{layer}.{e}" for layer, seen in chosen.items() for e in set(range(16)) - seen}
    assert expected, "the test needs an expert without tokens"
    assert set(calibrated[1].unseen_experts) == expected
    assert set(Snapshot.load(calibrated[0]).unseen_experts) == expected


def test_metadata_says_where_it_comes_from(
    bf16: Path, calibrated: tuple[Path, CalibrationReport]
) -> None:
    path, report = calibrated
    snapshot = Snapshot.load(path)
    assert snapshot.complete
    assert report.num_samples == 3
    assert report.uncalibrated == ()
    assert snapshot.metadata["modelopt"].startswith("0.4")
    assert snapshot.metadata["sequence_length"] == "160"
    assert snapshot.metadata["kv_cache"] == "fp8_cast"
    assert snapshot.metadata["dataset"].startswith("3 texts, sha256 ")
    assert str(bf16.parent) not in json.dumps(dict(snapshot.metadata))
    about = snapshot.quantizers
    assert about.keys() == snapshot.amax.keys()
    assert about["model.layers.0.mlp.experts.down_proj_weight_quantizers.3"] == {
        "shape": [], "kind": "weight", "num_bits": [2, 1], "block": 16,
    }  # fmt: skip
    assert {one["kind"] for one in about.values()} == {"input", "weight"}


def test_scales_and_kv_cache_are_modelopts(bf16: Path, texts: list[str]) -> None:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    model: Any
    model, report = calibrate_model(bf16, texts[:1], OPTIONS)
    for module in ("self_attn.q_a_proj", "mlp.shared_experts.down_proj"):
        name = f"model.layers.1.{module}"
        scale = NVFP4QTensor.get_activation_scaling_factor(
            model.get_submodule(name).input_quantizer
        )
        amax = report.snapshot.input_amax(to_official(name, "hf"))
        assert torch.equal(scale, torch.tensor(amax, dtype=torch.float32) / (6 * 448))
    for cache in ("k", "v"):
        quantizer = model.get_submodule(f"model.layers.1.self_attn.{cache}_bmm_quantizer")
        assert quantizer.is_enabled
        assert quantizer.num_bits == (4, 3)
        assert quantizer._use_constant_amax  # so the snapshot has nothing to say of it
    weight = report.snapshot.amax["model.layers.1.self_attn.q_a_proj.weight_quantizer"]
    largest = model.get_submodule("model.layers.1.self_attn.q_a_proj").weight.abs().max()
    assert torch.equal(weight, largest.float())


def test_layerwise_is_the_same_and_leaves_a_snapshot_after_each_layer(
    bf16: Path, texts: list[str], calibrated: tuple[Path, CalibrationReport], tmp_path: Path
) -> None:
    _skip_without_layerwise()
    seen: list[Snapshot] = []
    options = CalibrationOptions(3, 160, device="cpu", layerwise=True)
    _, report = calibrate_model(bf16, texts, options, keep=seen.append)
    report.snapshot.save(tmp_path / "amax.safetensors")
    assert (tmp_path / "amax.safetensors").read_bytes() == calibrated[0].read_bytes()
    assert [_layers(snapshot) for snapshot in seen] == [{"0"}, {"0", "1"}]
    for snapshot in seen:
        assert not snapshot.complete
        for name, value in snapshot.amax.items():
            assert torch.equal(value, report.snapshot.amax[name])


def test_an_interrupted_layerwise_run_is_resumed(
    bf16: Path, texts: list[str], calibrated: tuple[Path, CalibrationReport], tmp_path: Path
) -> None:
    _skip_without_layerwise()
    path = tmp_path / "amax.safetensors"
    options = CalibrationOptions(
        3, 160, device="cpu", layerwise=True, checkpoint_dir=tmp_path / "state"
    )

    class Killed(BaseException):
        pass

    def keep(snapshot: Snapshot) -> None:
        snapshot.save(path)
        if len(_layers(snapshot)) == 2:
            raise Killed

    with pytest.raises(Killed):
        calibrate_model(bf16, texts, options, keep=keep)
    left = Snapshot.load(path)
    assert not left.complete
    assert _layers(left) == {"0", "1"}
    with pytest.raises(CalibrationError, match="interrupted calibration has dataset 3 texts, sha"):
        calibrate(bf16, path, [*texts[1:], "other"], options)
    calibrate(bf16, path, texts, options)
    assert path.read_bytes() == calibrated[0].read_bytes()


def test_a_source_that_is_not_bf16_is_refused_with_the_remedy(
    official: Path, texts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(CalibrationError, match="quantized by 'fp8'.*dsv4-quantize dequant"):
        calibrate(official, tmp_path / "amax.safetensors", texts, OPTIONS)
    hidden = _copy(official, tmp_path / "hidden", lambda config: config.pop("quantization_config"))
    with pytest.raises(CalibrationError, match="dtype (I8|F8_E4M3|F8_E8M0).*dsv4-quantize dequant"):
        calibrate(hidden, tmp_path / "amax.safetensors", texts, OPTIONS)


def test_a_checkpoint_with_holes_is_refused(bf16: Path, texts: list[str], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(bf16 / "model.safetensors")
    del tensors["layers.1.attn.wq_b.weight"]
    broken = _copy(bf16, tmp_path / "holes", lambda config: None, link=False)
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(CalibrationError, match=r"lacks 1 tensors: model.layers.1.*q_b_proj.weight"):
        calibrate(broken, tmp_path / "amax.safetensors", texts, OPTIONS)


def test_a_complete_snapshot_is_not_replaced(
    bf16: Path, texts: list[str], calibrated: tuple[Path, CalibrationReport], tmp_path: Path
) -> None:
    path = tmp_path / "amax.safetensors"
    path.write_bytes(calibrated[0].read_bytes())
    with pytest.raises(CalibrationError, match="exists and is a complete snapshot.*--overwrite"):
        calibrate(bf16, path, texts, OPTIONS)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CalibrationError, match="exists and is no snapshot"):
        calibrate(bf16, tmp_path / "notes.txt", texts, OPTIONS)
    with pytest.raises(CalibrationError, match="its folder does not exist"):
        calibrate(bf16, tmp_path / "absent/amax.safetensors", texts, OPTIONS)
    assert path.read_bytes() == calibrated[0].read_bytes()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_samples": 0}, r"num_samples \(--samples\) is 0"),
        ({"memory_fraction": 1.0}, r"memory_fraction \(--memory-fraction\) is 1.0"),
        ({"checkpoint_dir": Path("state")}, "for layerwise calibration"),
    ],
)
def test_impossible_options_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        CalibrationOptions(**wrong)


def test_what_calibration_misses_is_one_warning(
    bf16: Path, texts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    options = CalibrationOptions(num_samples=2, sequence_length=2, device="cpu")
    with caplog.at_level(logging.WARNING, "modelopt_v4_patches"):
        _, report = calibrate_model(bf16, texts, options)
    assert len(report.unseen_experts) > 20  # four tokens for 64 experts
    warning = next(r.getMessage() for r in caplog.records if "by no token" in r.getMessage())
    assert warning.startswith(f"{len(report.unseen_experts)} experts")
    assert report.unseen_experts[0] in warning


def _layers(snapshot: Snapshot) -> set[str]:
    return {name.split(".")[2] for name in snapshot.amax}


def _copy(
    source: Path, target: Path, change: Callable[[dict[str, Any]], Any], *, link: bool = True
) -> Path:
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    change(config)
    (target / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    if link:
        (target / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    return target


def _skip_without_layerwise() -> None:
    from importlib.metadata import version

    if version("nvidia-modelopt").startswith("0.45."):
        pytest.skip("modelopt 0.45 calibrates layerwise on quantized activations")
