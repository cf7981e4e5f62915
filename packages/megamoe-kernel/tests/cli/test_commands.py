"""The other commands: what they print, and their exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megamoe_kernel.cli import main
from megamoe_kernel.errors import CompileError
from megamoe_kernel.jit.compile import KernelSource
from megamoe_kernel.jit.nvrtc import find_nvrtc
from megamoe_kernel.jit.targets import Target
from megamoe_kernel.kernels import kernels_of
from megamoe_kernel.models import MODELS, MoEShape


def test_buffer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buffer", "--model=deepseek-v4-flash", "--json", "--tokens", "64"]) == 0
    sizes = json.loads(capsys.readouterr().out)["sizes"]
    assert [row["EP"] for row in sizes] == ["1", "2", "4", "8", "16", "32", "64", "72"]
    assert main(["buffer", "--model=deepseek-v4-pro"]) == 0
    assert "432 in all" in capsys.readouterr().out


@pytest.mark.parametrize("tokens", ["-5", "0", "1048577", "9" * 30])
def test_sizes_that_cannot_be(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buffer", "--model=deepseek-v4-pro", "--tokens", tokens]) == 2
    assert f"num_max_tokens_per_rank is {tokens}, expected" in capsys.readouterr().err


def test_the_largest_size_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["buffer", "--model=deepseek-v4-pro", "--json", "--tokens", "1048576", "1048576"]
    assert main(words) == 0
    for row in json.loads(capsys.readouterr().out)["sizes"]:
        assert int(row["bf16, 1,048,576 tokens"].split(" ")[0].replace(",", "")) > 2 * 7168


@pytest.mark.parametrize("ranks", ["0", "-3", "99"])
def test_ranks_that_cannot_be(
    ranks: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["verify", f"--ranks={ranks}", f"--out={tmp_path / 'x.json'}"]) == 2
    assert re.search(rf"(number of ranks is|has) {ranks}", capsys.readouterr().err)


def test_precompile(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megamoe_kernel._native", reason="needs the compiled extension")
    try:
        find_nvrtc()
    except CompileError as error:
        pytest.skip(f"needs NVRTC: {error}")
    wanted = {}

    def two_and_a_layer(shape: MoEShape, num_ranks: int, target: Target) -> list[KernelSource]:
        """That all of them compile is seen in jit/test_compile.py, and takes long."""
        assert (shape, num_ranks) == (MODELS["deepseek-v4-pro"], 8)
        wanted[target] = kernels_of(shape, num_ranks, target)[:3]
        return wanted[target]

    monkeypatch.setattr("megamoe_kernel.kernels.kernels_of", two_and_a_layer)
    words = ["precompile", "--model=deepseek-v4-pro", "--ep=8", f"--cache={tmp_path / 'c'}"]
    assert main([*words, "--arch", "sm_90a", "sm_100f", "--arch", "sm_90a", "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert wanted.keys() == {"sm_90a", "sm_100f"}
    assert [(row["target"], row["kernel"], row["block_rows"]) for row in kernels] == [
        (target, made.name, made.block_rows) for target, own in wanted.items() for made in own
    ]
    assert [row["block_rows"] > 0 for row in kernels] == [
        row["kernel"].startswith("sm") for row in kernels
    ]
    assert not any(kernel["cached"] for kernel in kernels)
    assert main([*words, "--arch", "sm_90a"]) == 0
    assert "was there" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--arch", "sm_90a", "sm_100"], "target is 'sm_100': it lacks tcgen05"),
        (["--arch", "sm_90a,sm_100a"], "target is 'sm_90a,sm_100a': it is not known"),
        (["--arch", ""], "target is '': it is not known"),
        (["--arch", "sm_80"], "target is 'sm_80': its tensor cores have neither"),
        (["--arch", "sm_90a", "--ep", "5"], "expected a multiple of the 5 ranks"),
        (["--arch", "sm_90a", "--ep", "128"], "largest NVLink domain has 72 GPUs"),
        (["--arch", "sm_90a", "--ep", "0"], "the number of ranks is 0"),
    ],
)
def test_what_precompile_refuses(
    words: list[str], match: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    assert main(["precompile", "--model=deepseek-v4-pro", f"--cache={cache}", *words]) == 2
    assert match in capsys.readouterr().err
    assert not cache.exists()
