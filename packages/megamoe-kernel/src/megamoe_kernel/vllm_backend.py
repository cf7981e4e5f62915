"""The routed experts of vLLM on Hopper: a backend of the group ``vllm_dsv4.moe_backends``.

``vllm-dsv4`` finds it by its entry point, ``--moe-kernel megamoe``, and calls it by the protocol in
vllm_dsv4.moe_backend, of which this file knows the shape alone: neither that package nor vLLM is
imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from .api import ACTIVATIONS, LAYER_KERNELS, Backend
from .buffer import SymmBuffer, get_symm_buffer_for_nvfp4_mega_moe
from .buffer_sizes import MAX_RANKS, MOST_TOKENS
from .custom_op import mega_moe_op
from .errors import LayoutError
from .experts import ALIGNMENT, ExpertWeights
from .weights import Arch, MegaMoEWeights, transform_nvfp4_weights_for_mega_moe

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ARCH: Arch = "sm_90a"
CAPABILITY = (9, 0)


class LayerShape(Protocol):
    """What this backend reads of vllm_dsv4.moe_backend.MoEShape."""

    @property
    def num_experts(self) -> int: ...
    @property
    def num_local_experts(self) -> int: ...
    @property
    def first_expert(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def max_num_tokens(self) -> int: ...
    @property
    def swiglu_limit(self) -> float | None: ...
    @property
    def ep_size(self) -> int: ...


class Projection(Protocol):
    """What this backend reads of vllm_dsv4.moe_backend.ExpertWeights."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def weight_scale(self) -> Tensor: ...
    @property
    def weight_scale_2(self) -> Tensor: ...


class Verdict(NamedTuple):
    """Whether a layer can run; ``reason`` says why not, in a sentence."""

    supported: bool
    reason: str = ""


class MegaMoEBackend:
    """W4A16 experts of one shape on Hopper, on one rank or on those of a process group.

    All layers of the shape share one buffer, allocated with the first layer's weights: before vLLM
    measures how much memory is left, and before it captures CUDA graphs.
    backend: "kernel", or "reference" to try the protocol without a GPU (one rank).
    """

    name = "megamoe"

    def __init__(
        self, shape: LayerShape, process_group: ProcessGroup | None, backend: Backend = "kernel"
    ) -> None:
        self.shape = shape
        self.backend = backend
        self._group = process_group if shape.ep_size > 1 else None
        self._buffer: SymmBuffer | None = None

    def supports(self, capability: tuple[int, int], shape: LayerShape) -> Verdict:
        """Hopper, sizes in whole tiles, and experts that are the rank's by its number."""
        return Verdict(not (reason := self._why_not(tuple(capability), shape)), reason)

    def prepare_weights(self, w13: Projection, w2: Projection) -> tuple[MegaMoEWeights, ...]:
        """The experts in sm_90a's tiles, on the device where they are; their bits do not change.

        Raises ScaleError for scales that no kernel could compute with, ShapeError, DtypeError, and
        BackendError where ranks share no NVLink domain.
        """
        if self._buffer is None:
            self._buffer = get_symm_buffer_for_nvfp4_mega_moe(
                self._group,
                num_experts=self.shape.num_experts,
                num_max_tokens_per_rank=self.shape.max_num_tokens,
                num_topk=self.shape.top_k,
                hidden=self.shape.hidden_size,
                intermediate=self.shape.intermediate_size,
                activation=ACTIVATIONS[ARCH],
                device=w13.weight.device,
            )
        return transform_nvfp4_weights_for_mega_moe(_stacked(w13, 2), _stacked(w2, 1), arch=ARCH)

    def forward(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, weights: tuple[MegaMoEWeights, ...]
    ) -> Tensor:
        """One operator: torch.compile keeps it whole, CUDA graphs capture it; see mega_moe_op."""
        if self._buffer is None:
            raise LayoutError("forward came before prepare_weights, which allocates the buffer")
        l1, l2 = weights
        return mega_moe_op(
            x,
            l1,
            l2,
            self._buffer,
            topk_idx=topk_ids,
            topk_weights=topk_weights,
            swiglu_limit=self.shape.swiglu_limit,
            backend=self.backend,
        )

    def _why_not(self, capability: tuple[int, ...], shape: LayerShape) -> str:
        if capability != CAPABILITY:
            found = ".".join(map(str, capability))
            return f"its kernel runs on compute capability 9.0 (H100, H200, GH200), not on {found}"
        if self.backend == "kernel" and ARCH not in LAYER_KERNELS:
            return f"this megamoe-kernel has no kernel for {ARCH} yet"
        sizes = {"hidden": shape.hidden_size, "intermediate": shape.intermediate_size}
        for size_name, size in sizes.items():
            if size % ALIGNMENT:
                return f"{size_name} is {size}, expected a multiple of {ALIGNMENT}"
        if not 1 <= shape.top_k <= 32:
            return f"top_k is {shape.top_k}, expected 1 to 32"
        if shape.max_num_tokens > MOST_TOKENS:
            return f"max_num_batched_tokens is {shape.max_num_tokens}, at most {MOST_TOKENS} fit"
        if shape.ep_size > MAX_RANKS:
            return f"there are {shape.ep_size} ranks, an NVLink domain has {MAX_RANKS} at most"
        if shape.ep_size > 1 and self.backend == "reference":
            return "its reference has one rank"
        local, rest = divmod(shape.num_experts, shape.ep_size)
        if rest or shape.num_local_experts != local or shape.first_expert % local:
            return (
                f"rank holds {shape.num_local_experts} of {shape.num_experts} experts from "
                f"{shape.first_expert} on; with {shape.ep_size} ranks it takes the same number on "
                "each, in order (--enable-expert-parallel, no expert load balancing)"
            )
        return ""


def _stacked(projection: Projection, parts: int) -> ExpertWeights:
    """The protocol's one global scale of an expert as the contract's: gate's and up's."""
    scale_2 = projection.weight_scale_2.unsqueeze(1).expand(-1, parts).contiguous()
    return ExpertWeights(projection.weight, projection.weight_scale, scale_2)
