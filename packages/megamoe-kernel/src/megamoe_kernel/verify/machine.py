"""What the report says about the machine: the GPU and the versions, nothing that names anybody."""

from __future__ import annotations

import platform

import torch

from .. import __version__
from ..errors import BackendError
from ..jit.driver import driver_version
from ..jit.nvrtc import find_nvrtc
from ..jit.targets import RUNS_ON, Target, target_for
from ..weights import Arch

#: Whose weight layout a target's kernels read.
LAYOUTS: dict[Target, Arch] = {
    "sm_90a": "sm_90a",
    "sm_100a": "sm_100a",
    "sm_100f": "sm_100a",
    "sm_103a": "sm_100a",
}


def required_target() -> Target:
    """The target of this machine's current GPU; BackendError where nothing can be verified."""
    if not torch.cuda.is_available():
        raise BackendError(
            "no NVIDIA GPU: torch.cuda.is_available() is False, so nothing was verified. Run this "
            "on the machine that is to serve; what needs no GPU: python -m pytest, and "
            "megamoe precompile"
        )
    capability = torch.cuda.get_device_capability()
    target = target_for(capability)
    if target is None:
        known = sorted({f"{a}.{b}" for some in RUNS_ON.values() for a, b in some})
        raise BackendError(
            f"this GPU, {torch.cuda.get_device_name()}, has compute capability "
            f"{capability[0]}.{capability[1]}, there are kernels for {', '.join(known)}; nothing "
            "was verified"
        )
    return target


def describe(target: Target) -> dict[str, str]:
    """GPU, driver and versions."""
    properties = torch.cuda.get_device_properties()
    return {
        "megamoe-kernel": __version__,
        "target": target,
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "memory_gb": f"{properties.total_memory / 1e9:.1f}",
        "driver": driver_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "nvrtc": find_nvrtc().version,
        "python": platform.python_version(),
        "processor": platform.machine(),
    }
