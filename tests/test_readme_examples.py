"""The examples in the READMEs and on the front page of the documentation run as they are."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nvfp4_codec.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "packages/nvfp4-codec/README.md", "docs/index.md")


def code_blocks(page: str, language: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```"
    return re.findall(pattern, (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_python_examples_restore_the_tensor(page: str) -> None:
    blocks = code_blocks(page, "python")
    assert blocks
    torch.manual_seed(0)
    names: dict[str, torch.Tensor] = {}
    for block in blocks:  # a later one goes on where the one before it ended
        exec(compile(block, page, "exec"), names)
        for restored in [names[name] for name in ("y", "out") if name in names]:
            error = (restored.float() - names["x"].float()).norm() / names["x"].float().norm()
            assert error < 0.15


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A folder with `model/` in BF16, `experts.safetensors` in MXFP4, and the test assets."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    generator = torch.Generator().manual_seed(0)
    (tmp_path / "model").mkdir()
    weight = torch.randn(64, 128, generator=generator).bfloat16()
    tensors = {"layers.0.ffn.up.weight": weight, "norm.weight": torch.ones(64).bfloat16()}
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    codes = torch.randint(-128, 128, (64, 64), dtype=torch.int8, generator=generator)
    scale = torch.randint(118, 124, (64, 4), dtype=torch.uint8, generator=generator)
    name = "layers.0.ffn.experts.0.w1"
    experts = {f"{name}.weight": codes, f"{name}.scale": scale.view(torch.float8_e8m0fnu)}
    save_file(experts, tmp_path / "experts.safetensors")
    return tmp_path


@pytest.mark.parametrize("page", PAGES[:2])
def test_command_line_examples_succeed(
    page: str,
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(checkpoints)
    lines = [line for block in code_blocks(page, "sh") for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("nvfp4 ")]
    assert len(commands) >= 3
    for command in commands:
        code = main(command[1:])
        # diff is like the tool of that name: it succeeds, and says that it found differences.
        assert code == (1 if command[1] == "diff" else 0), (command, capsys.readouterr())
