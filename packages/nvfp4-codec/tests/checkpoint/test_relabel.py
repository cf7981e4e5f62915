"""A file under other names: the data keeps its place, and other readers agree."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nvfp4_codec.checkpoint import Checkpoint, writer
from nvfp4_codec.checkpoint.header import TensorSpec, relabel
from nvfp4_codec.checkpoint.writer import ShardWriter
from nvfp4_codec.errors import CheckpointError

TENSORS = {
    "model.a.weight": torch.arange(6, dtype=torch.int64).reshape(2, 3),
    "model.b": torch.tensor(1.5),
    "model.c.weight": torch.zeros(0, 4, dtype=torch.bfloat16),
    "model.d.weight": torch.arange(5, dtype=torch.uint8),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    save_file(TENSORS, tmp_path / "x.safetensors", metadata={"format": "pt", "note": "ä"})
    return Checkpoint.open(tmp_path / "x.safetensors")


@pytest.mark.parametrize("names", ["shorter", "equal", "longer"])
def test_the_same_data_under_other_names(checkpoint: Checkpoint, names: str) -> None:
    new = {
        "shorter": {name: name.removeprefix("model.") for name in TENSORS},
        "equal": {name: name.replace("model", "layer") for name in TENSORS},
        "longer": {name: name + "_much_longer_than_before" for name in TENSORS},
    }[names]
    header = checkpoint.headers["x.safetensors"]
    layout = relabel(header, new)
    assert len(layout.header) % 8 == 0
    if names != "longer":
        assert len(layout.header) == header.data_offset
    path = checkpoint.root / "y.safetensors"
    old = (checkpoint.root / "x.safetensors").read_bytes()
    path.write_bytes(layout.header + old[header.data_offset :])
    assert path.stat().st_size == layout.size
    read = load_file(path)
    assert read.keys() == set(new.values())
    for name, tensor in TENSORS.items():
        assert torch.equal(read[new[name]], tensor)
        assert read[new[name]].dtype == tensor.dtype
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "note": "ä"}


def test_two_tensors_do_not_get_one_name(checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match="two tensors would get this name"):
        relabel(checkpoint.headers["x.safetensors"], dict.fromkeys(TENSORS, "same"))


def test_the_padding_is_spaces_only(checkpoint: Checkpoint) -> None:
    header = checkpoint.headers["x.safetensors"]
    raw = relabel(header, {name: name[-8:] for name in TENSORS}).header
    assert int.from_bytes(raw[:8], "little") == len(raw) - 8
    text = raw[8:].decode()
    assert text.rstrip(" ").endswith("}")
    assert len(json.loads(text)) == len(TENSORS) + 1


@pytest.mark.parametrize("suffix", ["", "_longer_than_before"])
@pytest.mark.parametrize("shares", [False, True])
def test_a_writer_adopts_a_file_but_for_what_is_written_anew(
    checkpoint: Checkpoint, suffix: str, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """shares: as on a file system with reflinks, where the clone replaces what was there."""

    def clone(source: int, target: int) -> bool:
        os.ftruncate(target, 0)
        os.pwrite(target, os.pread(source, os.fstat(source).st_size, 0), 0)
        return True

    monkeypatch.setattr(writer, "share_blocks", clone if shares else lambda source, target: False)
    names = {name: name.removeprefix("model.") + suffix for name in TENSORS}
    layout = relabel(checkpoint.headers["x.safetensors"], names)
    infos = checkpoint.tensors.values()
    specs = [TensorSpec(names[info.name], info.dtype, info.shape) for info in infos]
    anew = names["model.d.weight"]
    path = checkpoint.root / "y.safetensors"
    with ShardWriter(path, specs, layout=layout, digest=True) as shard:
        fits = len(layout.header) == checkpoint.headers["x.safetensors"].data_offset
        assert shard.adopt(checkpoint, "x.safetensors", {anew}) is (shares and fits)
        with pytest.raises(CheckpointError, match="1 announced tensors were not written"):
            shard.commit()
        shard.write_tensor(anew, torch.full((5,), 9, dtype=torch.uint8))
        digest = shard.seal()
        shard.commit()
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    read = load_file(path)
    assert read[anew].tolist() == [9] * 5
    for name in TENSORS.keys() - {"model.d.weight"}:
        assert torch.equal(read[names[name]], TENSORS[name])


def test_a_file_that_grew_is_not_adopted(checkpoint: Checkpoint) -> None:
    layout = relabel(checkpoint.headers["x.safetensors"], {name: name for name in TENSORS})
    specs = [info.spec for info in checkpoint.tensors.values()]
    with (checkpoint.root / "x.safetensors").open("ab") as file:
        file.write(b"more")
    path = checkpoint.root / "y.safetensors"
    with (
        ShardWriter(path, specs, layout=layout) as shard,
        pytest.raises(CheckpointError, match=r"x\.safetensors.*of data in the source"),
    ):
        shard.adopt(checkpoint, "x.safetensors")
    assert not path.exists()
