"""The nvfp4 command: exit codes, JSON keys, one clear message per error, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nvfp4_codec.cli import main

Shards = Mapping[str, Mapping[str, Tensor]]
Write = Callable[[Path, Shards], Path]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def floats(tmp_path: Path, write_checkpoint: Write, float_shards: Shards) -> Path:
    return write_checkpoint(tmp_path / "floats", float_shards)


@pytest.fixture
def mxfp4(tmp_path: Path, write_checkpoint: Write, mxfp4_shards: Shards) -> Path:
    return write_checkpoint(tmp_path / "mxfp4", mxfp4_shards)


def run_json(capsys: Capture, *arguments: object) -> tuple[int, dict[str, Any]]:
    code = main([*map(str, arguments), "--json"])
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert isinstance(document, dict)
    return code, document


def test_quantize_verify_inspect_diff_explain(
    floats: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out"
    code, document = run_json(capsys, "quantize", floats, out)
    assert code == 0
    assert document.keys() == {
        "tensors", "input_bytes", "written", "kept", "output_bytes", "complete_unchecked",
    }  # fmt: skip
    quantized = [t for t in document["tensors"] if t["quantized"]]
    assert len(quantized) == 6
    assert all(15 < t["sqnr_db"] < 30 for t in quantized)
    assert document["output_bytes"] == sum(p.stat().st_size for p in out.glob("*.safetensors"))

    code, document = run_json(capsys, "verify", out, "--reference", floats)
    assert (code, document["findings"], document["needs_reference"]) == (0, [], [])
    assert document["checked"] == {"nvfp4": 6, "plain": 6}

    code, document = run_json(capsys, "inspect", out, "--reference", floats, "--each")
    assert code == 0
    row = next(r for r in document["families"] if r["name"].endswith("q_proj"))
    assert row.keys() == {
        "name", "format", "dtype", "shape", "count", "bytes", "scale_range",
        "global_scale_range", "amax", "sqnr_db", "problems",
    }  # fmt: skip
    assert (row["format"], row["shape"]) == ("nvfp4", [128, 64])
    assert 15 < row["sqnr_db"] < 30

    code, document = run_json(capsys, "diff", floats, out)
    assert code == 1
    differences = document["differences"]
    assert [d["status"] for d in differences] == ["values"] * 6  # scales are no rows of their own
    assert differences[0].keys() == {
        "name", "status", "a", "b", "sqnr_db", "explanation", "members",
    }  # fmt: skip
    row = next(d for d in differences if d["name"].endswith("q_proj"))
    assert (row["a"], row["b"]) == ("BF16", "NVFP4")
    assert {m.rpartition(".")[2] for m in row["members"]} == {
        "weight", "weight_scale", "weight_scale_2",
    }  # fmt: skip
    assert {d["explanation"] for d in differences} == {"consistent with 4-bit rounding"}
    code, document = run_json(capsys, "diff", out, out)
    assert (code, document["differences"]) == (0, [])

    name = "model.layers.0.self_attn.q_proj"
    assert run_json(capsys, "explain", out, out, name)[0] == 0
    code, document = run_json(capsys, "explain", floats, out, f"{name}.weight")
    assert (code, document["verdict"]) == (1, "unknown")  # rounding is no convention error
    assert document["notes"][0].startswith("consistent with 4-bit rounding (")


def test_findings_exit_with_one(floats: Path, tmp_path: Path, capsys: Capture) -> None:
    packed = {"a.weight": torch.ones(32, 32, dtype=torch.uint8),
              "a.weight_scale": torch.full((32, 4), 0x7F, dtype=torch.uint8)
              .view(torch.float8_e4m3fn)}  # fmt: skip
    save_file(packed, tmp_path / "bad.safetensors")
    code, document = run_json(capsys, "verify", tmp_path / "bad.safetensors")
    assert code == 1
    codes = [finding["code"] for finding in document["findings"]]
    assert codes == ["missing-weight-scale-2", "nan-scale"]
    assert document["findings"][0].keys() == {
        "code", "tensor", "file", "found", "expected", "fix", "confidence",
    }  # fmt: skip
    assert main(["verify", str(tmp_path / "bad.safetensors")]) == 1
    text = capsys.readouterr().out
    assert "missing-weight-scale-2 (certain)  bad.safetensors: a.weight" in text
    assert "2 findings in 1 weights" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "{tmp}/none"], "does not exist"),
        (["verify", "{tmp}/junk.safetensors"], "junk.safetensors: header length"),
        (["quantize", "{floats}", "{floats}"], "input is never touched"),
        (["quantize", "{floats}", "{tmp}/out", "--include", "nope"], "matches none"),
        (["quantize", "{floats}", "{tmp}/out", "--profile", "nope"], "profile is 'nope'"),
        (["quantize", "{floats}", "{tmp}/one.safetensors"], "give a folder as output"),
        (["convert", "{floats}", "{tmp}/out", "--to", "nvfp4"], "nothing to convert"),
        (["quantize", "{floats}", "/proc/nowhere/out"], "writing failed"),
        (["inspect", "{floats}", "--plot", "{tmp}/no/p.html"], "No such file"),
        (["explain", "{floats}", "{floats}", "nope"], "tensor nope: not among"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_two(
    arguments: list[str], message: str, floats: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "junk.safetensors").write_bytes(b"\xff" * 64)
    filled = [a.format(tmp=tmp_path, floats=floats) for a in arguments]
    assert main(filled) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("nvfp4: error: ")
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") == 1


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    from nvfp4_codec.errors import CheckpointError

    with pytest.raises(CheckpointError):
        main(["inspect", str(tmp_path / "none"), "--debug"])


def test_dry_run_writes_nothing(floats: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["quantize", str(floats), str(tmp_path / "out"), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "embedding: rows are looked up" in text
    assert "6 of 12 tensors to NVFP4" in text
    assert not (tmp_path / "out").exists()


def test_resume_finishes_and_says_what_it_kept(
    floats: Path, tmp_path: Path, capsys: Capture
) -> None:
    arguments = ["quantize", str(floats), str(tmp_path / "out")]
    assert main(arguments) == 0
    assert main(arguments) == 2
    capsys.readouterr()
    code, document = run_json(capsys, *arguments, "--resume")
    assert (code, document["written"], len(document["kept"])) == (0, [], 2)


class Page(HTMLParser):
    """Collects what a page would load or run."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [str(v) for k, v in attrs if k in ("src", "href", "onload", "onerror")]


def test_the_plot_is_self_contained_and_escapes_names(mxfp4: Path, tmp_path: Path) -> None:
    assert main(["inspect", str(mxfp4), "--plot", str(tmp_path / "page.html")]) == 0
    page = Page()
    text = (tmp_path / "page.html").read_text()
    page.feed(text)
    assert "svg" in page.tags
    assert "layers.*.ffn.experts.*.w1" in text
    assert not page.links
    assert "url(" not in text
    evil = "<script>alert(1)</script>\x1b[31m"
    save_file({f"{evil}.weight": torch.ones(16, 16)}, tmp_path / "evil.safetensors")
    assert main(["inspect", str(tmp_path / "evil.safetensors"), "--plot",
                 str(tmp_path / "page.html")]) == 0  # fmt: skip
    page = Page()
    page.feed((tmp_path / "page.html").read_text())
    assert "script" not in page.tags


def test_terminal_output_has_no_control_characters(tmp_path: Path, capsys: Capture) -> None:
    evil = "a\x1b[2J\r"
    tensors = {f"{evil}.weight": torch.full((16, 16), float("nan"))}
    save_file(tensors, tmp_path / "evil.safetensors")
    for command in (["inspect"], ["verify"], ["quantize", "{out}"]):
        filled = [c.format(out=tmp_path / "out.safetensors") for c in command]
        main([filled[0], str(tmp_path / "evil.safetensors"), *filled[1:]])
        captured = capsys.readouterr()
        assert not {c for c in captured.out + captured.err if ord(c) < 32} - {"\n"}


def test_headers_only_and_convert_never_import_torch(mxfp4: Path, tmp_path: Path) -> None:
    """Importing torch takes longer than copying a gigabyte."""
    paths = os.pathsep.join(sys.path)
    script = (
        "import sys; from nvfp4_codec.cli import main\n"
        "_, source, output = sys.argv\n"
        "assert main(['convert', source, output, '--to', 'nvfp4']) == 0\n"
        "assert main(['inspect', source, '--headers-only']) == 0\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-c", script, str(mxfp4), str(tmp_path / "out")]
    subprocess.run(command, check=True, env=environment)


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("nvfp4 ")
