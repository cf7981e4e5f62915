"""The architectures that kernels are compiled for, and which GPU runs which."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeGuard, get_args

from ..errors import ArchitectureError

Target = Literal["sm_90a", "sm_100a", "sm_100f", "sm_103a"]
Capability = tuple[int, int]

TARGETS: tuple[Target, ...] = get_args(Target)
RUNS_ON: Mapping[Target, tuple[Capability, ...]] = MappingProxyType(
    {
        "sm_90a": ((9, 0),),
        "sm_100a": ((10, 0),),
        "sm_100f": ((10, 0), (10, 3)),  # the family: what both have
        "sm_103a": ((10, 3),),
    }
)
_NO_WGMMA = "it lacks wgmma and setmaxnreg, which belong to the accelerated features of sm_90a"
_NO_TCGEN05 = (
    "it lacks tcgen05, which only accelerated or family targets of compute capability 10.x have"
)
_OTHER_TENSOR_CORES = "its FP4 tensor cores are used by mma.sync, no kernel here is written for it"
_WHY_NOT: Mapping[str, str] = MappingProxyType(
    {
        "sm_90": _NO_WGMMA,
        "sm_100": _NO_TCGEN05,
        "sm_103": _NO_TCGEN05,
        "sm_103f": "its binaries run on compute capability 10.3 alone, as those of sm_103a",
        "sm_101a": "no kernel here was compiled for it",
        "sm_110a": "no kernel here was compiled for it",
        "sm_120a": _OTHER_TENSOR_CORES,
        "sm_120f": _OTHER_TENSOR_CORES,
        "sm_121a": _OTHER_TENSOR_CORES,
    }
)
_OLDER = "its tensor cores have neither wgmma nor tcgen05"


def check_target(name: str) -> Target:
    """The name as a Target; ArchitectureError says why it is none."""
    if _is_target(name):
        return name
    is_older = re.fullmatch(r"sm_[1-8][0-9]", name) is not None
    why = _WHY_NOT.get(name, _OLDER if is_older else "it is not known")
    raise ArchitectureError(f"target is {name!r}: {why}. Expected one of: {', '.join(TARGETS)}")


def _is_target(name: str) -> TypeGuard[Target]:
    return name in TARGETS


def check_runs_on(target: Target, capability: Capability) -> None:
    """Refuse a binary that this GPU cannot run, before the driver does so without a reason."""
    if capability not in RUNS_ON[target]:
        wanted = " or ".join(f"{major}.{minor}" for major, minor in RUNS_ON[target])
        raise ArchitectureError(
            f"a kernel for {target} runs on compute capability {wanted}, this GPU has "
            f"{capability[0]}.{capability[1]}"
        )


def target_for(capability: Capability) -> Target | None:
    """The target made for this GPU; None if there is none."""
    exact: dict[Capability, Target] = {
        (9, 0): "sm_90a",
        (10, 0): "sm_100a",
        (10, 3): "sm_103a",
    }
    return exact.get(capability)
