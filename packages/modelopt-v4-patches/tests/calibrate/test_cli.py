"""The calibrate command: what it shows, and what it asks for."""

import json
from pathlib import Path

import pytest

from modelopt_v4_patches import Snapshot
from modelopt_v4_patches.cli import main

pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_shows_what_the_snapshot_holds(
    bf16: Path, jsonl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "amax.safetensors"
    words = ["calibrate", str(bf16), str(path), "--dataset", str(jsonl), "--samples", "2"]
    words += ["--sequence-length", "64", "--batch-size", "2", "--device", "cpu"]
    assert main([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)  # nothing that modelopt prints is among it
    snapshot = Snapshot.load(path)
    assert shown["quantizers"] == len(snapshot.amax) == 212
    assert shown["samples"] == 2
    assert shown["uncalibrated"] == []
    assert tuple(shown["unseen_experts"]) == snapshot.unseen_experts
    assert main(words) == 2
    assert "complete snapshot" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0
    table = capsys.readouterr().out
    assert "unseen experts" in table
    assert "212" in table


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--dataset FILE.jsonl is missing"),
        (["--hf-ptq", "--recipe", "x"], "--hf-ptq and --modelopt-export go with --modelopt-repo"),
        (["--modelopt-export", "x"], "--hf-ptq and --modelopt-export go with --modelopt-repo"),
        (["--samples", "0"], "num_samples (--samples) is 0; at least 1 is needed"),
        (["--memory-fraction", "1.5"], "memory_fraction (--memory-fraction) is 1.5; weights"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], message: str, bf16: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", str(bf16), str(tmp_path / "amax.safetensors"), *words]) == 2
    assert message in capsys.readouterr().err


def test_help_says_what_it_has_to(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "EXECUTES its hf_ptq.py" in shown
    assert "without scales (fp8_cast)" in shown
    assert "random numbers (1234)" in shown
