"""``dsv4-quantize finalize``: what it prints and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from modelopt_v4_patches.cli import main
from modelopt_v4_patches.finalize import finalize_checkpoint

Make = Callable[..., Path]


def same_scales(tensors: dict[str, Tensor]) -> None:
    for name in tensors:
        if name.endswith("weight_scale_2"):
            tensors[name] = tensors[name] * 0 + 2.0**-12


def run(*words: object) -> int:
    return main(["finalize", *map(str, words)])


def test_a_healthy_export_exits_with_0(
    make_export: Make, reference_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_export(change=same_scales)
    assert run(source, tmp_path / "a", "--reference-config", reference_config) == 0
    shown = capsys.readouterr().out
    assert "renamed from hf names" in shown
    assert "added to ignore: head, layers.*.attn.wo_a, layers.*.ffn.gate" in shown
    assert "layers.*.attn.wq_a+wkv" in shown
    assert run(source, "--in-place", "--reference", reference_config, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["in_place"] is True
    assert document["findings"] == []
    assert document["fused"]["layers.*.attn.wq_a+wkv"]["groups"] == 2


def test_findings_exit_with_1_and_unify_removes_them(
    make_export: Make, reference_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_export()
    assert run(source, tmp_path / "a", "--reference-config", reference_config) == 1
    assert "finding: 2 of 2 layers.*.attn.wq_a+wkv differ in weight_scale_2" in (
        capsys.readouterr().out
    )
    arguments = (source, tmp_path / "b", "--reference-config", reference_config, "--unify")
    assert run(*arguments, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    unified = document["fused"]["layers.*.attn.wq_a+wkv"]["unified"]
    assert unified["groups"] == 2
    assert unified["inexact_blocks"] > 0
    assert run(*arguments, "--resume") == 0
    assert "2 of 2" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["OUT"], "--reference-config is missing"),
        (["--reference-config", "REF"], "either OUTPUT or --in-place"),
        (["OUT", "--in-place", "--reference-config", "REF"], "either OUTPUT or --in-place"),
        (["--in-place", "--unify", "--reference-config", "REF"], "unify changes data"),
        (["OUT", "--undo"], "--undo takes INPUT only"),
        (["--undo"], "no run in place was interrupted"),
    ],
)
def test_wrong_arguments_exit_with_2(
    make_export: Make, reference_config: Path, tmp_path: Path, words: list[str], message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    given = {"OUT": str(tmp_path / "out"), "REF": str(reference_config)}
    assert run(make_export(), *(given.get(word, word) for word in words)) == 2
    assert message in capsys.readouterr().err


def test_undo_takes_an_interrupted_run_back(
    make_export: Make, reference_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_export()
    before = {path.name: path.read_bytes() for path in source.iterdir()}

    class Stop(BaseException):
        pass

    def stop(step: str) -> Any:
        if step == "fsync header":
            raise Stop

    with pytest.raises(Stop):
        finalize_checkpoint(
            source, None, reference_config=reference_config, in_place=True, fault=stop
        )
    assert run(source, "--undo") == 0
    assert "as it was before" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
