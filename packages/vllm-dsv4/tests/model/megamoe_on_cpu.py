"""megamoe-kernel's backend without a GPU; the tests install it."""

from __future__ import annotations

from typing import Any

from megamoe_kernel.vllm_backend import CAPABILITY, MegaMoEBackend, Verdict


class OnCpu(MegaMoEBackend):
    """Its reference, on whatever GPU vLLM believes to have."""

    name = "megamoe-cpu"

    def __init__(self, shape: Any, process_group: Any) -> None:
        super().__init__(shape, process_group, backend="reference")

    def supports(self, capability: tuple[int, int], shape: Any) -> Verdict:
        return super().supports(CAPABILITY, shape)
