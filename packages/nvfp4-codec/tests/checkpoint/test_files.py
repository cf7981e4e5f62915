"""Files arranged to mislead: links, pipes, devices, endless or unwritable JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from torch import Tensor

from nvfp4_codec.checkpoint import Checkpoint, quantize_checkpoint
from nvfp4_codec.checkpoint.deepseek_v4.folder import check_files
from nvfp4_codec.checkpoint.files import read_small, strict_json
from nvfp4_codec.checkpoint.job import json_bytes
from nvfp4_codec.checkpoint.rewrite import read_config
from nvfp4_codec.errors import CheckpointError

Shards = Mapping[str, Mapping[str, Tensor]]
Write = Callable[[Path, Shards], Path]
INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path, write_checkpoint: Write, float_shards: Shards) -> Path:
    return write_checkpoint(tmp_path / "model", float_shards)


def quantize(folder: Path, output: Path) -> None:
    with Checkpoint.open(folder) as source:
        quantize_checkpoint(source, output)


@pytest.mark.parametrize("name", ["tokenizer.json", "LICENSE", "config.json"])
def test_a_side_file_that_links_out_of_the_folder_is_not_copied(
    folder: Path, tmp_path: Path, name: str
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with pytest.raises(CheckpointError, match=f"{name}.* is a link that leaves the folder"):
        quantize(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_side_files_of_the_hugging_face_cache_are_copied(folder: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, item in enumerate(sorted(folder.iterdir())):
        item.rename(blobs / str(i))
        (snapshot / item.name).symlink_to(Path("../../blobs") / str(i))
    quantize(snapshot, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "test"


@pytest.mark.parametrize("name", [INDEX, FIRST, "config.json", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "self-link"])
def test_what_is_no_regular_file_is_refused_without_waiting(
    folder: Path, tmp_path: Path, name: str, kind: str
) -> None:
    (folder / name).unlink()
    make = {
        "pipe": lambda: os.mkfifo(folder / name),
        "folder": lambda: (folder / name).mkdir(),
        "self-link": lambda: (folder / name).symlink_to(name),
    }
    make[kind]()
    with pytest.raises(CheckpointError, match=r"not a regular file|broken link"):
        quantize(folder, tmp_path / "out")


def test_a_pipe_or_device_as_the_checkpoint_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    for path in (tmp_path / "pipe.safetensors", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="is not a regular file"):
            Checkpoint.open(path)


def test_a_file_over_the_limit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    assert read_small(tmp_path / "x", 5, "x") == b"12345"
    with pytest.raises(CheckpointError, match="file x: 5 bytes; at most 4"):
        read_small(tmp_path / "x", 4, "x")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (rb'{"a": "\ud800"}', "lone surrogate"),
        (rb'{"\udfff": 1}', "lone surrogate"),
        (b'{"a": "\xed\xa0\x80"}', "not JSON"),
        (b'{"a": 1e400}', "beyond float64"),
        (b'{"a": -1e400}', "beyond float64"),
        (b'{"a": NaN}', "the number NaN"),
        (b'{"a": -Infinity}', "the number -Infinity"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_json_that_cannot_be_written_back_is_refused(
    folder: Path, tmp_path: Path, data: bytes, message: str
) -> None:
    with pytest.raises(CheckpointError, match=f"file config.json: .*{message}"):
        strict_json(data, "config.json")
    for name in ("config.json", INDEX):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=f"file {name}: .*{message}"):
            quantize(folder, tmp_path / "out")
        (folder / name).write_bytes(kept)


def test_ordinary_json_passes() -> None:
    assert strict_json(rb'{"a": [1.5e300, "\ud83d\ude00", null]}', "x") == {
        "a": [1.5e300, "\U0001f600", None]
    }


def test_a_config_nested_too_deeply_to_write_is_refused(folder: Path) -> None:
    """Where parsing and writing give up differs by Python's version; both are reported."""
    refused = []
    for depth in (10, *range(600, 1100, 5), 200_000):
        (folder / "config.json").write_text('{"a": ' + "[" * depth + "]" * depth + "}")
        try:
            config = read_config(folder)
        except CheckpointError:
            refused.append(depth)
        else:
            assert config is not None
            json_bytes(config)
    assert 10 not in refused
    assert 200_000 in refused


def test_an_index_value_or_name_that_is_no_text_is_refused(folder: Path) -> None:
    document = json.loads((folder / INDEX).read_text())
    document["weight_map"]["lm_head.weight"] = "\ud800.safetensors"
    (folder / INDEX).write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="lone surrogate"):
        Checkpoint.open(folder)


def test_a_file_name_too_long_for_the_system_is_refused(folder: Path) -> None:
    document = json.loads((folder / INDEX).read_text())
    document["weight_map"]["lm_head.weight"] = "x" * 5000
    (folder / INDEX).write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="is missing"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", [INDEX, "other.safetensors.index.json"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte order mark"])
def test_the_index_is_read_twice_in_one_way(folder: Path, name: str, mark: str) -> None:
    """The check of its size ended in a traceback where opening had passed over the mark."""
    index = json.loads((folder / INDEX).read_text())
    index["metadata"] = {"total_size": 5}
    (folder / INDEX).unlink()
    (folder / name).write_text(mark + json.dumps(index), encoding="utf-8")
    with Checkpoint.open(folder) as checkpoint:
        found = [f for f in check_files(checkpoint, None) if f.code != "missing-file"]
        total = sum(info.nbytes for info in checkpoint)
    assert [(f.code, f.file, f.found) for f in found] == [("index-size", name, "5")]
    assert found[0].expected.startswith(f"{total},")
