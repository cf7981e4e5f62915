"""``dsv4-quantize patches``; and nothing heavy is imported before it is needed."""

import argparse
import json
import subprocess
import sys

import pytest

from modelopt_v4_patches.cli import patches as command
from modelopt_v4_patches.patches import PATCHES


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers())
    arguments = parser.parse_args(["patches", *words])
    result: int = arguments.run(arguments)
    return result


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    shown = capsys.readouterr().out
    assert all(patch.name in shown for patch in PATCHES)
    assert "needed" in shown
    assert "TensorQuantizer.export_amax" in shown


def test_json_of_what_was_applied(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--apply", "--json") == 0
    rows = {row["patch"]: row for row in json.loads(capsys.readouterr().out)["patches"]}
    assert rows.keys() == {patch.name for patch in PATCHES}
    assert rows["export-weight"]["state"] == "applied"
    assert rows["export-weight"]["package"] == "nvidia-modelopt"
    assert rows["rms-norm"]["state"] in ("applied", "fixed upstream")
    assert {"target", "version", "detail", "upstream"} <= rows["rms-norm"].keys()


def test_unknown_versions_are_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("modelopt_v4_patches.patch.source_hash", lambda _: "0123456789abcdef")
    assert run() == 1
    assert "0123456789abcdef" in capsys.readouterr().out


def test_imports_are_inert() -> None:
    code = (
        "import sys, modelopt_v4_patches.registry, modelopt_v4_patches.cli.patches\n"
        "heavy = {'torch', 'transformers', 'modelopt', 'packaging'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
