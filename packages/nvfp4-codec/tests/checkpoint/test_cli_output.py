"""What a person sees: tables at 80 columns, remarks once per text, one row per weight in diff."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from nvfp4_codec import cli_output
from nvfp4_codec.cli import main
from nvfp4_codec.explain import report
from nvfp4_codec.sqnr import sqnr_db

Capture = pytest.CaptureFixture[str]
PARTS = ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense")


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    def console() -> Console:
        return Console(width=80, file=sys.stdout, markup=False, highlight=False)

    monkeypatch.setattr(cli_output, "_console", console)


@pytest.fixture
def bert(tmp_path: Path, weight: Callable[..., Tensor]) -> Path:
    """A BERT-like model with MiniLM's names: the longest of a widely used small model."""
    tensors: dict[str, Tensor] = {"embeddings.word_embeddings.weight": weight(32, 64, 1)}
    for layer in range(3):
        for i, part in enumerate(PARTS):
            base = f"encoder.layer.{layer}.{part}"
            tensors[f"{base}.weight"] = weight(128, 64, 10 * layer + i)
            tensors[f"{base}.bias"] = torch.ones(128)
    path = tmp_path / "bert.safetensors"
    save_file(tensors, path)
    return path


def output(capsys: Capture, *arguments: object) -> list[str]:
    assert main([str(a) for a in arguments]) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    return [line.rstrip() for line in lines]


def test_quantize_at_80_columns(bert: Path, tmp_path: Path, capsys: Capture) -> None:
    lines = output(capsys, "quantize", bert, tmp_path / "out.safetensors")
    assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line)
    for layer in range(3):
        for part in PARTS:  # on one line, with its numbers
            row = [line for line in lines if f"encoder.layer.{layer}.{part} " in line]
            assert len(row) == 1
            assert len(row[0].split()) == 5
    at = lines.index("kept as they are:")
    kept = "\n".join(lines[at:])
    assert "     1  embedding: rows are looked up" in kept
    assert "    12  not a weight" in kept
    assert "encoder.layer.*.attention.self.query.bias" in kept
    assert "and 1 more such" in kept  # three of the four patterns are named


def test_inspect_at_80_columns(bert: Path, tmp_path: Path, capsys: Capture) -> None:
    output(capsys, "quantize", bert, tmp_path / "out.safetensors")
    lines = output(capsys, "inspect", tmp_path / "out.safetensors", "--reference", bert)
    assert all(len(line) <= 80 for line in lines)
    assert "left out at 80 columns: global, scales" in "\n".join(lines)
    assert sum("encoder.layer.*.attention.output." in line for line in lines) == 2


@pytest.mark.parametrize("length", [20, 33, 60, 100])
def test_names_keep_32_characters(length: int, capsys: Capture) -> None:
    names = [("ab." * 40)[: length - 1] + str(i) for i in range(2)]
    heads = ("name", "first", "second", "third")
    rows = [(name, "1" * 20, "2" * 20, "3" * 20) for name in names]
    cli_output.show_table(heads, rows, left=1, optional=("third", "second"))
    out = capsys.readouterr().out
    assert out.count("1" * 20) == 2
    shared = next((line for line in out.splitlines() if "names below" in line), "")
    prefix = shared.partition("names below ")[2].strip()
    for name in names:
        short = name.removeprefix(prefix)
        assert short in out  # in one piece


def test_a_long_name_is_cut_at_a_dot(capsys: Capture) -> None:
    names = ("a." + "long_part." * 4 + "end", "b")
    rows = [(name, *("1" * 9,) * 4) for name in names]
    cli_output.show_table(("name", *"abcd"), rows, left=1)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[-4:-1] == [
        ["a.long_part.long_part.long_part.", *("1" * 9,) * 4],
        ["long_part.end"],
        ["b", *("1" * 9,) * 4],
    ]


def test_remarks_are_grouped(bert: Path, tmp_path: Path, capsys: Capture) -> None:
    packed = tmp_path / "packed.safetensors"
    output(capsys, "quantize", bert, packed)
    lines = output(capsys, "convert", packed, tmp_path / "ct.safetensors",
                   "--to", "compressed-tensors")  # fmt: skip
    assert sum("reciprocal" in line for line in lines) == 1
    lines = output(capsys, "convert", packed, tmp_path / "fp8.safetensors", "--to", "fp8-block")
    assert not any("Report(" in line for line in lines)
    assert any("dB, worst" in line for line in lines)


def test_diff_names_the_cause(bert: Path, tmp_path: Path, capsys: Capture) -> None:
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    output(capsys, "quantize", bert, good)
    lines = output(capsys, "diff", bert, good)
    assert sum("F32 -> NVFP4" in line for line in lines) == 12
    assert lines[-1] == "12 differences"
    assert "    12  consistent with 4-bit rounding" in lines
    tensors = load_file(good)
    name = "encoder.layer.0.output.dense"
    codes = tensors[f"{name}.weight"]
    tensors[f"{name}.weight"] = codes << 4 | codes >> 4
    save_file(tensors, bad)
    text = "\n".join(output(capsys, "diff", bert, bad))
    assert "    11  consistent with 4-bit rounding" in text
    assert "nibble-order: " in text
    text = "\n".join(output(capsys, "diff", good, bad))
    assert "NVFP4 -> NVFP4, other bytes in weight" in text
    assert "nibble-order: " in text


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([1.0, 2.0], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, 2.5]),
        ([0.0, 0.0], [0.0, 0.0]),
        ([0.0, 0.0], [0.0, 1.0]),
        ([1.0, NAN], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, INF]),
        ([1.0, NAN], [1.5, NAN]),
        ([1.0, INF], [1.5, -INF]),
        ([1e-30, 3e30], [2e-30, 3e30]),
        ([NAN, NAN], [NAN, NAN]),
        ([], []),
    ],
)
def test_explain_and_measure_agree_on_sqnr(a: list[float], b: list[float]) -> None:
    left, right = torch.tensor(a), torch.tensor(b)
    assert sqnr_db(left, right) == pytest.approx(report.sqnr_db(left, right))
    assert sqnr_db(left, right) == pytest.approx(_by_definition(a, b))


def _by_definition(a: list[float], b: list[float]) -> float:
    """10 log10 of signal over noise, in exact order and without torch."""
    finite = [math.isfinite(x) for x in a]
    if finite != [math.isfinite(y) for y in b] or not any(finite):
        return -math.inf
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if math.isfinite(x)]
    signal = math.fsum(float(np.float32(x)) ** 2 for x, _ in pairs)
    noise = math.fsum((float(np.float32(y)) - float(np.float32(x))) ** 2 for x, y in pairs)
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
