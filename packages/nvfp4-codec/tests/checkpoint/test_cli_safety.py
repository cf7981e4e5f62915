"""What the command must never do: lose a file, a result or a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nvfp4_codec import cli, cli_commands, cli_frame
from nvfp4_codec.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": torch.ones(32, 32), "b.weight": torch.ones(32, 32)}, path)
    return path


def test_a_plot_never_replaces_the_model_or_another_file(
    model: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "link.html").symlink_to(model)
    before = model.read_bytes()
    for target in (model, tmp_path / "notes.txt", tmp_path / "link.html", tmp_path):
        assert main(["inspect", str(model), "--plot", str(target)]) == 2
        assert "does not overwrite it" in capsys.readouterr().err
    other = tmp_path / "other.safetensors"
    save_file({"a.weight": torch.ones(32, 32)}, other)
    (tmp_path / "hard.html").hardlink_to(model)
    arguments = ["inspect", str(other), "--reference", str(model)]
    assert main([*arguments, "--plot", str(tmp_path / "hard.html")]) == 2
    assert model.read_bytes() == before
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_plot_replaces_an_older_page_and_leaves_no_temporary_file(
    model: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    assert main(["inspect", str(model), "--plot", str(page)]) == 0
    assert page.read_text().startswith("<!")
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "page.html"}


def test_an_ascii_terminal_gets_escapes(model: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "ascii:strict"
    }  # fmt: skip
    script = "import sys; from nvfp4_codec.cli import main; sys.exit(main())"
    out = tmp_path / "out.safetensors"
    command = [sys.executable, "-c", script, "quantize", str(model), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"32" in done.stdout


@pytest.mark.parametrize("place", ["parser", "command"])
def test_an_interrupt_is_one_line_wherever_it_comes(
    place: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    if place == "parser":
        monkeypatch.setattr(cli, "build_parser", interrupt)
    else:
        monkeypatch.setitem(cli_commands.COMMANDS, "inspect", interrupt)
    assert main(["inspect", str(model)]) == 2
    assert capsys.readouterr().err == "nvfp4: error: interrupted\n"


def test_an_error_is_one_line_without_control_characters(capsys: Capture, tmp_path: Path) -> None:
    assert main(["inspect", str(tmp_path), "--plot", "x"]) == 2
    capsys.readouterr()
    assert cli_frame.fail("nvfp4", "file \x1b]0;title\x07 \r\n\x9b\u202e name") == 2
    assert capsys.readouterr().err == (
        "nvfp4: error: file \\x1b]0;title\\x07 \\x0d\\x0a\\x9b\\x202e name\n"
    )
