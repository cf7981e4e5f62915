"""vLLM's logprobs against the float32 forward of the same weights; a wrong expert must show."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from .agreement import FP8, FULL, HEAVY, HEAVY_BF16, Agreement, Gate, Logprobs, agreement
from .fleet import JOBS, NEW_TOKENS, Served

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.hopper,
    pytest.mark.filterwarnings("ignore"),  # transformers', as it finds its peers
]

Reference = Callable[[str, Sequence[Sequence[int]]], list[Logprobs]]
Record = Callable[..., None]

GATES = {
    "heavy": HEAVY,
    "heavy-hf": HEAVY,
    "heavy-wo_a-bf16": HEAVY_BF16,
    "full": FULL,
    "marlin": FULL,
    "graphs": FULL,
    "experts": FP8,
    "official": FP8,
    "prepared": FP8,
}
#: Some hundred positions follow the prompts, thousands lie within them.
DECODE_FACTOR = 3


def parts(served: Served, reference: Reference) -> dict[str, Agreement]:
    """Within the prompts up to 2,600 tokens, within the long one, and after all of them."""
    sequences, found = served.sequences, served.logprobs
    expected = reference(JOBS[served.name].checkpoint, sequences)
    pairs = list(zip(found, expected, strict=True))
    inside = [(ours[:-NEW_TOKENS], theirs[:-NEW_TOKENS]) for ours, theirs in pairs]
    after = [(ours[-NEW_TOKENS:], theirs[-NEW_TOKENS:]) for ours, theirs in pairs]
    short = [pair for pair in inside if len(pair[0]) < 4096]
    groups = {"prompts": short, "long": inside[len(short) :], "decode": after}
    return {
        name: agreement(*zip(*group, strict=True)) for name, group in groups.items() if group
    }  # fmt: skip


def gate_of(part: str, gate: Gate) -> Gate:
    return gate.loosened(DECODE_FACTOR) if part == "decode" else gate


def assert_follows(served: Served, reference: Reference, record: Record, gate: Gate) -> None:
    """Each part agrees with the float32 forward within the gate."""
    refusals = []
    for part, found in parts(served, reference).items():
        record("agreement", engine=served.name, part=part, **vars(found))
        refusals += [f"{part}: {refusal}" for refusal in gate_of(part, gate).refusals(found)]
    assert not refusals


@pytest.mark.parametrize("served", GATES, indirect=True)
def test_they_follow_the_float32_forward(
    served: Served, reference: Reference, record: Record
) -> None:
    assert_follows(served, reference, record, GATES[served.name])


@pytest.mark.parametrize("served", ["swapped"], indirect=True)
def test_one_expert_with_its_nibbles_exchanged_is_refused(
    served: Served, reference: Reference, record: Record
) -> None:
    refused = {}
    for part, found in parts(served, reference).items():
        record("agreement", engine=served.name, part=part, **vars(found))
        refused[part] = gate_of(part, FULL).refusals(found)
    assert refused["prompts"]
    assert refused["long"]


@pytest.mark.parametrize("served", ["full", "heavy-hf"], indirect=True)
def test_the_plugin_came_through_its_entry_point_into_a_spawned_engine(served: Served) -> None:
    (built,) = served.about["built"]
    assert built["model"] == "vllm_dsv4.model.DSV4ForCausalLM"
    assert re.search(r"\(EngineCore[^)]* pid=", served.log)


@pytest.mark.parametrize("served", ["heavy", "heavy-wo_a-bf16"], indirect=True)
def test_every_linear_runs_as_asked(served: Served) -> None:
    methods: dict[str, Any] = served.about["built"][0]["methods"]
    kinds = {"wo_a": "Unquantized" if "wo_a" in served.name else "Fp8"}
    kinds |= dict.fromkeys(("fused_wqa_wkv", "wq_b", "wo_b", "gate_up_proj"), "NvFp4")
    kinds |= {"fused_wkv_wgate": "Unquantized", "experts": "ModelOptNVFP4Experts"}
    for part, kind in kinds.items():
        found = {how for name, how in methods.items() if part in name.split(".")}
        assert found, part
        assert all(kind in how for how in found), (part, found)
