"""What calibration needs is known before it starts, and what does not fit is refused."""

from pathlib import Path
from typing import Any

import pytest

from modelopt_v4_patches.calibrate import CalibrationOptions, calibrate
from modelopt_v4_patches.calibration import memory
from modelopt_v4_patches.calibration.memory import (
    GIB,
    Need,
    check_memory,
    max_memory,
    measure_need,
    measure_room,
)
from modelopt_v4_patches.errors import CalibrationError
from nvfp4_codec.checkpoint import Checkpoint
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig

PRO = {
    "model_type": "deepseek_v4", "vocab_size": 129280, "hidden_size": 7168,
    "moe_intermediate_size": 3072, "num_hidden_layers": 61, "num_attention_heads": 128,
    "head_dim": 512, "q_lora_rank": 1536, "o_lora_rank": 1024, "o_groups": 16,
    "n_routed_experts": 384, "num_experts_per_tok": 6, "num_hash_layers": 3, "hc_mult": 4,
    "index_n_heads": 64, "index_head_dim": 128, "compress_ratios": [0, 0, *[4, 128] * 29, 4, 0],
}  # fmt: skip


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the machine has: machine(gpus=[bytes], ram=bytes)."""

    def pretend(gpus: list[int], ram: int) -> None:
        monkeypatch.setattr(memory, "free_gpu_memory", lambda: gpus)
        monkeypatch.setattr(memory, "available_ram", lambda: ram)

    return pretend


@pytest.mark.filterwarnings("ignore")
def test_weights_are_what_transformers_keeps(bf16: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = transformers.AutoModelForCausalLM.from_pretrained(bf16, dtype="bfloat16")
    kept = sum(tensor.nbytes for tensor in model.state_dict().values())
    with Checkpoint.open(bf16) as checkpoint:
        config = ModelConfig.from_file(bf16 / "config.json")
        need = measure_need(checkpoint, config, batch_size=1, sequence_length=1)
        assert sum(info.nbytes for info in checkpoint) > 1.1 * need.weights  # the MTP block
    assert need.weights == pytest.approx(kept, rel=0.02)  # what is kept in fp32 differs


def test_work_on_the_full_size_model_includes_a_layers_experts(bf16: Path) -> None:
    def working(**shape: int) -> int:
        with Checkpoint.open(bf16) as checkpoint:
            return measure_need(checkpoint, ModelConfig.from_dict(PRO), **shape).working

    one = working(batch_size=1, sequence_length=512)
    experts = 384 * 3 * 3072 * 7168 * 2  # 47.2 GiB; stacking gate and up alone takes 31.5
    assert experts < one < experts + 4 * GIB
    assert working(batch_size=8, sequence_length=512) - experts == 8 * (one - experts)
    assert working(batch_size=1, sequence_length=4096) > working(batch_size=8, sequence_length=512)


def test_layerwise_keeps_the_inputs_and_outputs_of_a_layer(bf16: Path) -> None:
    with Checkpoint.open(bf16) as checkpoint:
        config = ModelConfig.from_dict(PRO)
        need = measure_need(
            checkpoint, config, batch_size=1, sequence_length=512, layerwise_samples=128
        )
    assert need.cached == 2 * 128 * 512 * 4 * 7168 * 2


def test_weights_may_lie_on_all_gpus_and_the_cpu(machine: Any) -> None:
    machine([180 * GIB] * 8, 3000 * GIB)
    room = measure_room("auto", 0.7)
    assert room.kind == "gpu"
    budgets = max_memory(room)
    assert list(budgets) == [0, 1, 2, 3, 4, 5, 6, 7, "cpu"]
    assert budgets[7] == int(180 * GIB * 0.7)
    assert budgets["cpu"] == int(3000 * GIB * 0.7)
    check_memory(Need(2900 * GIB, 50 * GIB, 0), room, 0.7)
    assert measure_room("cpu", 0.7).kind == "cpu"


@pytest.mark.parametrize(
    ("need", "message"),
    [
        (Need(3200 * GIB, GIB, 0), r"weights need 3200.0 GiB, at memory fraction 0.7 there is room "
         r"for 1526.0 GiB \(GPU 0 126.0 GiB, CPU 1400.0 GiB\)"),
        (Need(GIB, 60 * GIB, 0), "a forward needs 60.0 GiB, 52.0 GiB are left on the GPU"),
        (Need(GIB, 50 * GIB, 3 * GIB), "a forward needs 53.0 GiB, 52.0 GiB are left on the GPU"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_is_needed(
    need: Need, message: str, machine: Any
) -> None:
    machine([180 * GIB], 2000 * GIB)
    with pytest.raises(CalibrationError, match=f"not enough memory to calibrate: .*{message}"):
        check_memory(need, measure_room("auto", 0.7), 0.7)


def test_calibrate_refuses_before_it_loads(
    bf16: Path, tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine([], 20 << 20)
    monkeypatch.setattr("modelopt_v4_patches.calibrate.load_model", None)
    options = CalibrationOptions(num_samples=1, sequence_length=64)
    with pytest.raises(CalibrationError, match=r"weights need 2\d.\d MiB.*CPU 14.0 MiB"):
        calibrate(bf16, tmp_path / "amax.safetensors", ["text"], options)


def test_memory_of_this_machine_is_plausible() -> None:
    assert GIB / 4 < memory.available_ram() < 1 << 50
