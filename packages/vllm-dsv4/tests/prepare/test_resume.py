"""Killed at any point, continued to the same bytes; and the command."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from nvfp4_codec.checkpoint.job import PLAN_NAME
from nvfp4_codec.errors import CheckpointError
from vllm_dsv4.cli.prepare import register
from vllm_dsv4.prepare import MANIFEST, prepare_checkpoint

Checkpoint = Callable[..., Path]


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder, hidden ones too, with the hash of its bytes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def source(
    checkpoint: Checkpoint, checkpoints: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Three shards that tear fused pairs apart, with scales that disagree."""
    folder = tmp_path_factory.mktemp("torn") / "in"
    return checkpoints.split(shutil.copytree(checkpoint("two-scales", "hf"), folder))


@pytest.fixture(scope="module")
def clean(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    output = tmp_path_factory.mktemp("clean") / "out"
    prepare_checkpoint(source, output)
    return output, tree(output)


def test_shards_do_not_matter(
    clean: tuple[Path, dict[str, str]], checkpoint: Checkpoint, checkpoints: ModuleType,
    oracle: ModuleType, tmp_path: Path,
) -> None:  # fmt: skip
    prepare_checkpoint(checkpoint("two-scales", "hf"), tmp_path / "one")
    whole, torn = checkpoints.read(tmp_path / "one"), checkpoints.read(clean[0])
    assert whole.keys() == torn.keys()
    assert all(oracle.same(whole[name], torn[name]) for name in whole)
    index = json.loads((clean[0] / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == torn.keys()
    assert set(index["weight_map"].values()) == {
        path.name for path in clean[0].glob("*.safetensors")
    }


def test_the_manifest_tells_every_file(clean: tuple[Path, dict[str, str]]) -> None:
    output, files = clean
    manifest = json.loads((output / MANIFEST).read_text())
    told = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    assert told == {name: sha for name, sha in files.items() if name != MANIFEST}
    notes = manifest["notes"].values()
    assert any("sqnr_db" in note for note in notes)
    assert any("inexact_blocks" in note for note in notes)


def test_killed_in_every_kind_of_step_it_resumes_to_the_same_bytes(
    source: Path, clean: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    """The folder is copied before an open, write, fsync or rename: what a kill there leaves.

    A few of each kind: that any step can be resumed is the codec's to test, that ours depend on
    nothing but the input is tested here.
    """
    output = tmp_path / "out"
    seen: Counter[str] = Counter()
    copies: list[Path] = []

    def snapshot(step: str) -> None:
        seen[step] += 1
        if output.exists() and seen[step] in (1, 5, 300):
            copies.append(tmp_path / "killed" / f"{step.replace(' ', '-')}-{seen[step]}")
            shutil.copytree(output, copies[-1])

    before = tree(source)
    prepare_checkpoint(source, output, fault=snapshot)
    assert tree(output) == clean[1]
    assert {copy.name.rpartition("-")[0].replace("-", " ") for copy in copies} == set(seen)
    assert len(copies) >= 10
    for copy in copies:
        prepare_checkpoint(source, copy, resume=True)
        assert tree(copy) == clean[1], copy.name
    assert tree(source) == before


@pytest.mark.parametrize(
    "kills", [pytest.param(2, id="few"), pytest.param(60, id="many", marks=pytest.mark.full)]
)
def test_sigkill_at_random_points(
    source: Path, clean: tuple[Path, dict[str, str]], tmp_path: Path, kills: int
) -> None:
    driver = Path(__file__).with_name("kill_driver.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [str(source), str(tmp_path), str(kills), "5"]
    subprocess.run([sys.executable, driver, *arguments], check=True, env=environment)
    assert tree(tmp_path / "whole") == clean[1]
    killed = sorted(tmp_path.glob("killed-*"))
    assert len(killed) == kills
    assert any((output / PLAN_NAME).exists() for output in killed)  # how many depends on the load
    for output in killed:
        prepare_checkpoint(source, output, resume=True)
        assert tree(output) == clean[1]


def test_a_run_is_not_continued_on_another_input(
    source: Path, checkpoints: ModuleType, tmp_path: Path
) -> None:
    class Killed(BaseException):
        pass

    def kill(step: str) -> None:
        if step == "rename" and list((tmp_path / "out").glob("*.safetensors")):
            raise Killed

    with pytest.raises(Killed):
        prepare_checkpoint(source, tmp_path / "out", fault=kill)
    with pytest.raises(CheckpointError, match="Pass --resume to continue"):
        prepare_checkpoint(source, tmp_path / "out")
    other = shutil.copytree(source, tmp_path / "other")
    before = tree(tmp_path / "out")
    checkpoints.change_config(other, lambda config: config.update(eos_token_id=5))
    with pytest.raises(CheckpointError, match="the interrupted run differs in: .*documents"):
        prepare_checkpoint(other, tmp_path / "out", resume=True)
    assert tree(tmp_path / "out") == before
    prepare_checkpoint(source, tmp_path / "out", resume=True)


def call(*words: object) -> int:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    arguments = parser.parse_args(["prepare", *map(str, words)])
    code: int = arguments.run(arguments)
    return code


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(source, tmp_path / "out") == 0
    text = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "routed_expert nvfp4 nvfp4 240" in text
    assert "wq_b nvfp4 fp8_block 4" in text
    assert "3 files written, 0 kept from before" in text
    assert any("linears rounded once more, at" in line for line in text)
    assert any(line.startswith("160 expert matrices got the scale") for line in text)
    assert call(source, tmp_path / "out", "--resume", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["complete_unchecked"] is True
    assert found["written"] == []
    assert {"role": "wkv", "stored": "nvfp4", "written": "fp8_block", "count": 4} in found[
        "linears"
    ]
