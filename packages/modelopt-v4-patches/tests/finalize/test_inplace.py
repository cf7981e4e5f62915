"""In place: killed at any point, finishing gives the finished folder and undoing the old one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from modelopt_v4_patches.finalize import finalize_checkpoint, undo_in_place
from modelopt_v4_patches.renaming.inplace import JOURNAL_NAME
from nvfp4_codec.checkpoint import Checkpoint
from nvfp4_codec.errors import CheckpointError

Make = Callable[..., Path]


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder with the hash of its bytes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def visible(folder: Path) -> dict[str, str]:
    """The same without what a killed writer may leave: hidden temporary files."""
    return {name: digest for name, digest in tree(folder).items() if not name.startswith(".")}


@pytest.fixture
def finalize(reference_config: Path) -> Callable[..., Any]:
    """Runs in place; the reference's folder has a tokenizer file that exports lack."""
    (reference_config.parent / "special_tokens_map.json").write_text("{}")

    def run(folder: Path, **options: Any) -> Any:
        return finalize_checkpoint(
            folder, None, reference_config=reference_config.parent, in_place=True, **options
        )

    return run


def test_in_place_and_in_a_new_folder_are_the_same(
    make_export: Make, finalize: Callable[..., Any], reference_config: Path, tmp_path: Path
) -> None:
    source = make_export()
    finalize_checkpoint(source, tmp_path / "new", reference_config=reference_config.parent)
    inodes = {path.name: path.stat().st_ino for path in source.glob("*.safetensors")}
    report = finalize(source)
    assert report.renamed > 0
    assert report.written is None
    assert tree(source) == tree(tmp_path / "new")
    assert {path.name: path.stat().st_ino for path in source.glob("*.safetensors")} == inodes
    # and once more changes nothing
    before = {path: path.stat().st_mtime_ns for path in source.iterdir()}
    assert finalize(source).renamed == 0
    assert {path: path.stat().st_mtime_ns for path in source.iterdir()} == before


def test_killed_at_every_step_it_can_be_finished_and_undone(
    make_export: Make, finalize: Callable[..., Any], tmp_path: Path
) -> None:
    """The folder is copied before every open, write, fsync, rename and removal."""
    source = make_export()
    original = tree(source)
    copies: list[tuple[str, Path]] = []

    def snapshot(step: str) -> None:
        copies.append((step, tmp_path / f"killed-{len(copies)}"))
        shutil.copytree(source, copies[-1][1])

    finalize(source, fault=snapshot)
    finished = tree(source)
    steps = [step for step, _ in copies]
    assert steps.count("write header") == steps.count("fsync header") == 2
    assert "remove journal" in steps
    begun = 0
    for step, copy in copies:
        if not (copy / JOURNAL_NAME).exists():
            assert visible(copy) == original, step
            finalize(copy)
            assert tree(copy) == finished, step
            continue
        begun += 1
        with pytest.raises(CheckpointError, match="--in-place --resume"):
            finalize(copy)
        other = copy.with_name(copy.name + "-undo")
        shutil.copytree(copy, other)
        undo_in_place(other)
        assert visible(other) == original, step
        finalize(copy, resume=True)
        assert visible(copy) == finished, step
    assert begun >= 10


@pytest.mark.parametrize("cut", [1, 512, 4096])
@pytest.mark.parametrize("undo", [False, True])
def test_a_torn_header_write_is_repaired(
    make_export: Make, finalize: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path, cut: int, undo: bool,
) -> None:  # fmt: skip
    """The machine stops when ``cut`` sectors' worth of a header is new and the rest is old."""
    source = make_export()
    original = tree(source)
    shutil.copytree(source, tmp_path / "clean")
    finalize(tmp_path / "clean")
    pwrite = os.pwrite

    def torn(fd: int, data: Any, offset: int) -> int:
        if Path(os.readlink(f"/proc/self/fd/{fd}")).name.startswith("model-"):
            pwrite(fd, data[: cut // 512 * 512], offset)
            raise OSError(5, "Input/output error")
        return pwrite(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", torn)
        with pytest.raises(CheckpointError, match="Input/output error"):
            finalize(source)
    if undo:
        undo_in_place(source)
        assert tree(source) == original
    else:
        finalize(source, resume=True)
        assert tree(source) == tree(tmp_path / "clean")


@pytest.mark.parametrize(
    "kills", [pytest.param(8, id="few"), pytest.param(60, id="many", marks=pytest.mark.full)]
)
def test_sigkill_at_random_points(
    make_export: Make, finalize: Callable[..., Any], reference_config: Path, tmp_path: Path,
    kills: int,
) -> None:  # fmt: skip
    """A forked process is killed for real; see kill_driver.py."""
    source = make_export()
    original = tree(source)
    folders = [tmp_path / f"killed-{i}" for i in range(kills)]
    for folder in folders:
        shutil.copytree(source, folder)
    finalize(source)
    finished = tree(source)
    driver = Path(__file__).with_name("kill_driver.py")
    arguments = [str(reference_config.parent), "11", *map(str, folders)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, driver, *arguments], check=True, env=environment, capture_output=True
    )
    assert done.stdout.split() == [str(-signal.SIGKILL).encode()] * kills
    interrupted = 0
    for i, folder in enumerate(folders):
        begun = (folder / JOURNAL_NAME).exists()
        interrupted += begun
        if begun and i % 2:
            undo_in_place(folder)
            assert visible(folder) == original
        else:
            finalize(folder, resume=True)
            assert visible(folder) == finished
    assert interrupted  # how many depends on what else the machine does


def interrupt(source: Path, finalize: Callable[..., Any]) -> None:
    """Stops after the first header."""

    class Stop(BaseException):
        pass

    def stop(step: str) -> None:
        if step == "fsync header":
            raise Stop

    with pytest.raises(Stop):
        finalize(source, fault=stop)


def test_between_two_states_nothing_else_is_done(
    make_export: Make, finalize: Callable[..., Any], reference_config: Path, tmp_path: Path
) -> None:
    source = make_export()
    interrupt(source, finalize)
    with pytest.raises(CheckpointError, match="--in-place --resume, or take it back"):
        finalize_checkpoint(source, tmp_path / "out", reference_config=reference_config)
    # a file that was changed since is not written over
    shard = source / "model-00002-of-00002.safetensors"
    kept = shard.read_bytes()
    for damaged in (kept[:100] + b"x" + kept[101:], kept + b"x"):
        shard.write_bytes(damaged)
        for act in (lambda: finalize(source, resume=True), lambda: undo_in_place(source)):
            before = tree(source)
            with pytest.raises(CheckpointError, match="model-00002.*was changed since"):
                act()
            assert tree(source) == before
    shard.write_bytes(kept)
    undo_in_place(source)
    with pytest.raises(CheckpointError, match="no run in place was interrupted"):
        undo_in_place(source)


def test_two_processes_do_not_change_one_folder(
    make_export: Make, finalize: Callable[..., Any]
) -> None:
    source = make_export()
    refused = 0

    def meanwhile(step: str) -> None:
        nonlocal refused
        for act in (lambda: finalize(source, resume=True), lambda: undo_in_place(source)):
            with pytest.raises(CheckpointError, match="another process is changing"):
                act()
            refused += 1

    finalize(source, fault=meanwhile)
    assert refused > 20


@pytest.mark.parametrize("link", ["symbolic", "hard"])
def test_links_are_refused(make_export: Make, finalize: Callable[..., Any], link: str) -> None:
    """A download cache links to its files: they must not change under it."""
    source = make_export()
    shard = source / "model-00001-of-00002.safetensors"
    if link == "hard":
        (source.parent / "cache").hardlink_to(shard)
    else:
        shard.symlink_to(shard.rename(source / "blob"))
    before = tree(source)
    with pytest.raises(CheckpointError, match=r"model-00001.*is a link, or has a second name"):
        finalize(source)
    assert tree(source) == before


def test_a_header_that_does_not_fit_is_refused(
    make_export: Make, finalize: Callable[..., Any]
) -> None:
    source = make_export(scheme="half_converted", mtp=True, files=1)
    with Checkpoint.open(source) as checkpoint:
        tensors = {name: checkpoint.tensor(name) for name in checkpoint.tensors}
    alone = {"mtp.0.attn.norm.weight": tensors.pop("mtp.0.attn.norm.weight")}
    (source / "model.safetensors").unlink()
    weight_map = dict.fromkeys(tensors, "a.safetensors") | dict.fromkeys(alone, "b.safetensors")
    save_file(tensors, source / "a.safetensors")
    save_file(alone, source / "b.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    before = tree(source)
    with pytest.raises(CheckpointError, match=r"b\.safetensors.*it does not fit"):
        finalize(source)
    assert tree(source) == before


def test_data_is_never_changed_in_place(make_export: Make, finalize: Callable[..., Any]) -> None:
    source = make_export()
    before = tree(source)
    with pytest.raises(CheckpointError, match="unify changes data"):
        finalize(source, unify=True)
    with pytest.raises(CheckpointError, match="either an output folder or in_place"):
        finalize_checkpoint(source, None, reference_config=source)
    assert tree(source) == before
