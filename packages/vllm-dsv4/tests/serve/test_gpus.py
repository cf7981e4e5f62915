"""GPUs from nvidia-smi's answer, without CUDA."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_dsv4.errors import PlanError
from vllm_dsv4.gpus import Gpus, detect_gpus, parse_gpus, read_gpus

H200 = "NVIDIA H200, 143771, 627, 9.0"
B200 = "NVIDIA B200, 183359, 768, 10.0"


def table(*rows: str) -> str:
    return "".join(f"{i}, GPU-{i}0aa-{i}, {row}\n" for i, row in enumerate(rows))


def test_all_gpus_of_one_kind() -> None:
    found = read_gpus(table(*[B200] * 8), None)
    assert found == Gpus("B200", "blackwell", 8, (183359 - 768) << 20)
    assert str(found) == "8 x B200"
    two = read_gpus(table(*[H200] * 4), None, nodes=2)
    assert (two.kind, two.family, two.count, two.total) == ("H200", "hopper", 4, 8)
    assert str(two) == "2 nodes of 4 x H200"


@pytest.mark.parametrize(
    ("visible", "count"),
    [("0,2", 2), ("3", 1), ("GPU-10aa,GPU-2", 2), ("0,9,1", 1), ("-1", 0), ("", 0)],
)
def test_visible_devices(visible: str, count: int) -> None:
    rows = table(*[H200] * 4)
    if count:
        assert read_gpus(rows, visible).count == count
        return
    with pytest.raises(PlanError, match="no GPU is visible"):
        read_gpus(rows, visible)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H20-3e", "H20"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GB200", "GB200"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert read_gpus(table(f"{name}, 98304, [N/A], 9.0"), None).kind == kind


def test_gpus_that_cannot_serve_are_refused() -> None:
    with pytest.raises(PlanError, match="GPUs of different kinds: NVIDIA B200, NVIDIA H200"):
        read_gpus(table(B200, H200), None)
    assert read_gpus(table(B200, H200), "1").kind == "H200"
    with pytest.raises(PlanError, match="A100.* has compute capability 8.0"):
        read_gpus(table("NVIDIA A100-SXM4-80GB, 81920, 0, 8.0"), None)
    with pytest.raises(PlanError, match="compute capability 12.0"):
        read_gpus(table("NVIDIA RTX PRO 6000, 97887, 0, 12.0"), None)
    with pytest.raises(PlanError, match="a part of a GPU"):
        read_gpus(table(H200), "MIG-1234")


def program(folder: Path, text: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_program_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    program(tmp_path, f"echo \"$@\" > {tmp_path}/asked\necho '0, GPU-0, {H200}'")
    assert detect_gpus() == Gpus("H200", "hopper", 1, (143771 - 627) << 20)
    asked = (tmp_path / "asked").read_text()
    assert "memory.total,memory.reserved,compute_cap" in asked
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(PlanError, match="no GPU is visible"):
        detect_gpus()


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PlanError, match="no nvidia-smi here .* --gpus B200:8"):
        detect_gpus()
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    program(tmp_path, "echo 'NVIDIA-SMI has failed' >&2; exit 9")
    with pytest.raises(PlanError, match="nvidia-smi failed: NVIDIA-SMI has failed"):
        detect_gpus()


def test_given_by_hand() -> None:
    assert parse_gpus("h200:8") == Gpus("H200", "hopper", 8, int(139.8 * 2**30))
    assert parse_gpus("B300:4:268", 2) == Gpus("B300", "blackwell", 4, 268 << 30, 2)
    with pytest.raises(PlanError, match="0 nodes"):
        parse_gpus("H200:8", 0)
