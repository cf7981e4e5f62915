"""Jobs with a manifest: digests and notes survive kills, and shards written elsewhere."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import Tensor

from nvfp4_codec.checkpoint.digest import FileDigest
from nvfp4_codec.checkpoint.header import TensorSpec
from nvfp4_codec.checkpoint.job import PLAN_NAME, Job, run, write_shard
from nvfp4_codec.checkpoint.manifest import RECORDS_NAME
from nvfp4_codec.checkpoint.reader import Checkpoint, TensorInfo
from nvfp4_codec.checkpoint.rewrite import Rewrite, documents
from nvfp4_codec.checkpoint.writer import TEMP_SUFFIX, ShardWriter, temp_path
from nvfp4_codec.errors import CheckpointError

Shards = Mapping[str, Mapping[str, Tensor]]
Write = Callable[[Path, Shards], Path]
MANIFEST = "manifest.json"


@pytest.fixture
def job(tmp_path: Path, write_checkpoint: Write, float_shards: Shards) -> Iterator[Job]:
    """Copies BF16 tensors and inverts the bits of float32 ones, with a note for each of those."""
    with Checkpoint.open(write_checkpoint(tmp_path / "in", float_shards)) as source:
        plan = Rewrite(source)
        for info in source:
            if info.dtype != "F32":
                plan.keep([info])
                continue

            def step(writer: ShardWriter, info: TensorInfo = info) -> None:
                writer.write(info.name, ~source.read(info.name))
                writer.note(info.name, {"inverted": info.nbytes})

            plan.produce(info.file, [info.spec], step, info.offset)
        small = documents(source, lambda config: None)
        yield Job("test", {}, source, plan.shards(), small, manifest=MANIFEST)


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
    }


def notes_of(source: Checkpoint) -> dict[str, dict[str, int]]:
    return {i.name: {"inverted": i.nbytes} for i in source if i.dtype == "F32"}


def test_the_manifest_has_every_files_digest_and_every_note(job: Job, tmp_path: Path) -> None:
    outcome = run(job, tmp_path / "out")
    found = tree(tmp_path / "out")
    document = json.loads((tmp_path / "out" / MANIFEST).read_text())
    del found[MANIFEST]
    assert {name: entry["sha256"] for name, entry in document["files"].items()} == found
    assert len(found) == 5  # two shards, index, config, tokenizer
    for name, entry in document["files"].items():
        assert entry["bytes"] == (tmp_path / "out" / name).stat().st_size
    assert document["notes"] == outcome.notes == notes_of(job.source)
    assert len(outcome.notes) == 2


def test_killed_at_every_step_it_ends_with_the_same_manifest(job: Job, tmp_path: Path) -> None:
    output = tmp_path / "out"
    snapshots: list[tuple[str, Path]] = []

    def snapshot(step: str) -> None:
        copy = tmp_path / f"killed-{len(snapshots)}"
        snapshots.append((step, copy))
        if output.exists():
            shutil.copytree(output, copy)

    run(job, output, fault=snapshot)
    expected = tree(output)
    assert {"remove records", "remove plan"} <= {step for step, _ in snapshots}
    kept = 0
    for step, copy in snapshots:
        outcome = run(job, copy, resume=True)
        kept += len(outcome.kept)
        assert tree(copy) == expected, step
        assert outcome.notes == notes_of(job.source), step
    assert kept > 10
    assert run(job, output, resume=True).notes == notes_of(job.source)


def test_a_shard_without_its_record_is_written_again(job: Job, tmp_path: Path) -> None:
    output = tmp_path / "out"

    def stop(step: str) -> None:
        if step == "remove records":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(job, output, fault=stop)
    (output / MANIFEST).unlink()
    records = sorted((output / RECORDS_NAME).iterdir())
    assert len(records) == 2
    records[0].unlink()
    outcome = run(job, output, resume=True)
    assert (len(outcome.written), len(outcome.kept)) == (1, 1)
    run(job, tmp_path / "clean")
    assert tree(output) == tree(tmp_path / "clean")


def test_shards_written_elsewhere_in_any_order_give_the_same_folder(
    job: Job, tmp_path: Path
) -> None:
    run(job, tmp_path / "clean")
    advanced: list[int] = []

    def spread(files: Sequence[str], folder: Path) -> Iterator[str]:
        for file in reversed(files):
            temp_path(folder / file).write_bytes(b"left by a lost worker")
            write_shard(job, file, folder)
            yield file

    outcome = run(job, tmp_path / "out", spread=spread, advance=advanced.append)
    assert tree(tmp_path / "out") == tree(tmp_path / "clean")
    assert outcome.notes == notes_of(job.source)
    assert sum(advanced) == sum(info.nbytes for info in job.source)


def test_a_spread_that_loses_a_shard_is_noticed_and_resumed(job: Job, tmp_path: Path) -> None:
    output = tmp_path / "out"

    def lose(files: Sequence[str], folder: Path) -> Iterator[str]:
        write_shard(job, files[0], folder)
        yield files[0]

    with pytest.raises(CheckpointError, match="00002.*1 shards were not written.*--resume"):
        run(job, output, spread=lose)
    assert (output / PLAN_NAME).exists()

    def lie(files: Sequence[str], folder: Path) -> Iterator[str]:
        assert len(files) == 1
        yield files[0]

    with pytest.raises(CheckpointError, match="00002.*cannot be opened"):
        run(job, output, spread=lie, resume=True)
    run(job, output, resume=True)
    run(job, tmp_path / "clean")
    assert tree(output) == tree(tmp_path / "clean")


def test_too_small_a_disk_is_refused_before_anything_is_written(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(shard.layout.size for shard in job.shards)
    output, room = tmp_path / "out", SimpleNamespace(f_bavail=needed - 1, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    with pytest.raises(CheckpointError, match=f"{needed} bytes are needed for the 2 files"):
        run(job, output)
    assert list(output.iterdir()) == []
    # what a killed run left is counted, for it goes before anything is written
    (output / f".00000000.{PLAN_NAME}{TEMP_SUFFIX}").write_bytes(b"x" * 5000)
    run(job, output)
    monkeypatch.undo()
    run(job, tmp_path / "clean")
    assert tree(output) == tree(tmp_path / "clean")


def test_a_digest_follows_ranges_in_any_order(tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    path = tmp_path / "x"
    cuts = [0, 5, 5, 1 << 20, (2 << 20) + 1, len(data)]
    ranges = list(itertools.pairwise(cuts))
    for order in (ranges, ranges[::-1], ranges[2:] + ranges[:2]):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        digest = FileDigest(fd)
        for begin, end in order:
            os.pwrite(fd, data[begin:end], begin)
            digest.wrote(begin, end)
        assert digest.result() == hashlib.sha256(data).hexdigest()
        os.close(fd)


def test_a_file_that_shrinks_under_the_digest_is_an_error(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    digest = FileDigest(fd)
    digest.wrote(0, 10)
    with pytest.raises(OSError, match="shrank"):
        digest.result()
    os.close(fd)


def test_a_name_has_one_note(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x.safetensors", [TensorSpec("a", "U8", (1,))]) as writer:
        writer.note("a", 1)
        with pytest.raises(CheckpointError, match="tensor a: was noted twice"):
            writer.note("a", 2)
