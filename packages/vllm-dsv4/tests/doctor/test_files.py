"""Files that somebody else arranged: truncated, absent, leading elsewhere, or no weights at all."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvfp4_codec.errors import CheckpointError
from vllm_dsv4.doctor import Examination, examine

SECOND = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
Folder = Callable[[], Path]


@pytest.fixture
def folder(healthy, writer, tmp_path: Path) -> Path:
    """A healthy checkpoint in three shards."""
    made: Path = writer(healthy("full"), tmp_path / "checkpoint", 3)
    return made


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index)
    (folder / INDEX).write_text(json.dumps(index))


def codes(made: Examination) -> list[tuple[str, str]]:
    return [(finding.code, finding.file) for finding in made.findings]


@pytest.mark.parametrize("left", [0, 5, 1000, -1])
def test_a_truncated_shard(folder: Path, left: int):
    """To nothing, into its header, or by the last byte."""
    size = (folder / SECOND).stat().st_size
    os.truncate(folder / SECOND, left if left >= 0 else size + left)
    made = examine(folder)
    assert codes(made) == [("shard-truncated", SECOND)]
    assert made.findings[0].level == "error"
    assert not made.healthy
    assert made.open_questions


def test_every_broken_shard_is_named(folder: Path):
    os.truncate(folder / SECOND, 5000)
    (folder / "model-00001-of-00003.safetensors").unlink()
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"\0" * 4096)
    assert codes(examine(folder)) == [
        ("missing-shard", "model-00001-of-00003.safetensors"),
        ("shard-truncated", SECOND),
        ("damaged-shard", "model-00003-of-00003.safetensors"),
    ]


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "a/../../b", "a\0b", "\\x"]
)
def test_an_index_that_points_outside(folder: Path, name: str):
    (folder.parent / "other.safetensors").write_bytes((folder / SECOND).read_bytes())
    edit_index(folder, lambda index: index["weight_map"].update({"norm.weight": name}))
    assert codes(examine(folder)) == [("index-outside-folder", INDEX)]


def test_a_link_that_leads_outside(folder: Path):
    os.replace(folder / SECOND, folder.parent / "elsewhere")
    (folder / SECOND).symlink_to(folder.parent / "elsewhere")
    assert codes(examine(folder)) == [("index-outside-folder", INDEX)]


def test_an_index_of_another_checkpoint(folder: Path):
    edit_index(folder, lambda index: index["weight_map"].update({"more.weight": SECOND}))
    made = examine(folder)
    assert codes(made) == [("index-disagrees", SECOND)]
    assert made.findings[0].tensor == "more.weight"


@pytest.mark.parametrize(
    "content",
    [
        (1 << 62).to_bytes(8, "little") + b"{}",
        (99_000_000).to_bytes(8, "little") + b"{}",
        len(b'{"a":{"dtype":"F32","shape":[9223372036854775807,4],"data_offsets":[0,4]}}').to_bytes(
            8, "little"
        )
        + b'{"a":{"dtype":"F32","shape":[9223372036854775807,4],"data_offsets":[0,4]}}'
        + b"\0" * 4,
        len(b"[" * 50000).to_bytes(8, "little") + b"[" * 50000,
        pickle.dumps({"weights": [1.0]}),
    ],
    ids=["absurd length", "longer than the file", "absurd shape", "nested", "a pickle"],
)
def test_absurd_headers(folder: Path, content: bytes):
    (folder / SECOND).write_bytes(content)
    ((code, file),) = codes(examine(folder))
    assert code in ("damaged-shard", "shard-truncated")
    assert file == SECOND


def test_pickles_and_code_are_never_touched(folder: Path, tmp_path: Path):
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "executed",)

    for name in ("pytorch_model.bin", "model.pt", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Trap()))
    (folder / "modeling_deepseek.py").write_text(
        f"open({str(tmp_path / 'executed')!r}, 'w').close()"
    )
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_deepseek.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    assert examine(folder).findings == ()
    assert not (tmp_path / "executed").exists()


def test_a_pipe_does_not_block(folder: Path):
    (folder / SECOND).unlink()
    os.mkfifo(folder / SECOND)
    assert codes(examine(folder)) == [("damaged-shard", SECOND)]


def test_no_tokenizer(folder: Path):
    (folder / "tokenizer.json").unlink()
    made = examine(folder)
    assert [(f.code, f.tensor) for f in made.findings] == [("missing-file", "tokenizer.json")]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def lead_elsewhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def be_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("damage", "what"),
    [(cut, "not JSON"), (lead_elsewhere, "leaves the folder"), (be_a_pipe, "not a regular file")],
    ids=["truncated", "link", "pipe"],
)
def test_a_tokenizer_that_cannot_be_read(
    folder: Path, name: str, damage: Callable[[Path], None], what: str
):
    damage(folder / name)
    (found,) = examine(folder).findings
    assert (found.code, found.tensor, found.level) == ("damaged-file", name, "error")
    assert what in found.found


def test_a_tokenizer_in_the_hub_s_cache(folder: Path):
    """A snapshot there is links into the folder beside it, which are followed."""
    snapshot, blobs = (folder.parent / name for name in ("snapshots/1", "blobs"))
    snapshot.parent.mkdir()
    folder.rename(snapshot)
    blobs.mkdir()
    (snapshot / "tokenizer.json").rename(blobs / "2")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/2")
    assert examine(snapshot).healthy


def test_an_unfinished_run(folder: Path):
    (folder / ".nvfp4-progress.json").write_text("{}")
    assert [f.code for f in examine(folder).findings] == ["unfinished"]


def test_a_second_file_without_an_index(healthy, writer, tmp_path: Path, folder: Path):
    one = writer(healthy("full"), tmp_path / "one")
    (one / "old.safetensors").write_bytes((one / "model.safetensors").read_bytes())
    (finding,) = examine(one).findings
    assert (finding.code, finding.tensor, finding.level) == (
        "stray-file", "old.safetensors", "error",
    )  # fmt: skip
    # With an index, vLLM loads what it names.
    (folder / "old.safetensors").write_bytes((one / "model.safetensors").read_bytes())
    assert examine(folder).healthy


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, folder: Path, tiny: Path):
    with pytest.raises(CheckpointError, match=r"there is no folder .*absent\. Give that of"):
        examine(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"this is a file\. Give the folder"):
        examine(tiny / "model.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        examine(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="the reference cannot be used"):
        examine(folder, tmp_path / "absent")
    (folder / INDEX).write_text("{")
    with pytest.raises(CheckpointError, match="JSON"):
        examine(folder)


def test_control_characters_of_a_name_stay_out_of_messages(folder: Path):
    edit_index(folder, lambda index: index["weight_map"].update({"\x1b[31m": "\x1b[2J/../.."}))
    (finding,) = examine(folder).findings
    assert finding.code == "index-outside-folder"
    assert all(text.isprintable() for text in finding.to_json().values())
