"""A kernel from elsewhere takes over the routed experts: found by entry point, chosen by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from vllm_dsv4.errors import OptionError
from vllm_dsv4.moe_backend import GROUP, MoEShape, backends, find_backend, make_backend
from vllm_dsv4.testing import RemoteError

from .conftest import Vllm

MEGA = {"moe_backend": "deep_gemm_mega_moe", "expert_parallel": True}
SHAPE = MoEShape(16, 16, 0, 2, 256, 128, 512, 10.0, 1)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with an installed package that advertises the toy."""
    shutil.copy(Path(__file__).with_name("toy_backend.py"), tmp_path)
    return _advertise(tmp_path, "toy = toy_backend:Toy")


def _advertise(site: Path, entry: str) -> Path:
    about = site / "some_backend-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: some-backend\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[{GROUP}]\n{entry}\n")
    return site


def test_a_backend_is_found_by_its_entry_point(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="'toy'; installed backends:.* Install the package"):
        find_backend("toy")
    monkeypatch.syspath_prepend(site)
    assert "toy" in backends()
    backend = make_backend("toy", (9, 0), SHAPE, None)
    assert backend.name == "toy"


def test_a_backends_refusal_has_its_reason(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(site)
    with pytest.raises(OptionError, match=r"cannot be used here: compute capability \(8, 0\)"):
        make_backend("toy", (8, 0), SHAPE, None)


@pytest.mark.parametrize("shared", ["stored", "bf16"])
def test_it_gets_the_experts_and_the_tokens_and_its_result_counts(
    vllm: Vllm, site: Path, checkpoint: Any, source: Any, oracle: ModuleType, shared: str
) -> None:
    before = len(vllm.harness.log())
    found = vllm.call(
        "with_backend", site=str(site), folder=checkpoint("two-scales"),
        options={"moe_kernel": "toy", "shared_dtype": shared, "verify_load": True}, **MEGA,
    )  # fmt: skip
    assert "verified: 58 linears hold what is stored" in vllm.harness.log()[before:]
    assert found["shapes"] == [SHAPE]  # one backend for all layers
    assert found["deep_gemm"] == 0  # what vLLM's warm-up of DeepGEMM would run
    assert set(found["counts"].values()) == {1}
    assert not [name for name in found["parameters"] if ".experts.w" in name]
    assert torch.equal(found["with_shared"], found["y"][0] + 2 * found["x"])
    assert torch.equal(found["layer"], found["y"][1])
    # w1 and w3 have two scales in this checkpoint, which costs up to 4.8 % of a block.
    assert max(_errors(found, source("two-scales"), oracle)) < 0.03


def _errors(found: Any, stored: Any, oracle: ModuleType) -> list[float]:
    """Of each layer's result, relative to the layer in float64."""
    x, ids, weights = (found[name].double() for name in ("x", "ids", "weights"))
    errors = []
    for layer, y in enumerate(found["y"]):
        expected = torch.zeros(x.shape, dtype=torch.float64)
        for token in range(len(x)):
            for expert, weight in zip(ids[token].long().tolist(), weights[token], strict=True):
                module = f"layers.{layer}.ffn.experts.{expert}"
                w1, w2, w3 = (oracle.values(stored, f"{module}.w{i}") for i in (1, 2, 3))
                gate, up = (w1 @ x[token]).clamp(max=10.0), (w3 @ x[token]).clamp(-10.0, 10.0)
                expected[token] += weight * (w2 @ (silu(gate) * up))
        errors.append(float((y.double() - expected).norm() / expected.norm()))
    return errors


def test_the_kernel_of_this_project_fits(
    vllm: Vllm, tmp_path: Path, checkpoint: Any, source: Any, oracle: ModuleType
) -> None:
    """Its weights, its buffer and its operator, with its reference in place of a Hopper GPU."""
    pytest.importorskip("megamoe_kernel")
    shutil.copy(Path(__file__).with_name("megamoe_on_cpu.py"), tmp_path)
    site = _advertise(tmp_path, "megamoe-cpu = megamoe_on_cpu:OnCpu")
    found = vllm.call(
        "with_backend", site=str(site), folder=checkpoint("full"),
        options={"moe_kernel": "megamoe-cpu"}, **MEGA,
    )  # fmt: skip
    assert len(found["y"]) > 1
    assert max(_errors(found, source("full"), oracle)) < 0.01  # slots and intermediate are BF16
    assert torch.equal(found["layer"], found["y"][1])


def test_the_draft_uses_it_too(vllm: Vllm, site: Path, checkpoint: Any) -> None:
    found = vllm.call(
        "with_backend", site=str(site), folder=checkpoint("full"), mtp=True,
        options={"moe_kernel": "toy"}, **MEGA,
    )  # fmt: skip
    assert len(found["y"]) == 1
    assert found["deep_gemm"] == 0


def test_what_it_cannot_run_is_refused_before_anything_is_loaded(
    vllm: Vllm, site: Path, checkpoint: Any
) -> None:
    toy = {"site": str(site), "folder": checkpoint("full"), "options": {"moe_kernel": "toy"}}
    with pytest.raises(RemoteError, match="it has one rank, not 2"):
        vllm.call("with_backend", tp=2, **toy, **MEGA)
    with pytest.raises(RemoteError, match="add --moe-backend deep_gemm_mega_moe"):
        vllm.call("with_backend", **toy)
    with pytest.raises(RemoteError, match="moe_kernel is 'other'; installed backends: .*toy"):
        vllm.call("with_backend", **{**toy, "options": {"moe_kernel": "other"}}, **MEGA)
