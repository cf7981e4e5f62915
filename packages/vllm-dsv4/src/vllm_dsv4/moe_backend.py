"""The protocol by which a kernel from elsewhere takes over the routed experts.

A package advertises a backend as an entry point of the group ``vllm_dsv4.moe_backends``; the user
chooses it by that name (`Options.moe_kernel`). This file needs neither vLLM nor a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, NamedTuple, Protocol, cast

from torch import Tensor

from .errors import OptionError

GROUP: Final = "vllm_dsv4.moe_backends"


@dataclass(frozen=True)
class MoEShape:
    """One MoE layer on one rank.

    num_experts: of the whole model; this rank holds num_local_experts of them, first_expert on.
    intermediate_size: an expert's inner width. max_num_tokens: the most that `MoEBackend.forward`
    is given at once. swiglu_limit: the clamp of gate and up before SwiGLU, None for none.
    """

    num_experts: int
    num_local_experts: int
    first_expert: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    max_num_tokens: int
    swiglu_limit: float | None
    ep_size: int


class Verdict(NamedTuple):
    """Whether a backend takes a layer; ``reason`` says why not, in a sentence."""

    supported: bool
    reason: str = ""


@dataclass(frozen=True)
class ExpertWeights:
    """One projection of all experts on this rank, as NVFP4 (E of them, N x K each).

    weight: uint8 [E, N, K/2], low nibble first. weight_scale: float8_e4m3fn [E, N, K/16], linear.
    weight_scale_2: float32 [E]. input_scale: float32 [E].
    """

    weight: Tensor
    weight_scale: Tensor
    weight_scale_2: Tensor
    input_scale: Tensor


class MoEBackend(Protocol):
    """What a kernel offers. It owns the exchange of tokens between ranks, if there are several."""

    name: str

    def supports(self, capability: tuple[int, int], shape: MoEShape) -> Verdict:
        """Whether it runs this layer on a GPU of this compute capability."""

    def prepare_weights(self, w13: ExpertWeights, w2: ExpertWeights) -> Any:
        """The weights in the kernel's own layout; called once for each layer, after loading.

        w13: gate, then up: N is twice the intermediate size, with one weight_scale_2 for both.
        """

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, weights: Any) -> Tensor:
        """The routed experts' sum for this rank's tokens.

        x: bfloat16 [T, hidden]. topk_ids: [T, top_k], of the whole model. topk_weights: float32
        [T, top_k], applied after the second projection. weights: what `prepare_weights` gave.
        Returns bfloat16 [T, hidden].
        """


#: What an entry point names: called once for each shape, with the expert-parallel process group, or
#: with None by `vllm-dsv4 serve`, which only asks what it supports.
MakeBackend = Callable[[MoEShape, object], MoEBackend]


def backends() -> dict[str, EntryPoint]:
    """The installed backends by name; none of them is imported."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def find_backend(name: str) -> EntryPoint:
    """Raises OptionError for a name that nothing installed advertises."""
    installed = backends()
    if name not in installed:
        known = ", ".join(sorted(installed)) or "none"
        raise OptionError(
            f"moe_kernel is {name!r}; installed backends: {known}. Install the package that "
            f"advertises it in the entry-point group {GROUP}."
        )
    return installed[name]


def make_backend(
    name: str, capability: tuple[int, int], shape: MoEShape, process_group: object
) -> MoEBackend:
    """The backend, which has said that it runs this shape; raises OptionError with its reason.

    process_group: None where there are no ranks yet, to ask only.
    """
    backend = cast(MakeBackend, find_backend(name).load())(shape, process_group)
    verdict = backend.supports(capability, shape)
    if not verdict.supported:
        # vLLM's own fused kernel is for Blackwell.
        instead = " and use --moe-backend deep_gemm_mega_moe" if capability[0] == 10 else ""
        raise OptionError(
            f"moe_kernel {name!r} cannot be used here: {verdict.reason}. Leave --moe-kernel "
            f"away{instead}."
        )
    return backend
