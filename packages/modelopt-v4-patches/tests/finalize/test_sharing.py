"""A new folder whose files share their data with the old ones, where the file system can."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from modelopt_v4_patches.finalize import finalize_checkpoint
from modelopt_v4_patches.renaming import relabel
from nvfp4_codec.checkpoint import writer
from nvfp4_codec.errors import CheckpointError

Make = Callable[..., Path]


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def clone(source: int, target: int) -> bool:
    """What a reflink does, seen from outside: the target becomes a copy, old content gone."""
    os.ftruncate(target, 0)
    os.pwrite(target, os.pread(source, os.fstat(source).st_size, 0), 0)
    return True


@pytest.fixture
def cloning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system with reflinks."""
    for module in (writer, relabel):
        monkeypatch.setattr(module, "share_blocks", clone)


def ratio(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.self_attn.kv_proj.weight_scale_2"] *= 0.37


@pytest.mark.parametrize("unify", [False, True])
def test_shared_and_copied_files_are_the_same(
    make_export: Make, reference_config: Path, tmp_path: Path, unify: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source = make_export(change=ratio)
    before = digests(source)
    for name, share in (("copied", lambda source, target: False), ("shared", clone)):
        for module in (writer, relabel):
            monkeypatch.setattr(module, "share_blocks", share)
        output = tmp_path / name
        report = finalize_checkpoint(source, output, reference_config=reference_config, unify=unify)
        assert report.written is not None
        assert report.written.shared == (2 if name == "shared" else 0)
    assert digests(tmp_path / "shared") == digests(tmp_path / "copied")
    assert digests(source) == before


@pytest.mark.usefixtures("cloning")
def test_a_full_disk_is_enough_to_share(
    make_export: Make, reference_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_export()
    full = os.statvfs_result((4096, 4096, 1000, 1, 1, 10, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    monkeypatch.setattr(os, "fstatvfs", lambda fd: full)
    finalize_checkpoint(source, tmp_path / "out", reference_config=reference_config)


def test_without_sharing_a_full_disk_is_known_before(
    make_export: Make, reference_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_export()
    full = os.statvfs_result((4096, 4096, 1000, 1, 1, 10, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    monkeypatch.setattr(relabel, "share_blocks", lambda source, target: False)
    needed = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    with pytest.raises(CheckpointError, match=rf"{needed} bytes are needed, 4096 are free"):
        finalize_checkpoint(source, tmp_path / "out", reference_config=reference_config)
    assert not (tmp_path / "out").exists()


def test_on_a_file_system_with_reflinks_no_data_is_copied(
    make_export: Make, reference_config: Path, tmp_path: Path
) -> None:
    with (tmp_path / "a").open("w+b") as one, (tmp_path / "b").open("w+b") as two:
        one.write(b"x" * 4096)
        one.flush()
        if not writer.share_blocks(one.fileno(), two.fileno()):
            pytest.skip("needs a temporary folder with reflinks (XFS, Btrfs): pytest --basetemp")

    source = make_export(vocab_size=1 << 16)
    config = reference_config.read_text().replace('"vocab_size": 32', f'"vocab_size": {1 << 16}')
    reference_config.write_text(config)
    os.sync()
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    report = finalize_checkpoint(source, tmp_path / "out", reference_config=reference_config)
    os.sync()
    used = free - os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert report.written is not None
    assert report.written.shared == 2
    assert used < report.written.outcome.nbytes / 10
