"""``dsv4-quantize validate``: exit codes, the table, JSON, bad input."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from modelopt_v4_patches.cli import validate as command


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers())
    arguments = parser.parse_args(["validate", *map(str, words)])
    code: int = arguments.run(arguments)
    return code


@pytest.fixture
def broken(healthy, write, tmp_path) -> Path:
    from dataclasses import replace

    content = replace(healthy["experts"], tensors=dict(healthy["experts"].tensors))
    for expert in (1, 2, 3):
        del content.tensors[f"layers.0.ffn.experts.{expert}.w2.weight_scale_2"]
    folder: Path = write(content, tmp_path / "broken")
    return folder


def test_a_healthy_one_exits_with_0(healthy, write, tiny, tmp_path, capsys):
    folder = write(healthy["experts"], tmp_path / "healthy", shards=2)
    assert run(folder, "--against", tiny, "--workers", 1) == 0
    output = capsys.readouterr().out
    assert "routed_expert" in output
    assert "equal" in output
    assert output.splitlines()[-1] == "0 findings"


def test_findings_exit_with_1_and_are_grouped(broken, capsys):
    assert run(broken, "--sample", 0) == 1
    output = capsys.readouterr().out
    assert output.count("missing-weight-scale-2") == 1
    assert "layers.0.ffn.experts.1.w2.weight" in output
    assert "2 more such: layers.0.ffn.experts.2.w2.weight" in output
    assert "fix       " in output
    assert output.splitlines()[-1] == "3 findings"


def test_json(broken, capsys):
    assert run(broken, "--json", "--sample", 0) == 1
    document: Any = json.loads(capsys.readouterr().out)
    assert [f["code"] for f in document["findings"]] == ["missing-weight-scale-2"] * 3
    assert {row["role"] for row in document["rows"]} >= {"routed_expert", "routed_expert (mtp)"}


@pytest.mark.parametrize("sample", ["some", "-1", "1.5"])
def test_a_sample_that_is_none(tmp_path, sample: str, capsys):
    with pytest.raises(SystemExit) as raised:
        run(tmp_path, f"--sample={sample}")
    assert raised.value.code == 2
    assert "none of auto, all and a number" in capsys.readouterr().err
