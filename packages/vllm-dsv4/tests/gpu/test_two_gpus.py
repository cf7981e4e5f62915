"""Two ranks give the float32 forward's logprobs as one does, by tensors and by experts."""

from __future__ import annotations

import pytest

from .agreement import FULL
from .fleet import Served
from .test_logprobs import Record, Reference, gate_of, parts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.hopper,
    pytest.mark.multi_gpu,
    pytest.mark.filterwarnings("ignore"),  # transformers', as it finds its peers
]


@pytest.mark.parametrize("served", ["tp2", "ep2", "tp2-narrow"], indirect=True)
def test_two_ranks_follow_the_float32_forward(
    served: Served, reference: Reference, record: Record
) -> None:
    assert len(served.about["built"]) == 2
    refusals = []
    for part, found in parts(served, reference).items():
        record("agreement", engine=served.name, part=part, **vars(found))
        refusals += [f"{part}: {refusal}" for refusal in gate_of(part, FULL).refusals(found)]
    assert not refusals
