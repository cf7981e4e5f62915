"""modelopt's own hf_ptq.py on a GPU, with the patches, on the trained tiny DeepSeek-V4.

MODELOPT_REPO names a checkout of Model-Optimizer whose release is that of the installed wheel; it
needs examples/hf_ptq and CHANGELOG.rst only. Texts are the standard library's sources.
"""

import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from modelopt_v4_patches import ExportOptions, Snapshot, apply_patches, export_checkpoint
from modelopt_v4_patches.calibrate import CalibrationOptions, calibrate
from modelopt_v4_patches.dequantize import dequantize_checkpoint
from modelopt_v4_patches.hf_ptq import calibrate_with_repo
from modelopt_v4_patches.registry import report_patches, revert_patches
from nvfp4_codec.checkpoint import Checkpoint

TINY = Path(__file__).resolve().parents[4] / "tests/assets/tiny-dsv4"
REPO = os.environ.get("MODELOPT_REPO", "")
DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # modelopt's, on whatever it finds installed
    pytest.mark.skipif(not REPO, reason="MODELOPT_REPO does not name a Model-Optimizer checkout"),
]
pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")

#: GPU and CPU sum in another order and round to BF16; the largest of many inputs follows. (On this
#: model and text, amax in BF16 and in fp32 differ by 0.3 % in the median and by 1.4 % at most.)
WORST, MEDIAN = 2.0**-4, 2.0**-7


@pytest.fixture(autouse=True, scope="module")
def originals_afterwards() -> Iterator[None]:
    yield
    revert_patches()


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "bf16"
    dequantize_checkpoint(TINY, folder)
    return folder


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen texts longer than a sequence: hf_ptq.py pads shorter ones, and calibrates on it."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    long = [text for path in sources if len(text := path.read_text("utf-8", "ignore")) > 4096]
    path = tmp_path_factory.mktemp("texts") / "stdlib.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in long[:16]))
    return path


def logits(bf16: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bf16, dtype="bfloat16").to(DEVICE)
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(64, device=DEVICE)[None]).logits
    return found


def test_the_forward_fails_without_the_rms_norm_patch_and_works_with_it(bf16: Path) -> None:
    revert_patches()
    state = {row.patch: row.state for row in report_patches()}["rms-norm"]
    if state == "fixed upstream":
        pytest.skip("this transformers' RMSNorm has no fault (5.10.4 to 5.18 have)")
    assert state == "needed"
    with pytest.raises(RuntimeError, match="same dtype"):
        logits(bf16)
    apply_patches()
    assert logits(bf16).isfinite().all()


@pytest.fixture(scope="module")
def snapshots(
    bf16: Path, jsonl: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """hf_ptq.main's, on the GPU, and the library route's, on the CPU."""
    folder = tmp_path_factory.mktemp("snapshots")
    theirs, ours = folder / "hf_ptq.safetensors", folder / "library.safetensors"
    calibrate_with_repo(Path(REPO), bf16, theirs, jsonl, CalibrationOptions(num_samples=16))
    calibrate(bf16, ours, jsonl, CalibrationOptions(num_samples=16, device="cpu"))
    return theirs, ours


def test_the_gpus_snapshot_is_the_cpus_within_bounds(snapshots: tuple[Path, Path]) -> None:
    theirs, ours = (Snapshot.load(path) for path in snapshots)
    assert theirs.complete
    assert theirs.amax.keys() == ours.amax.keys()
    assert theirs.quantizers == ours.quantizers
    differences = []
    for name, amax in ours.amax.items():
        assert theirs.amax[name].device.type == "cpu"
        if "weight_quantizer" in name:
            assert torch.equal(theirs.amax[name], amax), name
        else:
            differences.append(float((theirs.amax[name] / amax - 1).abs().max()))
    differences.sort()
    assert differences[-1] <= WORST
    assert differences[len(differences) // 2] <= MEDIAN


def test_both_export_to_the_same_checkpoint_but_for_input_scales(
    snapshots: tuple[Path, Path], tmp_path: Path
) -> None:
    folders = [tmp_path / "gpu", tmp_path / "cpu"]
    for snapshot, folder in zip(snapshots, folders, strict=True):
        export_checkpoint(TINY, snapshot, folder, ExportOptions(preset="full"))
    with Checkpoint.open(folders[0]) as gpu, Checkpoint.open(folders[1]) as cpu:
        assert gpu.tensors.keys() == cpu.tensors.keys()
        scales = [name for name in gpu.tensors if name.endswith(".input_scale")]
        assert len(scales) > 200
        for name in gpu.tensors:
            if name in scales:
                ratio = float(gpu.tensor(name) / cpu.tensor(name))
                assert abs(ratio - 1) <= WORST, name
            else:
                assert gpu.read(name).tobytes() == cpu.read(name).tobytes(), name


def test_modelopts_own_export_follows_the_snapshot(bf16: Path, jsonl: Path, tmp_path: Path) -> None:
    """Their export reads amax and weights from where the patches put them."""
    export = tmp_path / "export"
    calibrate_with_repo(
        Path(REPO), bf16, tmp_path / "amax.safetensors", jsonl,
        CalibrationOptions(num_samples=2), modelopt_export=export,
    )  # fmt: skip
    assert (tmp_path / "amax.safetensors").is_file()
    with Checkpoint.open(export) as checkpoint:
        scales = [name for name in checkpoint.tensors if name.endswith("weight_scale_2")]
        assert len(scales) > 200
        assert all(float(checkpoint.tensor(name)) > 0 for name in scales)
    assert json.loads((export / "config.json").read_text())["quantization_config"]
