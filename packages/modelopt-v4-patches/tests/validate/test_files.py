"""What lies beside the weights: absent, of another export, unfinished, changed since."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from modelopt_v4_patches.executor import LocalProcesses
from modelopt_v4_patches.validate import examine
from nvfp4_codec.errors import CheckpointError


def without(*names: str) -> Any:
    return lambda content: [content.files.pop(name) for name in names]


def test_no_tokenizer(check, only):
    made = check(without("tokenizer.json"))
    assert only(made)[:2] == ("missing-file", "tokenizer.json")
    assert made.findings[0].fix == "Copy it from the source checkpoint."


def test_another_kind_of_tokenizer_will_do(check):
    def change(content: Any) -> None:
        content.files["tokenizer.model"] = content.files.pop("tokenizer.json")

    assert check(change).findings == ()


def test_no_tokenizer_config(check, only):
    found = only(check(without("tokenizer_config.json")))
    assert found[:2] == ("missing-file", "tokenizer_config.json")


def test_files_that_the_source_has(check, only, tiny):
    change = without("generation_config.json")
    assert check(change).findings == ()
    assert only(check(change, against=tiny))[:2] == ("missing-file", "generation_config.json")


@pytest.mark.parametrize("name", [".nvfp4-progress.json", ".nvfp4-records"])
def test_an_unfinished_run(check, only, name: str):
    code, found, fix = only(check(lambda content: content.files.update({name: "{}"})))
    assert (code, found) == ("unfinished", name)
    assert "--resume" in fix


def index_of(folder: Path) -> tuple[Path, Any]:
    path = folder / "model.safetensors.index.json"
    return path, json.loads(path.read_text())


def test_an_index_of_another_size(healthy, write, only, tmp_path):
    folder = write(healthy["full"], tmp_path / "c", shards=2)
    path, index = index_of(folder)
    index["metadata"]["total_size"] += 2
    path.write_text(json.dumps(index))
    assert only(examine(folder, sample=0))[:2] == ("index-size", "metadata.total_size")


def test_an_index_of_other_files_is_refused(healthy, write, tmp_path):
    folder = write(healthy["full"], tmp_path / "c", shards=2)
    path, index = index_of(folder)
    del index["weight_map"]["norm.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"norm\.weight.*not in the index"):
        examine(folder, sample=0)


@pytest.fixture
def exported(healthy, write, tmp_path) -> Path:
    """A checkpoint with the manifest that the exporter writes."""
    folder: Path = write(healthy["experts"], tmp_path / "exported", shards=3)
    files = {
        path.name: {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in folder.iterdir()
    }
    notes = {"mtp.0.ffn.experts.0.w2.input_scale": {"input_scale_from": "model"}}
    document = {"files": files, "notes": notes}
    (folder / "export_manifest.json").write_text(json.dumps(document))
    return folder


def test_a_manifest_that_fits(exported):
    made = examine(exported, sample="all")
    assert made.findings == ()
    assert "1 matrices have an input_scale that is not their own" in made.notes


def test_a_changed_byte_shows_when_everything_is_read(exported, only):
    shard = exported / "model-00002-of-00003.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1  # the last byte of some weight: still a sound checkpoint
    shard.write_bytes(data)
    assert examine(exported, sample=0).findings == ()
    for executor in (None, LocalProcesses(1)):
        found = [
            f for f in examine(exported, sample="all", executor=executor).findings
            if f.code == "manifest-mismatch"
        ]  # fmt: skip
        assert [f.tensor for f in found] == [shard.name]
        assert found[0].found == f"SHA-256 {hashlib.sha256(data).hexdigest()}"


def test_absent_and_cut_files_show_at_once(exported):
    (exported / "generation_config.json").unlink()
    (exported / "tokenizer.json").write_text("{}")
    found = {f.tensor: f.found for f in examine(exported, sample=0).findings}
    assert found == {"generation_config.json": "absent", "tokenizer.json": "2 bytes"}


@pytest.mark.parametrize(
    "document",
    ['{"files": {"../x": {"bytes": 1, "sha256": ""}}}', "{}", '{"files": []}', "nonsense"],
)
def test_a_broken_manifest_is_refused(exported, document: str):
    (exported / "export_manifest.json").write_text(document)
    with pytest.raises(CheckpointError, match=r"export_manifest\.json"):
        examine(exported, sample=0)
