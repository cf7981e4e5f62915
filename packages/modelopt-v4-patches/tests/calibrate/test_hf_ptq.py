"""modelopt's hf_ptq.py, driven: a minimal checkout here, real ones where MODELOPT_REPO says.

MODELOPT_REPO: one or more checkouts of Model-Optimizer, separated as in PATH.
"""

import ast
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from modelopt_v4_patches import Snapshot
from modelopt_v4_patches.calibrate import CalibrationOptions, calibrate
from modelopt_v4_patches.calibration.checkout import (
    SHELL_NAMES,
    check_release,
    check_script,
    refuse_arguments,
)
from modelopt_v4_patches.cli import main as dsv4_quantize
from modelopt_v4_patches.errors import CalibrationError, VersionError
from modelopt_v4_patches.hf_ptq import calibrate_with_repo

pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

OPTIONS = CalibrationOptions(num_samples=3, sequence_length=160, device="cpu")
REPOS = [Path(word) for word in os.environ.get("MODELOPT_REPO", "").split(os.pathsep) if word]
WITHOUT_REPO = "MODELOPT_REPO does not name a checkout of Model-Optimizer"


@pytest.fixture
def repo(checkout: Callable[..., Path]) -> Path:
    return checkout()


def test_the_snapshot_is_the_library_routes(
    repo: Path, bf16: Path, jsonl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    calibrate(bf16, ours, jsonl, OPTIONS)
    words = ["calibrate", str(bf16), str(theirs), "--dataset", str(jsonl), "--samples", "3"]
    words += ["--sequence-length", "160", "--device", "cpu", "--modelopt-repo", str(repo)]
    assert dsv4_quantize([*words, "--json"]) == 0
    assert '"quantizers": 212' in capsys.readouterr().out
    assert theirs.read_bytes() == ours.read_bytes()
    assert not (tmp_path / "export").exists()
    assert not {"hf_ptq", "sibling"} & sys.modules.keys()
    assert not [entry for entry in sys.path if str(repo) in entry]


def test_goes_on_to_modelopts_export_when_asked_to(
    repo: Path, bf16: Path, jsonl: Path, tmp_path: Path
) -> None:
    path, export = tmp_path / "amax.safetensors", tmp_path / "export"
    calibrate_with_repo(
        repo, bf16, path, jsonl, OPTIONS, ["--calib_size=1", "--calib_seq", "32"],
        modelopt_export=export,
    )  # fmt: skip
    assert export.read_text() == "exported"
    metadata = Snapshot.load(path).metadata
    assert (metadata["num_samples"], metadata["sequence_length"]) == ("1", "32")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--low_memory_mode"], "--low_memory_mode is refused: weights are compressed"),
        (["--low"], "--low_memory_mode is refused"),  # argparse completes it
        (["--qformat", "nvfp4_awq"], "--qformat nvfp4_awq is refused"),
        (["--qformat", "fp8"], "--qformat fp8 is refused"),
        (["--sparsity_fmt", "sparsegpt"], "--sparsity_fmt is refused: nothing is calibrated"),
        (["--pyt_ckpt_path", "/elsewhere"], "--pyt_ckpt_path: the source is given"),
        (["--quant", "nvfp4"], "option of huggingface_example.sh; hf_ptq.py calls it --qformat"),
        (["--calib=512"], "hf_ptq.py calls it --calib_size"),
        (["--tasks", "quant"], "hf_ptq.py has none like it"),
        (["--no_such_option"], "hf_ptq.py refused its arguments"),
    ],
)
def test_what_breaks_v4_is_refused_before_anything_is_loaded(
    words: list[str],
    message: str,
    checkout: Callable[..., Path],
    bf16: Path,
    jsonl: Path,
    tmp_path: Path,
) -> None:
    repo = checkout(("AutoModelForCausalLM", "absent"))
    with pytest.raises(CalibrationError, match=message):
        calibrate_with_repo(repo, bf16, tmp_path / "amax.safetensors", jsonl, OPTIONS, words)
    assert not (tmp_path / "amax.safetensors").exists()


def test_without_a_gpu_the_library_route_is_named(
    checkout: Callable[..., Path],
    bf16: Path,
    jsonl: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("modelopt_v4_patches.calibration.memory.free_gpu_memory", list)
    repo = checkout(("def parse_args", "raise SystemExit\n\n\ndef parse_args"))
    with pytest.raises(CalibrationError, match="needs a GPU and there is none.*library route"):
        calibrate_with_repo(repo, bf16, tmp_path / "amax.safetensors", jsonl, CalibrationOptions())


def test_an_fp8_source_is_refused_before_the_script_is_executed(
    checkout: Callable[..., Path], official: Path, jsonl: Path, tmp_path: Path
) -> None:
    repo = checkout(("def parse_args", "raise SystemExit\n\n\ndef parse_args"))
    with pytest.raises(CalibrationError, match="quantized by 'fp8'.*dsv4-quantize dequant"):
        calibrate_with_repo(repo, official, tmp_path / "amax.safetensors", jsonl, OPTIONS)


def test_another_release_is_refused(
    checkout: Callable[..., Path], tmp_path: Path, bf16: Path, jsonl: Path
) -> None:
    repo = checkout(release="0.44")
    with pytest.raises(VersionError, match=r"is of Model-Optimizer 0.44, nvidia-modelopt 0.4"):
        calibrate_with_repo(repo, bf16, tmp_path / "amax.safetensors", jsonl, OPTIONS)
    with pytest.raises(CalibrationError, match="has no examples/hf_ptq/hf_ptq.py or"):
        check_script(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def main(args)", "def main(args, extra)", "main.* is expected, found .*extra"),
        ("def parse_args()", "def parse()", "parse_args.* is expected, found None"),
        ("    full_model,\n", "    model,\n", "export_quantized.*found"),
        ("def load_model(args)", "def load_model(arguments)", "load_model.*found"),
        ("    export_quantized(args, model", "    return (args, model", "post_quantize no longer"),
        ("    args = parse_args()\n", "    pass\n", "__main__ no longer begins"),
        ('"__main__"', '"main"', "__main__ no longer begins"),
        ("\n    main(args)\n", "\n    main(args); print()\n", "__main__ no longer ends"),
    ],
)
def test_upstream_drift_is_an_error_that_names_it(
    old: str, new: str, message: str, checkout: Callable[..., Path]
) -> None:
    with pytest.raises(CalibrationError, match=message):
        check_script(checkout((old, new)))


def test_a_script_that_ends_early_is_an_error(
    checkout: Callable[..., Path], bf16: Path, jsonl: Path, tmp_path: Path
) -> None:
    repo = checkout(("    mtq.quantize", "    return\n    mtq.quantize"))
    with pytest.raises(CalibrationError, match="ended without exporting"):
        calibrate_with_repo(repo, bf16, tmp_path / "amax.safetensors", jsonl, OPTIONS)


#: SHA-256 of the __main__ block's text without white space. Another one is another set of
#: conversions: read it, see that running it as it is still suits the driver, and add it.
MAIN_BLOCKS = {
    "0.45": "763174988f04d055c3542410a3cab86cd31f03e5aafb83025ddd6118dc83132c",
    "0.46": "7d80fd94b1af3d6101063046bfac1bcc3d50a8fa11306cf3cb2700a08834bffa",
    "0.47": "7d80fd94b1af3d6101063046bfac1bcc3d50a8fa11306cf3cb2700a08834bffa",
}


@pytest.mark.skipif(not REPOS, reason=WITHOUT_REPO)
@pytest.mark.parametrize("real", REPOS, ids=lambda repo: repo.name)
def test_a_real_checkout_has_not_drifted(real: Path) -> None:
    script = check_script(real)
    source = script.path.read_text()
    text = "".join(ast.get_source_segment(source, statement) or "" for statement in script.block)
    digest = hashlib.sha256(re.sub(r"\s", "", text).encode()).hexdigest()
    assert digest == MAIN_BLOCKS[script.release]
    options = set(re.findall(r'"(--[a-z0-9_]+)"', source))
    ours = (
        "pyt_ckpt_path", "export_path", "qformat", "kv_cache_qformat", "calib_size", "calib_seq",
        "batch_size", "gpu_max_mem_percentage", "dataset", "device", "use_seq_device_map",
        "skip_generate", "low_memory_mode", "trust_remote_code",
    )  # fmt: skip
    assert {f"--{name}" for name in ours} <= options
    assert not SHELL_NAMES.keys() & options
    shell = (script.path.parent / "scripts/parser.sh").read_text()
    foreign = set(re.findall(r"^ *(--[a-z_]+) \)", shell, re.MULTILINE)) - options
    assert foreign <= SHELL_NAMES.keys()
    for name in SHELL_NAMES:
        with pytest.raises(CalibrationError, match=r"option of huggingface_example\.sh"):
            refuse_arguments([name])


@pytest.mark.skipif(not REPOS, reason=WITHOUT_REPO)
def test_a_real_checkout_runs_and_gives_the_library_routes_snapshot(
    bf16: Path, jsonl: Path, tmp_path: Path
) -> None:
    """On the CPU: hf_ptq.py asks for a GPU that its calibration does not need."""
    pytest.importorskip("datasets", reason="hf_ptq.py reads its dataset with datasets")
    installed = ".".join(version("nvidia-modelopt").split(".")[:2])
    fitting = [repo for repo in REPOS if check_script(repo).release == installed]
    if not fitting:
        pytest.skip(f"no checkout of {installed}, which is installed, among MODELOPT_REPO")
    place = check_script(fitting[0]).path.parent
    repo = tmp_path / "repo"
    shutil.copytree(place, repo / place.relative_to(fitting[0]))
    shutil.copy(fitting[0] / "CHANGELOG.rst", repo)
    script = check_script(repo).path
    guarded = script.read_text()
    assert guarded.count("if not torch.cuda.is_available():") == 1
    script.write_text(guarded.replace("if not torch.cuda.is_available():", "if False:"))
    check_release(check_script(repo))

    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    calibrate(bf16, ours, jsonl, OPTIONS)
    calibrate_with_repo(repo, bf16, theirs, jsonl, OPTIONS)
    assert theirs.read_bytes() == ours.read_bytes()
