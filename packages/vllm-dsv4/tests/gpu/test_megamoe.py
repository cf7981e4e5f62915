"""The routed experts on this project's kernel for Hopper, within vLLM: `--moe-kernel megamoe`."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from .agreement import FULL
from .fleet import MEGAMOE, Served
from .test_kernels import assert_same_alone
from .test_logprobs import Record, Reference, assert_follows

NAME = MEGAMOE["moe_kernel"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.hopper,
    pytest.mark.filterwarnings("ignore"),  # transformers', as it finds its peers
]
# Engines find it as vLLM's processes do; by this mark the fleet knows not to start them.
if not entry_points(group="vllm_dsv4.moe_backends", name=NAME):
    pytestmark.append(pytest.mark.skip(reason="megamoe-kernel not installed: no entry point"))

ENGINES = [
    "megamoe",
    "megamoe-graphs",
    pytest.param("megamoe-ep2", marks=pytest.mark.multi_gpu),
]


@pytest.mark.parametrize("served", ENGINES, indirect=True)
def test_they_follow_the_float32_forward(
    served: Served, reference: Reference, record: Record
) -> None:
    assert_follows(served, reference, record, FULL)


@pytest.mark.parametrize("served", ENGINES, indirect=True)
def test_every_layers_experts_are_the_kernels(served: Served, layers: int) -> None:
    for built in served.about["built"]:  # of each rank
        methods = built["methods"]
        experts = {name: how for name, how in methods.items() if ".ffn.experts" in name}
        wanted = {f"model.layers.{layer}.ffn.experts" for layer in range(layers)}
        assert experts == dict.fromkeys(wanted, f"KernelExperts {NAME}")


@pytest.mark.parametrize("served", [("megamoe", "megamoe-graphs")], indirect=True, ids=" and ".join)
def test_cuda_graphs_give_eagers_tokens(served: tuple[Served, Served]) -> None:
    assert_same_alone(*served)


@pytest.fixture(scope="module")
def layers(place: Callable[[str], Path]) -> int:
    count: int = json.loads((place("full") / "config.json").read_text())["num_hidden_layers"]
    return count
