"""megamoe verify: says what is wrong, what is absent and what is not there to run on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe_kernel import SymmBuffer, fp8_nvfp4_mega_moe, prepare_inputs, reference
from megamoe_kernel.api import ACTIVATIONS, Backend
from megamoe_kernel.cli import main
from megamoe_kernel.jit.targets import TARGETS, Target
from megamoe_kernel.models import MODELS
from megamoe_kernel.verify import checks, ranks
from megamoe_kernel.verify.cases import (
    CASES,
    FLASH,
    PRO,
    TINY,
    Case,
    hot,
    masked,
    random_weights,
    spread,
)
from megamoe_kernel.verify.report import Finding, Report, Timing
from megamoe_kernel.verify.run import LAYOUTS
from megamoe_kernel.weights import Arch

CPU = torch.device("cpu")
SMALL = [case for case in CASES if case.shape == TINY]
MACHINE = {"gpu": "none", "target": "sm_90a", "torch": "2"}


def _check(arch: Arch, cases: list[Case], backend: Backend = "kernel") -> Iterator[Finding]:
    load = checks.public_layer(arch, backend)
    return checks.check_layer("layer", load, ACTIVATIONS[arch], CPU, cases)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_reference_backend_passes_every_case(arch: Arch) -> None:
    found = list(_check(arch, SMALL, "reference"))
    assert [finding.case for finding in found] == [case.name for case in SMALL]
    assert {finding.status for finding in found} == {"passed"}
    assert checks.check_transforms(CPU, arch, TINY).status == "passed"


def test_a_kernel_that_does_not_exist_is_absent_not_wrong() -> None:
    (found,) = _check("sm_90a", SMALL)
    assert found.status == "absent"
    assert "no kernel" in found.note
    assert not Report(MACHINE, [found], []).passed  # and nothing was compared


def _scaled(y: Tensor) -> None:
    y *= 1.01


def _swapped(y: Tensor) -> None:
    y[:2] = y[:2].flip(0).clone()


def _unwritten(y: Tensor) -> None:
    y[-1:, 5] = float("nan")


@pytest.mark.parametrize("fault", [_scaled, _swapped, _unwritten])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_wrong_results_are_found(arch: Arch, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = fp8_nvfp4_mega_moe

    def wrong(y: Tensor, *arguments: Any, **options: Any) -> None:
        right(y, *arguments, **{**options, "backend": "reference"})
        fault(y)

    monkeypatch.setattr("megamoe_kernel.verify.checks.fp8_nvfp4_mega_moe", wrong)
    found = list(_check(arch, [case for case in SMALL if case.tokens == 33]))
    assert [finding.status for finding in found] == ["failed"]
    assert not Report(MACHINE, found, []).passed


def test_a_wait_that_was_given_up_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def stalled(y: Tensor, l1: Any, l2: Any, buffer: SymmBuffer, **options: Any) -> None:
        words = buffer.field("failure").view(torch.int32)
        words[0, :9] = torch.tensor([4, 0, 7, 32, 5, -1, 16, 15, 1])

    monkeypatch.setattr("megamoe_kernel.verify.checks.fp8_nvfp4_mega_moe", stalled)
    (found,) = _check("sm_90a", SMALL[:1])
    assert found.status == "failed"
    assert "stage L1, tile 5 (CTA 7, thread 32)" in found.note


def test_a_wrong_byte_of_prepare_inputs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(5, 256, torch.bfloat16)]
    (right,) = checks.check_prepare_inputs(CPU, "reference", cases)
    assert (right.status, right.error) == ("passed", 0)

    def wrong(x: Tensor, buffer: Any, **options: Any) -> None:
        prepare_inputs(x, buffer, **options)
        buffer.x_sf.view(torch.uint8)[4, 3] ^= 1
        buffer.x[5, 0] = 0  # a row that was not asked for

    monkeypatch.setattr("megamoe_kernel.verify.checks.prepare_inputs", wrong)
    (found,) = checks.check_prepare_inputs(CPU, "reference", cases)
    assert (found.status, found.error) == ("failed", 2)


def test_routings_are_what_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = spread(TINY, 64, generator)
    assert all(len(set(row.tolist())) == TINY.num_topk for row in ids)
    ids = hot(TINY, 64, generator)
    assert bool((ids[:, 0] == 0).all())
    assert int(ids.max()) < TINY.num_experts // 2
    ids = masked(TINY, 64, generator)
    assert 0.2 < float((ids == -1).float().mean()) < 0.5
    assert bool((ids[0] == -1).all())


def test_cases_are_the_shapes_of_the_models() -> None:
    for shape, name in ((PRO, "deepseek-v4-pro"), (FLASH, "deepseek-v4-flash")):
        assert replace(shape, num_experts=8 * shape.num_experts) == MODELS[name]
    assert set(LAYOUTS) == set(TARGETS)


def test_models_are_those_of_the_official_configs() -> None:
    folder = Path(__file__).parents[3] / "nvfp4-codec" / "tests" / "schemas" / "data"
    if not folder.exists():
        pytest.skip("needs the repository: reads the codec's copies of the official config.json")
    for name, shape in MODELS.items():
        config = json.loads((folder / f"{name.rpartition('-')[2]}.config.json").read_text())
        assert shape.num_experts == config["n_routed_experts"]
        assert shape.num_topk == config["num_experts_per_tok"]
        assert shape.hidden == config["hidden_size"]
        assert shape.intermediate == config["moe_intermediate_size"]


def test_swiglu_reaches_its_clamp() -> None:
    """Else a kernel without a clamp would pass."""
    case = Case("", TINY, 33, spread)
    w13, _ = random_weights(TINY, CPU, 1)
    x, _, _ = checks.inputs_of(case, CPU)
    gate, up = reference.linear1(x, w13, 0)
    clamped = (gate > checks.SWIGLU_LIMIT) | (up.abs() > checks.SWIGLU_LIMIT)
    assert 0.001 < float(clamped.float().mean()) < 0.2


def test_the_report_is_written_whole_or_not(tmp_path: Path) -> None:
    finding = Finding("layer", "one", "passed", 1e-4, 1e-3)
    report = Report(MACHINE, [finding], [Timing("t", "c", 10.0, 0.1, 0.001)])
    path = tmp_path / "report.json"
    report.write(path)
    read = json.loads(path.read_text())
    assert read["passed"] is True
    assert read["timings"][0]["gigabytes_per_second"] == pytest.approx(100)
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]
    bad = Report(MACHINE, [replace(finding, error=float("nan"))], [])
    with pytest.raises(ValueError, match="not JSON compliant"):
        bad.write(path)
    assert json.loads(path.read_text()) == read
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert main(["verify"]) == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_report_that_cannot_be_written_is_refused_before_the_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def never(**options: Any) -> Report:
        raise AssertionError("the runs began")

    monkeypatch.setattr("megamoe_kernel.verify.run.run_all", never)
    assert main(["verify", f"--out={tmp_path / 'missing' / 'report.json'}"]) == 2
    assert f"{tmp_path / 'missing'}: there is no such folder" in capsys.readouterr().err
    assert main(["verify", f"--out={tmp_path}"]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_a_gpu_without_kernels_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A card")
    assert main(["verify"]) == 2
    assert "A card, has compute capability 8.0, there are kernels for 10.0, 10.3, 9.0" in (
        capsys.readouterr().err
    )


def test_more_ranks_than_gpus_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main(["verify", "--ranks=2"]) == 2
    assert "the number of ranks is 2, expected 1 to 1" in capsys.readouterr().err


_RANK = """
import json, os, pathlib, sys, time
rank, (launches, folder) = os.environ["RANK"], sys.argv[1:]
if rank == "1":
    raise SystemExit("out of luck")
if rank == "2":
    time.sleep(1000)  # waits for rank 1
finding = dict(check="ranks", case=f"rank {rank}, {launches} launches", status="passed", error=0.5)
pathlib.Path(folder, f"{rank}.json").write_text(json.dumps([finding]))
"""


@pytest.mark.parametrize("target", TARGETS)
def test_ranks_run_the_layer_of_every_target(target: Target) -> None:
    way, _, activation = ranks._ways(target)[-1]
    assert (way, activation) == ("layer", ACTIVATIONS[LAYOUTS[target]])


def test_ranks_that_die_or_hang_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_COMMAND", [sys.executable, "-c", _RANK])
    monkeypatch.setattr(ranks, "_GRACE_SECONDS", 1)
    right, dead, hanging = ranks.check_ranks(3, launches=7)
    assert (right.case, right.status, right.error) == ("rank 0, 7 launches", "passed", 0.5)
    assert (dead.case, dead.status, dead.note) == ("rank 1 of 3", "failed", "out of luck")
    assert (hanging.case, hanging.status) == ("rank 2 of 3", "failed")
    assert "was ended" in hanging.note
