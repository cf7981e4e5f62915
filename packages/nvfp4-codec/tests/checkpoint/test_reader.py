"""Opening checkpoints: folders, indexes that lie, links that leave, files that shrink."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nvfp4_codec.checkpoint import Checkpoint
from nvfp4_codec.errors import CheckpointError, OutsideFolderError, TruncatedFileError

Shards = Mapping[str, Mapping[str, Tensor]]
Write = Callable[[Path, Shards], Path]
FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path, write_checkpoint: Write, float_shards: Shards) -> Path:
    return write_checkpoint(tmp_path / "model", float_shards)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_tensors_are_read_as_the_official_library_reads_them(
    folder: Path, float_shards: Shards
) -> None:
    with Checkpoint.open(folder) as checkpoint:
        assert len(checkpoint) == sum(map(len, float_shards.values()))
        for file in float_shards:
            for name, expected in load_file(folder / file).items():
                found = checkpoint.tensor(name)
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
                assert torch.equal(bits(found), bits(expected))
                assert checkpoint.info(name).file == file


def test_a_single_file_and_a_folder_with_one_file_open(folder: Path, tmp_path: Path) -> None:
    with Checkpoint.open(folder / FIRST) as single:
        assert not single.is_folder
        names = list(single.tensors)
    (tmp_path / "one").mkdir()
    shutil.copy(folder / FIRST, tmp_path / "one" / "weights.safetensors")
    with Checkpoint.open(tmp_path / "one") as checkpoint:
        assert list(checkpoint.tensors) == names


def test_subbyte_tensors_come_as_packed_bytes(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F4","shape":[2,4],"data_offsets":[0,4]}}'
    path = tmp_path / "f4.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes([1, 2, 3, 4]))
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.tensor("a").tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("../model/" + FIRST, "may leave the folder"),
        ("/etc/passwd", "may leave the folder"),
        ("a/../../x", "may leave the folder"),
        ("..\\x", "may leave the folder"),
        ("", "may leave the folder"),
        ("a\0b", "may leave the folder"),
        ("link.safetensors", "leaves the folder"),
        ("linked/" + FIRST, "leaves the folder"),
        ("absent.safetensors", "is missing"),
        ("pipe.safetensors", "not a regular file"),
        (7, "expected a string"),
    ],
)
def test_an_index_that_leaves_the_folder_is_refused(
    folder: Path, tmp_path: Path, target: object, message: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.copy(folder / FIRST, outside / FIRST)
    (folder / "link.safetensors").symlink_to(outside / FIRST)
    (folder / "linked").symlink_to(outside)
    os.mkfifo(folder / "pipe.safetensors")
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["lm_head.weight"] = target
    index.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=message) as raised:
        Checkpoint.open(folder)
    assert isinstance(raised.value, OutsideFolderError) == ("the folder" in message)


def test_links_of_the_hugging_face_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "snapshots" / "abc"
    blobs = tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, item in enumerate(sorted(folder.iterdir())):
        shutil.move(item, blobs / str(i))
        (snapshot / item.name).symlink_to(Path("../../blobs") / str(i))
    with Checkpoint.open(snapshot) as checkpoint:
        assert "lm_head.weight" in checkpoint


def change_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    change(document["weight_map"])
    index.write_text(json.dumps(document))


def test_index_and_files_must_agree(folder: Path) -> None:
    change_index(folder, lambda names: names.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*not in the index"):
        Checkpoint.open(folder)
    change_index(folder, lambda names: names.update({"lm_head.weight": FIRST}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: the index places it here"):
        Checkpoint.open(folder)
    change_index(folder, lambda names: names.update({"ghost": FIRST}))
    with pytest.raises(CheckpointError, match="lm_head|ghost"):
        Checkpoint.open(folder)


def test_a_name_in_two_files_is_refused(folder: Path) -> None:
    save_file({"step": torch.tensor(1), "x": torch.tensor(2)}, folder / "extra.safetensors")
    change_index(folder, lambda names: names.update({"x": "extra.safetensors"}))
    with pytest.raises(CheckpointError, match="tensor step: is also in"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', "[" * 100_000, "\xff"])
def test_a_malformed_index_is_refused(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json: (not JSON|no w)"):
        Checkpoint.open(folder)


def test_missing_and_ambiguous_paths_say_what_to_do(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist; give"):
        Checkpoint.open(tmp_path / "nothing")
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"2 \.safetensors files and no model"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("size", [0, 7, 8, 100])
def test_truncated_files_are_refused(folder: Path, size: int) -> None:
    os.truncate(folder / FIRST, size)
    with pytest.raises(TruncatedFileError, match="truncated"):
        Checkpoint.open(folder)
    os.truncate(folder / FIRST, 0)


def test_one_missing_byte_is_noticed(folder: Path) -> None:
    os.truncate(folder / FIRST, (folder / FIRST).stat().st_size - 1)
    with pytest.raises(TruncatedFileError, match="the header describes .* truncated"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("length", [100_000_001, 2**63, 2**64 - 1])
def test_a_huge_header_length_allocates_nothing(tmp_path: Path, length: int) -> None:
    path = tmp_path / "bomb.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=f"header length {length}; at most"):
        Checkpoint.open(path)


def test_a_file_that_shrinks_after_opening_is_an_error_not_a_crash(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        info = max((i for i in checkpoint if i.file == FIRST), key=lambda i: i.offset)
        os.truncate(folder / FIRST, info.offset + 1)
        with pytest.raises(CheckpointError, match="file ends early") as caught:
            checkpoint.tensor(info.name)
    assert caught.value.tensor == info.name


def test_unknown_tensors_are_named(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint, pytest.raises(CheckpointError, match="nope"):
        checkpoint.tensor("nope")
