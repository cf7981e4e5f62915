"""Killed at any point, continued to the same bytes; the input and other outputs untouched."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from nvfp4_codec.checkpoint import (
    Checkpoint,
    ConvertOptions,
    QuantizeOptions,
    convert_checkpoint,
    quantize_checkpoint,
)
from nvfp4_codec.checkpoint.header import TensorSpec
from nvfp4_codec.checkpoint.job import PLAN_NAME
from nvfp4_codec.checkpoint.writer import TEMP_SUFFIX, ShardWriter
from nvfp4_codec.errors import CheckpointError

Shards = Mapping[str, Mapping[str, Tensor]]
Write = Callable[[Path, Shards], Path]
Run = Callable[..., Any]


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder with the hash of its bytes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def runner(command: str) -> Run:
    def run(path: Path, output: Path, exclude: tuple[str, ...] = (), **hooks: Any) -> Any:
        with Checkpoint.open(path) as source:
            if command == "quantize":
                return quantize_checkpoint(
                    source, output, QuantizeOptions(exclude=exclude), **hooks
                )
            options = ConvertOptions("nvfp4", exclude=exclude)
            return convert_checkpoint(source, output, options, **hooks)

    return run


@pytest.fixture(params=["quantize", "convert"])
def job(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    write_checkpoint: Write,
    float_shards: Shards,
    mxfp4_shards: Shards,
) -> tuple[Path, Run]:
    shards = float_shards if request.param == "quantize" else mxfp4_shards
    return write_checkpoint(tmp_path / "in", shards), runner(request.param)


def test_killed_at_every_step_it_resumes_to_the_same_bytes(
    job: tuple[Path, Run], tmp_path: Path
) -> None:
    """The folder is copied before every open, write, fsync and rename: what a kill leaves."""
    path, run = job
    before = tree(path)
    snapshots: list[tuple[str, Path]] = []
    output = tmp_path / "out"

    def snapshot(step: str) -> None:
        copy = tmp_path / f"killed-{len(snapshots)}"
        snapshots.append((step, copy))
        if output.exists():
            shutil.copytree(output, copy)

    run(path, output, fault=snapshot)
    expected = tree(output)
    snapshot("done")
    steps = [step for step, _ in snapshots]
    assert {"open", "write", "fsync", "rename", "fsync folder", "remove plan"} <= set(steps)
    assert steps.count("rename") >= 6  # plan, two shards, index, config, tokenizer
    for step, copy in snapshots:
        run(path, copy, resume=True)
        assert tree(copy) == expected, step
    assert tree(path) == before


def test_a_kill_during_the_resumed_run_is_survived_too(
    job: tuple[Path, Run], tmp_path: Path
) -> None:
    path, run = job
    run(path, tmp_path / "clean")
    output = tmp_path / "out"

    class Killed(BaseException):
        pass

    for limit in (3, 9, 17, 30, 10_000):
        calls = 0

        def kill(step: str, limit: int = limit) -> None:
            nonlocal calls
            calls += 1
            if calls > limit:
                raise Killed(step)

        try:
            run(path, output, fault=kill, resume=True)
        except Killed:
            continue
        break
    assert tree(output) == tree(tmp_path / "clean")


@pytest.mark.parametrize(
    "kills", [pytest.param(6, id="few"), pytest.param(60, id="many", marks=pytest.mark.full)]
)
def test_sigkill_at_random_points(job: tuple[Path, Run], tmp_path: Path, kills: int) -> None:
    """A forked process writes slowly and is killed for real; see kill_driver.py."""
    path, run = job
    run(path, tmp_path / "clean")
    command = "quantize" if "up_proj" in (path / "model.safetensors.index.json").read_text() else ""
    driver = Path(__file__).with_name("kill_driver.py")
    arguments = [command or "convert", str(path), str(tmp_path), str(kills), "7"]
    paths = os.pathsep.join(sys.path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    subprocess.run([sys.executable, driver, *arguments], check=True, env=environment)
    killed = sorted(tmp_path.glob("killed-*"))
    assert len(killed) == kills
    expected = tree(tmp_path / "clean")
    interrupted = 0
    for output in killed:
        interrupted += (output / PLAN_NAME).exists() or not output.exists()
        run(path, output, resume=True)
        assert tree(output) == expected
    assert interrupted  # how many depends on what else the machine does


def interrupt(path: Path, run: Run, output: Path, at: str = "fsync") -> None:
    seen = 0

    def stop(step: str) -> None:
        nonlocal seen
        seen += step == at
        if seen == 2:  # the first is the plan's
            raise OSError(errno.EIO, "stopped by the test")

    with pytest.raises((CheckpointError, OSError)):
        run(path, output, fault=stop)


def test_an_existing_output_is_refused(job: tuple[Path, Run], tmp_path: Path) -> None:
    path, run = job
    output = tmp_path / "out"
    output.mkdir()
    (output / "precious.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(CheckpointError, match="Choose another output"):
            run(path, output, resume=resume)
    assert tree(output).keys() == {"precious.txt"}
    (output / "precious.txt").unlink()
    run(path, output)  # an empty folder holds nothing to lose
    with pytest.raises(CheckpointError, match="exists already"):
        run(path, output)
    assert run(path, output, resume=True).outcome.written == ()


def test_an_interrupted_run_needs_resume_and_equal_arguments(
    job: tuple[Path, Run], tmp_path: Path
) -> None:
    path, run = job
    output = tmp_path / "out"
    interrupt(path, run, output)
    assert (output / PLAN_NAME).exists()
    with pytest.raises(CheckpointError, match="Pass --resume"):
        run(path, output)
    with pytest.raises(CheckpointError, match="differs in: .*arguments"):
        run(path, output, exclude=("*up_proj*", "*w2*"), resume=True)
    os.utime(path / "model-00001-of-00002.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match="differs in: input"):
        run(path, output, resume=True)


def test_a_finished_shard_that_was_changed_is_noticed(
    job: tuple[Path, Run], tmp_path: Path
) -> None:
    path, run = job
    output = tmp_path / "out"
    interrupt(path, run, output, at="fsync folder")
    shard = next(output.glob("*.safetensors"))
    with shard.open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match="another size or header"):
        run(path, output, resume=True)


def test_leftover_temporary_files_are_removed(job: tuple[Path, Run], tmp_path: Path) -> None:
    path, run = job
    output = tmp_path / "out"
    interrupt(path, run, output)
    for name in ("model-00001-of-00002.safetensors", "config.json", PLAN_NAME):
        (output / f".{name}{TEMP_SUFFIX}").write_bytes(b"half")
    run(path, output, resume=True)
    assert not list(output.glob(f".*{TEMP_SUFFIX}"))


@pytest.mark.parametrize("place", ["equal", "inside", "through a link"])
def test_the_input_is_never_the_output(job: tuple[Path, Run], tmp_path: Path, place: str) -> None:
    path, run = job
    before = tree(path)
    (tmp_path / "link").symlink_to(path)
    output = {"equal": path, "inside": path / "sub", "through a link": tmp_path / "link" / "sub"}
    for resume in (False, True):
        with pytest.raises(CheckpointError, match="input is never touched"):
            run(path, output[place], resume=resume)
    file = path / "model-00001-of-00002.safetensors"
    for target in (file, path):
        with pytest.raises(CheckpointError, match=r"input is never touched|nothing to convert"):
            run(file, target)
    assert tree(path) == before


@pytest.mark.parametrize(
    ("code", "message"), [(errno.ENOSPC, "disk is full"), (errno.EIO, "Input/output error")]
)
@pytest.mark.parametrize("step", ["open", "write", "fsync", "rename"])
def test_write_errors_say_what_to_do_and_can_be_resumed(
    job: tuple[Path, Run], tmp_path: Path, code: int, message: str, step: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path, run = job
    output = tmp_path / "out"
    names = {"open": "open", "write": "pwrite", "fsync": "fsync", "rename": "replace"}
    original = getattr(os, names[step])

    def failing(*arguments: Any, **options: Any) -> Any:
        # let the plan file pass
        opening = step == "open" and str(arguments[0]).endswith(f".safetensors{TEMP_SUFFIX}")
        if opening or (step != "open" and list(output.glob(f".*.safetensors{TEMP_SUFFIX}"))):
            raise OSError(code, os.strerror(code))
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, names[step], failing)
        with pytest.raises(CheckpointError, match=f"(?s)safetensors.*{message}.*--resume"):
            run(path, output)
    assert not list(output.glob(f".*.safetensors{TEMP_SUFFIX}"))
    run(path, output, resume=True)
    run(path, tmp_path / "clean")
    assert tree(output) == tree(tmp_path / "clean")


def test_without_copy_file_range_the_bytes_are_the_same(
    job: tuple[Path, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, run = job
    run(path, tmp_path / "clean")

    def refuse(*_: Any) -> int:
        raise OSError(errno.EXDEV, "cross-device")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    run(path, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "clean")


def test_the_writer_accepts_each_announced_tensor_once(tmp_path: Path) -> None:
    specs = [TensorSpec("a", "U8", (2,)), TensorSpec("b", "F32", ())]
    with ShardWriter(tmp_path / "x.safetensors", specs) as writer:
        writer.write("a", b"12")
        for name, data, message in (
            ("a", b"12", "written twice"),
            ("c", b"", "not announced"),
            ("b", b"123", "3 bytes were produced, 4 were announced"),
        ):
            with pytest.raises(CheckpointError, match=message):
                writer.write(name, data)
    with (
        ShardWriter(tmp_path / "x.safetensors", specs) as writer,
        pytest.raises(CheckpointError, match="2 announced tensors were not written"),
    ):
        writer.commit()
    assert list(tmp_path.iterdir()) == []
