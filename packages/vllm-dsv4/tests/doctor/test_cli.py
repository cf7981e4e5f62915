"""The command: exit codes, the table, JSON, and that vLLM and torch stay out of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_dsv4.cli import doctor


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process where importing vLLM or torch fails, and no GPU is to be seen."""
    code = (
        "import sys\n"
        "sys.modules['vllm'] = sys.modules['torch'] = None\n"
        "import argparse\n"
        "from vllm_dsv4.cli import doctor\n"
        "parser = argparse.ArgumentParser()\n"
        "doctor.register(parser.add_subparsers())\n"
        "arguments = parser.parse_args(sys.argv[1:])\n"
        "from nvfp4_codec.errors import CodecError\n"
        "try:\n"
        "    sys.exit(arguments.run(arguments))\n"
        "except CodecError as error:\n"
        "    sys.exit(str(error))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "doctor", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100"},
    )


@pytest.fixture
def broken(healthy, writer, tmp_path: Path) -> Path:
    """One error, one thing that the plugin handles."""
    content = healthy("full")
    content.tensors.pop("layers.0.attn.kv_norm.weight")
    content.config.pop("topk_method")
    made: Path = writer(content, tmp_path / "broken")
    return made


def parsed(*arguments: str) -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    doctor.register(parser.add_subparsers())
    return parser.parse_args(["doctor", *arguments])


def test_without_vllm_torch_and_gpu(healthy, writer, tmp_path):
    made = run(str(writer(healthy("full"), tmp_path / "c")))
    assert made.stderr == ""
    assert made.returncode == 0
    assert "healthy: 0 error, 0 suspected, 0 handled" in made.stdout
    assert "not told: w1 (gate) and w3 (up)" in made.stdout


def test_findings_are_shown_and_give_one(broken, capsys):
    arguments = parsed(str(broken))
    assert arguments.run(arguments) == 1
    out = capsys.readouterr().out
    for text in ("missing-tensor", "layers.0.attn.kv_norm.weight", "effect", "fix"):
        assert text in out
    assert "the plugin handles this" in out
    assert "NOT healthy: 1 error, 0 suspected, 1 handled" in out


def test_what_the_plugin_handles_gives_zero(healthy, writer, tmp_path, capsys):
    content = healthy("full")
    content.config.pop("topk_method")
    arguments = parsed(str(writer(content, tmp_path / "c")))
    assert arguments.run(arguments) == 0
    assert "healthy: 0 error, 0 suspected, 1 handled" in capsys.readouterr().out


def test_json(broken, tiny, capsys):
    arguments = parsed(str(broken), "--reference", str(tiny), "--json")
    assert arguments.run(arguments) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["healthy"] is False
    (error,) = [f for f in document["findings"] if f["level"] == "error"]
    assert set(error) == {
        "code", "level", "evidence", "tensor", "file", "found", "expected", "effect", "fix",
        "sentence",
    }  # fmt: skip
    assert "layers.0.attn.kv_norm.weight" in error["sentence"]


def test_who_serves_it_is_said_plainly(healthy, writer, tmp_path, capsys):
    def served(content, name: str) -> str:
        arguments = parsed(str(writer(content, tmp_path / name)))
        arguments.run(arguments)
        (line,) = re.findall(r"^served by .*", capsys.readouterr().out, re.MULTILINE)
        return line

    official = served(healthy("official"), "official")
    assert official.startswith("served by stock vLLM, as far as it knows names and formats: ")
    assert "nobody" not in official
    content = healthy("full")
    folder = tmp_path / "cut"
    writer(content, folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    arguments = parsed(str(folder))
    assert arguments.run(arguments) == 1
    assert "served by nothing: its files cannot be opened" in capsys.readouterr().out


def test_many_of_a_kind_are_one_row(healthy, writer, tmp_path, capsys):
    content = healthy("full")
    for name in [name for name in content.tensors if name.endswith("w2.weight_scale_2")]:
        content.tensors[name] = 1 / content.tensors[name]
    arguments = parsed(str(writer(content, tmp_path / "c")))
    assert arguments.run(arguments) == 1
    out = capsys.readouterr().out
    assert out.count("reciprocal-global-scale") <= 4
    assert "and 23 more" in out


def test_main_ends_bad_input_with_two(tmp_path):
    from vllm_dsv4.cli import main

    try:
        code = main(["doctor", str(tmp_path / "absent")])
    except ModuleNotFoundError as error:  # a command that is not there yet
        pytest.skip(f"the command line is incomplete: {error}")
    assert code == 2
