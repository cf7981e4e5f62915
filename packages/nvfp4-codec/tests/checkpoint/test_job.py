"""A job before its first byte: names, claims, and what a finished output may still say."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nvfp4_codec.checkpoint import Checkpoint, QuantizeOptions, quantize_checkpoint
from nvfp4_codec.checkpoint.families import find_families, fp8_block, natural_key
from nvfp4_codec.checkpoint.job import PLAN_NAME
from nvfp4_codec.checkpoint.quantize import QuantizeReport
from nvfp4_codec.checkpoint.reader import TensorInfo
from nvfp4_codec.checkpoint.writer import TEMP_SUFFIX
from nvfp4_codec.errors import CheckpointError

Shards = Mapping[str, Mapping[str, Tensor]]
Write = Callable[[Path, Shards], Path]


def quantize(
    path: Path, output: Path, options: QuantizeOptions | None = None, *, resume: bool = False
) -> QuantizeReport:
    with Checkpoint.open(path) as source:
        return quantize_checkpoint(source, output, options, resume=resume)


def test_a_complete_output_says_that_its_input_was_not_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(2):
        save_file({"a.weight": torch.full((16, 32), 1.0 + i)}, tmp_path / f"{i}.safetensors")
    output = tmp_path / "out.safetensors"
    first = quantize(tmp_path / "0.safetensors", output)
    assert first.outcome is not None
    assert not first.outcome.complete_unchecked
    before = output.read_bytes()
    with caplog.at_level(logging.WARNING):
        second = quantize(tmp_path / "1.safetensors", output, resume=True)
    assert second.outcome is not None
    assert second.outcome.complete_unchecked
    assert "input and arguments could not be compared" in caplog.text
    assert output.read_bytes() == before


def test_two_tensors_of_one_output_name_are_refused_before_writing(
    tmp_path: Path, write_checkpoint: Write
) -> None:
    shards = {
        "a.safetensors": {"x.weight": torch.ones(16, 32)},
        "b.safetensors": {"x.weight_scale": torch.ones(3)},
    }
    path = write_checkpoint(tmp_path / "in", shards)
    with pytest.raises(CheckpointError, match=r"x\.weight_scale: would be written twice") as caught:
        quantize(path, tmp_path / "out", QuantizeOptions(include=("x.weight",)))
    found = re.findall(r"\w+\.safetensors", str(caught.value))
    assert set(found) == {"a.safetensors", "b.safetensors"}
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name",
    ["generation_config.json", PLAN_NAME, f".x{TEMP_SUFFIX}", "LICENSE"],
)
def test_a_shard_may_not_take_a_name_the_output_needs(
    tmp_path: Path, write_checkpoint: Write, name: str
) -> None:
    shards = {"a.safetensors": {"x.weight": torch.ones(16, 32)}, name: {"y": torch.ones(3)}}
    path = write_checkpoint(tmp_path / "in", shards)
    with pytest.raises(CheckpointError, match="the name is needed for"):
        quantize(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_only_one_of_two_runs_that_start_together_gets_the_output(
    tmp_path: Path, write_checkpoint: Write, float_shards: Shards
) -> None:
    path = write_checkpoint(tmp_path / "in", float_shards)
    quantize(path, tmp_path / "clean")
    barrier = threading.Barrier(3)
    results: list[str] = []

    def start(output: Path) -> None:
        with Checkpoint.open(path) as source:
            barrier.wait()
            try:
                quantize_checkpoint(source, output)
            except CheckpointError as error:
                results.append(str(error))
            else:
                results.append("done")

    for i in range(5):
        results.clear()
        output = tmp_path / f"out{i}"
        threads = [threading.Thread(target=start, args=(output,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results.count("done") == 1
        assert all("interrupted run" in r or "exists" in r for r in results if r != "done")
        for file in (tmp_path / "clean").iterdir():
            assert (output / file.name).read_bytes() == file.read_bytes()
        assert not (output / PLAN_NAME).exists()


def test_nothing_to_quantize_names_the_place_and_the_commonest_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    path.mkdir()
    norms = {f"{i}.norm.weight": torch.ones(4) for i in range(3)}
    save_file({"x.weight": torch.ones(4, 5), **norms}, path / "model.safetensors")
    monkeypatch.chdir(path)
    with pytest.raises(CheckpointError, match=r"model: none of the 4 .*\(3 times\): norm"):
        quantize(Path(), tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"model/model\.safetensors: none of the 4"):
        quantize(Path("model.safetensors"), tmp_path / "out")


@pytest.mark.parametrize(
    ("value", "flag"), [(0.0, "--zero-amax one"), (float("nan"), "--nonfinite saturate")]
)
def test_policy_errors_name_the_flag(tmp_path: Path, value: float, flag: str) -> None:
    save_file({"x.weight": torch.full((4, 16), value)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor x.weight: .*{flag}"):
        quantize(tmp_path / "x.safetensors", tmp_path / "out")


def test_fused_weights_are_measured_in_pieces_to_one_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("gate_proj", "up_proj")
    values = [torch.randn(40, 64) * (i + 1) for i in range(2)]
    values[0][39, 63] = 50.0  # in the last piece
    tensors = {f"m.{n}.weight": v.bfloat16() for n, v in zip(names, values, strict=True)}
    save_file(tensors, tmp_path / "x.safetensors")
    whole = quantize(tmp_path / "x.safetensors", tmp_path / "whole.safetensors")
    monkeypatch.setattr("nvfp4_codec.checkpoint.quantize._PIECE", 96)
    pieces = quantize(tmp_path / "x.safetensors", tmp_path / "pieces.safetensors")
    assert (tmp_path / "whole.safetensors").read_bytes() == (
        tmp_path / "pieces.safetensors"
    ).read_bytes()
    found = load_file(tmp_path / "pieces.safetensors")
    for name in names:
        assert found[f"m.{name}.weight_scale_2"] == torch.tensor(50.0) / 2688
        sqnr = [r.measured[f"m.{name}.weight"]["sqnr_db"] for r in (whole, pieces)]
        assert sqnr[0] == pytest.approx(sqnr[1], rel=1e-9)
        assert 10 < sqnr[0] < 30


def test_an_empty_fp8_weight_has_a_block() -> None:
    assert fp8_block((0, 16), (2, 1)) == (128, 128)
    infos = [
        TensorInfo("X.weight", "F8_E4M3", (0, 16), "f", 0, 0),
        TensorInfo("X.weight_scale", "F16", (2, 1), "f", 0, 4),
    ]
    assert len(find_families({info.name: info for info in infos})) == 1


def test_names_are_sorted_by_number_whatever_its_length() -> None:
    names = [f"layer.{n}" for n in ("9" * 5000, "2", "10", "1" + "0" * 5000, "010", "0")]
    ordered = sorted(names, key=natural_key)
    assert [len(n) for n in ordered] == [7, 7, 8, 9, 5006, 5007]
    assert natural_key("a.007") == natural_key("a.7") < natural_key("a.8")
