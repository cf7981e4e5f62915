"""What the benchmark compares with computes the same layer, and says why where it cannot."""

from __future__ import annotations

import importlib.util
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megamoe_kernel.verify.cases import TINY, random_weights

FOLDER = Path(__file__).parents[2] / "benchmarks"


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"megamoe_benchmarks_{name}", FOLDER / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    return _module("peers")


@pytest.fixture(scope="module")
def plot() -> ModuleType:
    return _module("plot")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_torchs_grouped_products_are_the_layer(
    tokens: int, dtype: torch.dtype, peers: ModuleType
) -> None:
    w13, w2 = random_weights(TINY, "cpu", seed=0)
    layer = peers.Layer(peers.with_one_scale(w13), w2, TINY.num_topk, 64, 10.0)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, TINY.hidden, generator=generator).to(torch.bfloat16)
    ids = torch.rand(tokens, TINY.num_experts, generator=generator).topk(TINY.num_topk, -1).indices
    weights = torch.rand(tokens, TINY.num_topk, generator=generator)
    if tokens > 1:
        ids[1, 0], weights[1, 0] = -1, float("nan")
    y = peers.make_peer("torch grouped BF16", layer)(x, ids.to(dtype), weights)
    expected = peers.reference(layer, x, ids, weights)
    error = float((y.float() - expected.float()).norm() / expected.float().norm())
    assert error < 0.01  # its weights, sums and SwiGLU are rounded to BF16


def test_gate_and_up_under_one_scale(peers: ModuleType) -> None:
    w13, _ = random_weights(TINY, "cpu", seed=0)
    one = peers.with_one_scale(w13)
    assert torch.equal(one.weight_scale_2[:, 0], one.weight_scale_2[:, 1])
    assert torch.equal(one.weight_scale_2[:, 0], w13.weight_scale_2[:, 0])
    assert one.weight is w13.weight


def test_weights_in_blocks_of_fp8(peers: ModuleType) -> None:
    w13, _ = random_weights(TINY, "cpu", seed=0)
    blocks = peers._fp8_blocks(w13)
    weight, scale = blocks["weight"], blocks["weight_scale_inv"]
    assert weight.dtype == torch.float8_e4m3fn
    assert weight.shape == (TINY.num_experts, 2 * TINY.intermediate, TINY.hidden)
    assert scale.shape == (TINY.num_experts, 2 * TINY.intermediate // 128, TINY.hidden // 128)
    wide = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    exact = peers._dequantized(w13).float()
    error = float((weight.float() * wide - exact).norm() / exact.norm())
    assert 0.001 < error < 0.04


def test_peers_that_are_not_here_say_why(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    w13, w2 = random_weights(TINY, "cpu", seed=0)
    layer = peers.Layer(w13, w2, TINY.num_topk, 64, 10.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(peers, "find_spec", lambda name: name)
    for name in ("vLLM HUMMING", "vLLM Marlin", "vLLM DeepGEMM FP8"):
        with pytest.raises(peers.NotHereError, match="need a GPU"):
            peers.make_peer(name, layer)
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    with pytest.raises(peers.NotHereError, match="vLLM is not installed"):
        peers.make_peer("vLLM Marlin", layer)
    monkeypatch.delattr(torch, "_grouped_mm")
    with pytest.raises(peers.NotHereError, match="has no _grouped_mm"):
        peers.make_peer("torch grouped BF16", layer)


def test_every_peer_that_is_here_is_verified_and_timed(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    w13, w2 = random_weights(TINY, "cpu", seed=0)
    layer = peers.Layer(peers.with_one_scale(w13), w2, TINY.num_topk, 64, 10.0)
    x = torch.randn(12, TINY.hidden).to(torch.bfloat16)
    ids = torch.rand(12, TINY.num_experts).topk(TINY.num_topk, -1).indices
    turns = [(x, ids, torch.rand(12, TINY.num_topk))] * 2

    def microseconds(launches: list[Callable[[], torch.Tensor]]) -> list[float]:
        assert [tuple(launch().shape) for launch in launches] == [(12, TINY.hidden)] * 2
        return [3.0, 1.0, 2.0]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows, missing = peers.measure(layer, {12: turns}, microseconds)
    name = "torch grouped BF16"
    assert rows == [{"name": name, "tokens": 12, "microseconds": 2.0, "best": 1.0}]
    assert set(missing) == {"vLLM HUMMING", "vLLM Marlin", "vLLM DeepGEMM FP8"}
    stopping = {name: lambda layer: lambda x, topk_idx, topk_weights: 1 / 0}
    monkeypatch.setattr(peers, "PEERS", stopping)
    stopped = {name: "it stopped: ZeroDivisionError: division by zero"}
    assert peers.measure(layer, {12: turns}, microseconds) == ([], stopped)
    wrong = {name: lambda layer: lambda x, topk_idx, topk_weights: x}
    monkeypatch.setattr(peers, "PEERS", wrong)
    rows, missing = peers.measure(layer, {12: turns}, microseconds)
    assert rows == []
    assert "it is wrong: a relative error of" in missing[name]


def _row(tokens: int, time: float, chosen: bool = True) -> dict[str, object]:
    floors = {"bandwidth_us": 0.7 * time, "matmul_us": float(tokens)}
    return {"tokens": tokens, "microseconds": time, "chosen": chosen, **floors}


def test_a_plot_has_every_point(plot: ModuleType) -> None:
    report = {
        "gpu": "H200 <141 GB>",
        "ceilings": {"copy_gb_s": 4251.4, "bf16_tflops": 790.0},
        "rows": [_row(64, 450.0), _row(64, 999.0, chosen=False), _row(1, 80.5)],
        "peers": [{"name": "vLLM & others", "tokens": 1, "microseconds": 108.0}],
    }
    root = ET.fromstring(plot.draw_report(report))
    space = "{http://www.w3.org/2000/svg}"
    titles = {title.text for title in root.iter(f"{space}title")}
    assert titles == {
        "megamoe, 1 tokens: 80.5 µs", "megamoe, 64 tokens: 450.0 µs",
        "vLLM & others, 1 tokens: 108.0 µs",
    }  # fmt: skip
    words = {text.text for text in root.iter(f"{space}text")}
    assert "NVFP4 MoE layer, 48 experts, one H200 <141 GB>" in words
    assert {"weights at 4,251 GB/s", "products at 790 TFLOP/s", "tokens", "64", "1,000"} <= words
    first, second = list(root.iter(f"{space}circle"))[-2:]
    assert float(first.attrib["cx"]) < float(second.attrib["cx"])
    assert float(first.attrib["cy"]) > float(second.attrib["cy"])  # more time is further up
    del report["peers"]
    assert "vLLM" not in plot.draw_report(report)


@pytest.mark.parametrize(
    ("series", "match"),
    [({}, "no points"), ({"a": []}, "no points"), ({"a": [(1, 0.0)]}, "must be positive")],
    ids=str,
)
def test_nothing_cannot_be_drawn(
    series: dict[str, list[tuple[float, float]]], match: str, plot: ModuleType
) -> None:
    with pytest.raises(ValueError, match=match):
        plot.draw("", series, {})
