"""CUDA graphs, MoE kernels and small block scales: other ways to the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

from . import texts
from .agreement import Gate, agreement
from .fleet import Served
from .test_logprobs import Record

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.hopper,
    pytest.mark.filterwarnings("ignore"),  # transformers', as it finds its peers
]

#: The same values by the same kernel. Lost scales are lost experts: a KL above 1.
SAME = Gate(mean=0.05, kl=0.001, top1=0.985)
#: A logit is BF16: its step between 16 and 32.
TIE = 0.125


def assert_same_alone(eager: Served, graphs: Served) -> None:
    """Each prompt alone, so that both engines compute with the same numbers of tokens."""
    assert "Graph capturing finished" in graphs.log
    assert graphs.about
    assert eager.about
    assert eager.arrays["alone"].size
    np.testing.assert_array_equal(graphs.arrays["alone"], eager.arrays["alone"])


@pytest.mark.parametrize("served", [("full", "graphs")], indirect=True, ids=" and ".join)
def test_cuda_graphs_give_eagers_tokens(served: tuple[Served, Served]) -> None:
    """In a batch, whose rows depend on when requests arrive, a tie may go either way."""
    eager, graphs = served
    assert_same_alone(eager, graphs)
    for ours, theirs, logprobs in zip(
        graphs.sequences, eager.sequences, eager.logprobs, strict=True
    ):
        apart = [i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other]
        if apart:
            row = logprobs[apart[0] - 1]
            assert abs(row[ours[apart[0]]] - row[theirs[apart[0]]]) <= TIE, apart[0]


@pytest.mark.parametrize(
    ("served", "kernel"),
    [("full", "HUMMING"), ("subnormal", "HUMMING"), ("marlin", "MARLIN")],
    indirect=["served"],
)
def test_the_experts_run_on_the_kernel_asked_for(served: Served, kernel: str) -> None:
    methods = served.about["built"][0]["methods"]
    experts = {how for name, how in methods.items() if name.endswith("experts.routed_experts")}
    assert {how.split()[-1] for how in experts} == {kernel}


@pytest.mark.parametrize(
    "served",
    [("full", "subnormal"), ("marlin", "marlin-subnormal")],
    indirect=True,
    ids=["humming", "marlin"],
)
def test_block_scales_below_e4m3s_normal_range_count(
    served: tuple[Served, Served], record: Record
) -> None:
    """The exact cast uses 2^-9 to 2^8, and the powers below 2^-6 are subnormal."""
    lengths = [len(prompt) - 1 for prompt in [*texts.prompts(), texts.long_prompt()]]
    usual, small = (
        [found[:length] for found, length in zip(one.logprobs, lengths, strict=True)]
        for one in served
    )
    found = agreement(small, usual)
    record("agreement", engine=served[1].name, part="as with usual scales", **vars(found))
    assert not SAME.refusals(found)


@pytest.mark.parametrize("served", ["mtp"], indirect=True)
def test_mtp_from_a_full_checkpoint_guesses_well(served: Served, record: Record) -> None:
    drafts, accepted = served.about["drafts"], served.about["accepted"]
    record("mtp", drafts=drafts, accepted=accepted)
    assert drafts > 50
    assert accepted / drafts > 0.5
