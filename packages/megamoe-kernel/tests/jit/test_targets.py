"""Which names are targets, which GPUs run them, and what the refusals say."""

from __future__ import annotations

import pytest

from megamoe_kernel import ArchitectureError
from megamoe_kernel.jit.targets import (
    RUNS_ON,
    TARGETS,
    Target,
    check_runs_on,
    check_target,
    target_for,
)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sm_90", "lacks wgmma"),
        ("sm_100", "lacks tcgen05"),
        ("sm_103", "lacks tcgen05"),
        ("sm_103f", "10.3 alone"),
        ("sm_110a", "no kernel here"),
        ("sm_120a", "mma.sync"),
        ("sm_80", "neither wgmma nor tcgen05"),
        ("hopper", "it is not known"),
    ],
)
def test_other_targets_are_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(ArchitectureError, match=f"target is '{name}': .*{reason}.*sm_90a, sm_100a"):
        check_target(name)


@pytest.mark.parametrize(
    ("target", "capability", "wanted"),
    [("sm_100a", (9, 0), "10.0"), ("sm_90a", (10, 0), "9.0"), ("sm_100a", (10, 3), "10.0"),
     ("sm_100f", (12, 0), "10.0 or 10.3")],
)  # fmt: skip
def test_a_gpu_gets_no_binary_of_another(
    target: Target, capability: tuple[int, int], wanted: str
) -> None:
    found = "{}.{}".format(*capability)
    with pytest.raises(ArchitectureError, match=f"{target} runs on .* {wanted}, .* has {found}"):
        check_runs_on(target, capability)


def test_every_target_has_a_gpu_and_the_exact_one_is_chosen() -> None:
    for target in TARGETS:
        assert check_target(target) == target
        for capability in RUNS_ON[target]:
            check_runs_on(target, capability)
    assert {capability: target_for(capability) for capability in ((9, 0), (10, 0), (10, 3))} == {
        (9, 0): "sm_90a",
        (10, 0): "sm_100a",
        (10, 3): "sm_103a",
    }
    assert target_for((8, 0)) is None
    assert target_for((12, 0)) is None
