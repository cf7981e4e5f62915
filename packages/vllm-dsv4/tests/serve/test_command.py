"""The command ``vllm-dsv4 serve``: own options anywhere, the line, the program it becomes."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from nvfp4_codec.errors import CheckpointError
from vllm_dsv4.cli import serve as cli
from vllm_dsv4.cli.serve import register
from vllm_dsv4.errors import VersionError

Checkpoint = Callable[..., Path]


def call(*words: object) -> int:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    arguments = parser.parse_args(["serve", *map(str, words)])
    code: int = arguments.run(arguments)
    return code


@pytest.mark.parametrize("before", [True, False], ids=["before the folder", "after it"])
def test_own_options_stand_anywhere(
    checkpoint: Checkpoint, before: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--gpus", "H200:2", "--dry-run", "--shared-dtype", "bf16", "--verify-load"]
    theirs = ["--port", "8001", "--served-model-name", "v4"]
    folder = checkpoint("full")
    words = [*own, folder, *theirs] if before else [folder, *theirs[:2], *own, *theirs[2:]]
    assert call(*words) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = shlex.split(line)
    assert found[:3] == ["vllm", "serve", str(folder)]
    assert found[-4:] == theirs
    place = found.index("--additional-config")
    assert json.loads(found[place + 1]) == {
        "vllm_dsv4": {"shared_dtype": "bf16", "verify_load": True}
    }


@pytest.mark.parametrize("before", [True, False], ids=["before the folder", "after it"])
def test_the_doctor_can_be_skipped(
    checkpoint: Checkpoint, checkpoints: ModuleType, tmp_path: Path, before: bool
) -> None:
    folder = shutil.copytree(checkpoint("full"), tmp_path / "copy")
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"missing-file.*--skip-doctor"):
        call(folder, "--gpus", "H200:1", "--dry-run")
    own = ["--skip-doctor", "--gpus", "H200:1", "--dry-run"]
    assert call(*(own if before else ()), folder, *(() if before else own)) == 0


def test_a_damaged_tokenizer_does_not_matter_where_another_is_given(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("full"), tmp_path / "copy")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: .*damaged-file"):
        call(folder, "--gpus", "H200:1", "--dry-run")
    assert call(folder, "--gpus", "H200:1", "--dry-run", "--tokenizer", "elsewhere") == 0


def test_a_missing_folder_is_all_that_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call("--dry-run")
    assert capsys.readouterr().err.endswith("arguments are required: folder\n")


def test_json(checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(checkpoint("full"), "--gpus", "B200:1", "--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert shlex.split(found["line"]) == found["command"]
    assert found["plan"]["mega_moe"] is True


def test_it_becomes_what_it_prints(
    checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class BecameError(Exception):
        pass

    def execv(program: str, argv: tuple[str, ...]) -> None:
        raise BecameError(program, argv)

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(cli, "_vllm", lambda: "/there/vllm")
    with pytest.raises(BecameError) as caught:
        call(checkpoint("full"), "--gpus", "H200:1", "--enforce-eager")
    program, argv = caught.value.args
    assert program == "/there/vllm"
    assert list(argv) == shlex.split(capsys.readouterr().out)
    assert argv[-1] == "--enforce-eager"


def test_no_vllm_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_dsv4.compat.version", lambda name: "0.34.0")
    with pytest.raises(VersionError, match=r"this is vLLM 0.34.0"):
        cli._vllm()

    def missing(name: str) -> str:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("vllm_dsv4.compat.version", missing)
    with pytest.raises(VersionError, match="vLLM is not installed here"):
        cli._vllm()
