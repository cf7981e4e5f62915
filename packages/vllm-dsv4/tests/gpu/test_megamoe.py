"""The routed experts on this project's kernel for Hopper, within vLLM: `--moe-kernel megamoe`."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest

from .agreement import FULL
from .fleet import MEGAMOE, Served
from .test_logprobs import Record, Reference, gate_of, parts

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
    refusals = []
    for part, found in parts(served, reference).items():
        record("agreement", engine=served.name, part=part, **vars(found))
        refusals += [f"{part}: {refusal}" for refusal in gate_of(part, FULL).refusals(found)]
    assert not refusals


@pytest.mark.parametrize("served", ENGINES, indirect=True)
def test_every_layers_experts_are_the_kernels(served: Served, layers: int) -> None:
    for built in served.about["built"]:  # of each rank
        methods = built["methods"]
        experts = {name: how for name, how in methods.items() if ".ffn.experts" in name}
        wanted = {f"model.layers.{layer}.ffn.experts" for layer in range(layers)}
        assert experts == dict.fromkeys(wanted, f"KernelExperts {NAME}")


@pytest.mark.parametrize("served", [("megamoe", "megamoe-graphs")], indirect=True, ids=" and ".join)
def test_cuda_graphs_give_eagers_tokens(served: tuple[Served, Served]) -> None:
    """Each prompt alone, so that both engines compute with the same numbers of tokens."""
    eager, graphs = served
    assert "Graph capturing finished" in graphs.log
    assert graphs.about
    assert eager.about
    assert eager.arrays["alone"].size
    np.testing.assert_array_equal(graphs.arrays["alone"], eager.arrays["alone"])


@pytest.fixture(scope="module")
def layers(place: Callable[[str], Path]) -> int:
    count: int = json.loads((place("full") / "config.json").read_text())["num_hidden_layers"]
    return count
