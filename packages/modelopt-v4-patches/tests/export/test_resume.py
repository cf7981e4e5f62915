"""Killed at any point, continued to the same bytes; full disks and wrong sources say what to do."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelopt_v4_patches.executor import LocalProcesses
from modelopt_v4_patches.export import ExportOptions, export_checkpoint, make_job
from nvfp4_codec.checkpoint.job import PLAN_NAME, run
from nvfp4_codec.checkpoint.writer import TEMP_SUFFIX
from nvfp4_codec.errors import CheckpointError

Build = Callable[..., Path]


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder, hidden ones too, with the hash of its bytes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def small_block(tensors: dict[str, Tensor]) -> None:
    """Puts blocks of one expert below the window, so that the manifest has such notes."""
    tensors["layers.0.ffn.experts.1.w2.scale"].view(torch.uint8)[0] += 60


@pytest.fixture
def case(small: Build, make_snapshot: Build, tmp_path: Path) -> tuple[Path, Path]:
    source = small(tmp_path / "in", small_block)
    return source, make_snapshot(source, tmp_path / "amax.safetensors")


@pytest.fixture
def clean(case: tuple[Path, Path], tmp_path: Path) -> dict[str, str]:
    export_checkpoint(*case, tmp_path / "clean")
    return tree(tmp_path / "clean")


def test_the_manifest_tells_every_file_and_note(clean: dict[str, str], tmp_path: Path) -> None:
    manifest = json.loads((tmp_path / "clean" / "export_manifest.json").read_text())
    files = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    assert files == {n: sha for n, sha in clean.items() if n != "export_manifest.json"}
    sizes = {name: (tmp_path / "clean" / name).stat().st_size for name in files}
    assert sizes == {name: entry["bytes"] for name, entry in manifest["files"].items()}
    assert any("requantized_blocks" in note for note in manifest["notes"].values())
    assert any("input_scale_from" in note for note in manifest["notes"].values())


def test_killed_at_every_step_it_resumes_to_the_same_bytes(
    case: tuple[Path, Path], clean: dict[str, str], tmp_path: Path
) -> None:
    """The folder is copied before each open, write, fsync and rename: what a kill there leaves."""
    output = tmp_path / "out"
    copies: list[Path] = []

    def snapshot(step: str) -> None:
        copies.append(tmp_path / "killed" / f"{len(copies)}-{step.replace(' ', '-')}")
        if output.exists():
            shutil.copytree(output, copies[-1])

    before = tree(case[0])
    run(make_job(*case, ExportOptions()), output, fault=snapshot)
    assert tree(output) == clean
    assert len(copies) >= 50
    # each step once, writes of one kind thinned out: about sixty of them
    writes = [copy for copy in copies if copy.name.endswith("write")]
    kept = set(writes[:: max(1, len(writes) // 30)])
    chosen = [copy for copy in copies if copy in kept or copy not in writes]
    assert len(chosen) >= 50
    for copy in chosen:
        run(make_job(*case, ExportOptions()), copy, resume=True)
        assert tree(copy) == clean, copy.name
    assert tree(case[0]) == before


@pytest.mark.parametrize(
    "kills", [pytest.param(6, id="few"), pytest.param(100, id="many", marks=pytest.mark.full)]
)
def test_sigkill_at_random_points(
    case: tuple[Path, Path], clean: dict[str, str], tmp_path: Path, kills: int
) -> None:
    driver = Path(__file__).with_name("kill_driver.py")
    arguments = [*map(str, case), str(tmp_path), str(kills), "11"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, driver, *arguments], check=True, env=environment)
    assert tree(tmp_path / "whole") == clean
    killed = sorted(tmp_path.glob("killed-*"))
    assert len(killed) == kills
    assert any((output / PLAN_NAME).exists() for output in killed)  # how many depends on the load
    for output in killed:
        export_checkpoint(*case, output, resume=True)
        assert tree(output) == clean


def test_two_processes_write_the_same_bytes(
    case: tuple[Path, Path], clean: dict[str, str], tmp_path: Path
) -> None:
    """Partners of fused projections lie in other shards, which another process writes."""
    export_checkpoint(*case, tmp_path / "out", executor=LocalProcesses(2))
    assert tree(tmp_path / "out") == clean


def interrupted(case: tuple[Path, Path], output: Path) -> None:
    class Killed(BaseException):
        pass

    fsyncs = 0

    def kill(step: str) -> None:
        nonlocal fsyncs
        fsyncs += step == "fsync"
        if fsyncs == 5:
            raise Killed

    with pytest.raises(Killed):
        run(make_job(*case, ExportOptions()), output, fault=kill)
    assert (output / PLAN_NAME).exists()


@pytest.mark.parametrize(
    ("options", "other_snapshot", "message"),
    [
        (ExportOptions("experts"), False, "arguments"),
        (ExportOptions(kv_cache="none"), False, "arguments"),
        (ExportOptions(), True, "arguments"),
    ],
    ids=["preset", "config", "snapshot"],
)
def test_a_run_is_not_continued_as_another(
    case: tuple[Path, Path], make_snapshot: Build, tmp_path: Path,
    options: ExportOptions, other_snapshot: bool, message: str,
) -> None:  # fmt: skip
    source, snapshot = case
    interrupted(case, tmp_path / "out")
    if other_snapshot:
        name = "model.layers.0.self_attn.o_b_proj.input_quantizer"
        snapshot = make_snapshot(source, tmp_path / "other.safetensors", {name: 77.0})
    before = tree(tmp_path / "out")
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(source, snapshot, tmp_path / "out", options, resume=True)
    assert tree(tmp_path / "out") == before


def test_a_disk_without_room_is_known_before_the_first_byte(
    case: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(shard.layout.size for shard in make_job(*case, ExportOptions()).shards)
    monkeypatch.setattr(os, "statvfs", lambda path: _Disk())
    with pytest.raises(CheckpointError, match=f"{needed} bytes are needed.* 4096 are free"):
        export_checkpoint(*case, tmp_path / "out")
    assert tree(tmp_path / "out") == {}


class _Disk:
    f_bavail, f_frsize = 1, 4096


def test_a_disk_that_fills_up_leaves_what_can_be_continued(
    case: tuple[Path, Path], clean: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    original = os.pwrite

    def full(*arguments: Any) -> int:
        if len(list(output.glob("*.safetensors"))) == 1:  # while the second shard is written
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(CheckpointError, match=r"disk is full.* needs [0-9]+ bytes"):
            export_checkpoint(*case, output)
    assert not list(output.glob(f".*{TEMP_SUFFIX}"))
    export_checkpoint(*case, output, resume=True)
    assert tree(output) == clean


def rename(tensors: dict[str, Tensor]) -> None:
    tensors["layers.0.attn.wq_c.weight"] = tensors.pop("layers.0.attn.kv_norm.weight")


def nan_scale(tensors: dict[str, Tensor]) -> None:
    tensors["layers.1.ffn.experts.0.w1.scale"].view(torch.uint8)[0, 0] = 255


def nan_weight(tensors: dict[str, Tensor]) -> None:
    tensors["layers.1.attn.wo_b.weight"].view(torch.uint8)[0, 0] = 0x7F


def zero_weight(tensors: dict[str, Tensor]) -> None:
    tensors["layers.1.attn.wo_b.weight"].zero_()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (rename, r"1 unknown: layers\.0\.attn\.wq_c\.weight.*1 missing: layers\.0\.attn\.kv_norm"),
        (nan_scale, r"tensor layers\.1\.ffn\.experts\.0\.w1\.weight: .*NaN"),
        (nan_weight, r"tensor layers\.1\.attn\.wo_b\.weight: .*NaN"),
        (zero_weight, r"tensor layers\.1\.attn\.wo_b\.weight: "),
    ],
)
def test_a_damaged_source_is_refused_by_tensor(
    small: Build, make_snapshot: Build, tmp_path: Path,
    damage: Callable[[dict[str, Tensor]], None], message: str,
) -> None:  # fmt: skip
    source = small(tmp_path / "in", damage)
    snapshot = make_snapshot(source, tmp_path / "amax.safetensors")
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        export_checkpoint(source, snapshot, tmp_path / "out")


def test_an_export_is_not_exported_again(
    case: tuple[Path, Path], clean: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="an export, not the official checkpoint"):
        export_checkpoint(tmp_path / "clean", case[1], tmp_path / "out")
