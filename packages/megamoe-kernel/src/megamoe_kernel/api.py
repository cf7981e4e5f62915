"""The functions that a runtime calls: prepare the inputs, then run the layer.

The name ``fp8_nvfp4_mega_moe`` is the field's. What it cannot say: no tensor-core instruction
multiplies FP8 by NVFP4. FP8 hidden states are quantized to NVFP4 where the tensor cores have it
(sm_100a, W4A4), or decoded to BF16, with the weights decoded exactly to BF16 (sm_90a, W4A16).
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from .activations import QuantizedTokens, decode_hidden_states, quantize_tokens
from .buffer import SymmBuffer
from .errors import (
    ArchitectureError,
    BackendError,
    DtypeError,
    LayoutError,
    RecipeError,
    ShapeError,
)
from .experts import check_dtype, check_shape
from .prepare_kernel import can_copy, copy_on_gpu, has_kernel, prepare_on_gpu
from .reference import Activation, RankTokens, Tokens, check_limit, mega_moe, required_input_scale
from .sm90_kernel import run_sm90_layer
from .sm100_kernel import run_sm100_layer
from .weights import Arch, MegaMoEWeights, check_layers, untransform_nvfp4_weights

RequestedActivation = Literal["nvfp4", "bf16", "fp8"]
Backend = Literal["kernel", "reference"]

RECIPE = (1, 1, 16)
#: The one activation that each architecture has.
ACTIVATIONS: dict[Arch, Activation] = {"sm_100a": "nvfp4", "sm_90a": "bf16"}
_WHY_NOT: dict[RequestedActivation, str] = {
    "nvfp4": "tensor cores of compute capability 9.0 have no FP4",
    "bf16": "its weights are laid out for NVFP4 operands; FP4 tensor cores take no BF16",
    "fp8": "no tensor core multiplies FP8 by NVFP4, and no mode that rounds the weights to FP8 is "
    "implemented; prepare_inputs takes FP8 hidden states for the other activations",
}


class LayerKernel(Protocol):
    """Runs a whole layer on checked arguments, on the current stream; see fp8_nvfp4_mega_moe."""

    def __call__(
        self,
        y: Tensor,
        l1_weights: MegaMoEWeights,
        l2_weights: MegaMoEWeights,
        sym_buffer: SymmBuffer,
        /,
        *,
        swiglu_limit: float | None,
        shared: tuple[MegaMoEWeights, MegaMoEWeights] | None,
    ) -> None: ...


#: The architectures whose layer there is a kernel for.
LAYER_KERNELS: dict[Arch, LayerKernel] = {"sm_90a": run_sm90_layer, "sm_100a": run_sm100_layer}
#: Those of them that no GPU has run; whoever picks one is told. See docs/blackwell.md.
_NEVER_RUN: frozenset[Arch] = frozenset({"sm_100a"})

logger = logging.getLogger(__name__)


def prepare_inputs(
    x: Tensor,
    sym_buffer: SymmBuffer,
    scales: Tensor | None = None,
    *,
    topk_idx: Tensor | None = None,
    topk_weights: Tensor | None = None,
    backend: Backend | None = None,
) -> None:
    """Put a rank's hidden states, and its routing if given, into the first rows of the buffer.

    x: ``[T, hidden]``, T at most the buffer's num_max_tokens_per_rank (0 is fine): bfloat16,
        float16 or float32; or float8_e4m3fn with scales float32 or float8_e8m0fnu
        ``[T, hidden / g]``, one for g consecutive values.
    For activation "nvfp4" each token is quantized with one float32 scale (see quantize_tokens); for
    "bf16" it is rounded to BF16. FP8 is decoded to float32 first.
    topk_idx: int32 or int64 ``[T, num_topk]``; topk_weights: float32, the same shape. Without them
        the caller writes sym_buffer.topk_idx and topk_weights.
    backend: who quantizes for "nvfp4", to the same bits: "kernel" on GPUs that have a target (see
        jit.targets), "reference" in plain torch anywhere. None: the kernel where there is one; its
        first call for a width and dtype compiles or loads it, and CUDA graphs capture it.
    x must be finite; a token that is not gets an unspecified result, the others are not touched.
    No value is looked at, so nothing waits for a GPU. Raises DtypeError, ShapeError, BackendError.
    """
    check_buffer(sym_buffer)
    if backend not in (None, "kernel", "reference"):
        raise BackendError(f"backend is {backend!r}, expected 'kernel', 'reference' or None")
    x = decode_hidden_states(x, scales).detach()  # else the buffer would join x's graph
    tokens = x.shape[0]
    check_shape("x", x, (tokens, sym_buffer.hidden))
    if tokens > sym_buffer.num_max_tokens_per_rank:
        raise ShapeError(
            f"x has {tokens} tokens, the buffer holds {sym_buffer.num_max_tokens_per_rank}; "
            "allocate it for more, or split the batch"
        )
    if (topk_idx is None) != (topk_weights is None):
        raise DtypeError("topk_idx and topk_weights come together; one of them is missing")
    given = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights}
    for name, tensor in given.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            raise DtypeError(f"{name} is a {type(tensor).__name__}, expected a tensor")
        if tensor is not None and tensor.device != sym_buffer.x.device:
            raise ShapeError(f"{name} is on {tensor.device}, the buffer on {sym_buffer.x.device}")
    if topk_idx is not None and topk_weights is not None:
        check_dtype("topk_idx", topk_idx, torch.int64, torch.int32)
        check_dtype("topk_weights", topk_weights, torch.float32)
        check_shape("topk_idx", topk_idx, (tokens, sym_buffer.num_topk))
        check_shape("topk_weights", topk_weights, (tokens, sym_buffer.num_topk))
    if backend == "kernel" and not has_kernel(x.device):
        raise BackendError(f"there is no kernel for {x.device}; pass backend='reference'")
    # Everything is checked: from here on the buffer is written.
    if topk_idx is not None and topk_weights is not None:
        if sym_buffer.x_sf is None and can_copy(x, topk_idx, topk_weights):
            copy_on_gpu(x, topk_idx, topk_weights, sym_buffer)
            return
        sym_buffer.topk_idx[:tokens] = topk_idx
        sym_buffer.topk_weights[:tokens] = topk_weights
    if sym_buffer.x_sf is None or sym_buffer.x_scale is None:
        sym_buffer.x[:tokens] = x
        return
    if backend is None:
        backend = "kernel" if has_kernel(x.device) else "reference"
    if backend == "kernel":
        prepare_on_gpu(x, sym_buffer)
        return
    quantized = quantize_tokens(x)
    sym_buffer.x[:tokens] = quantized.codes
    sym_buffer.x_sf.view(torch.uint8)[:tokens] = quantized.block_scale.view(torch.uint8)
    sym_buffer.x_scale[:tokens] = quantized.scale


def fp8_nvfp4_mega_moe(
    y: Tensor,
    l1_weights: MegaMoEWeights,
    l2_weights: MegaMoEWeights,
    sym_buffer: SymmBuffer,
    *,
    recipe: tuple[int, int, int] = RECIPE,
    activation: RequestedActivation = "nvfp4",
    swiglu_limit: float | None = None,
    shared: tuple[MegaMoEWeights, MegaMoEWeights] | None = None,
    backend: Backend = "kernel",
) -> None:
    """Run the MoE layer on the tokens in the buffer and write the result to y.

    y: bfloat16 ``[T, hidden]``, contiguous; T is the number of this rank's tokens (0 is fine).
    l1_weights, l2_weights: this rank's experts, from transform_nvfp4_weights_for_mega_moe.
    sym_buffer: filled by prepare_inputs.
    recipe: scale granularity of tokens, weight rows and K; only (1, 1, 16).
    activation: "nvfp4" (W4A4, sm_100a) or "bf16" (W4A16, sm_90a). "fp8" is refused: see above.
    swiglu_limit: the clamp before SwiGLU, 10 for DeepSeek-V4; None: no clamp.
    shared: one more expert (transformed, one expert each) that every token visits.
    backend: "kernel", or "reference": the definition in plain torch, slow, on any device, for a
        buffer of one rank.
    The result and its rounding points are reference.mega_moe's. All arguments are checked before
    anything runs: RecipeError, ArchitectureError, LayoutError, DtypeError, ShapeError, ScaleError,
    BackendError. Only the reference looks at expert ids (RoutingError) and for NaN.
    """
    if recipe != RECIPE:
        raise RecipeError(
            f"recipe is {recipe}, expected {RECIPE}: one scale per token and row for 16 "
            "values of K; MXFP4's (1, 1, 32) has other scales and is cast first (mxfp4_to_nvfp4)"
        )
    check_limit(swiglu_limit)
    check_buffer(sym_buffer)
    _check_layer(l1_weights, l2_weights, sym_buffer, sym_buffer.num_experts_per_rank, "")
    if shared is not None:
        check_is_pair(shared)
        _check_layer(*shared, sym_buffer, 1, "shared ")
        if shared[0].arch != l1_weights.arch:
            raise LayoutError(f"shared is for {shared[0].arch}, the experts for {l1_weights.arch}")
    _check_activation(activation, l1_weights.arch, sym_buffer)
    if activation == "nvfp4":
        for weights in (l2_weights, *(shared or ())[1:]):
            required_input_scale(weights.input_scale)
    _check_output(y, sym_buffer)
    if backend == "reference":
        if sym_buffer.num_ranks > 1:
            raise BackendError(
                f"the buffer is rank {sym_buffer.rank_idx}'s of {sym_buffer.num_ranks}, and "
                "backend='reference' has no exchange between ranks; "
                "megamoe_kernel.reference.mega_moe computes several ranks in one process"
            )
        _run_reference(y, l1_weights, l2_weights, sym_buffer, swiglu_limit, shared)
        return
    check_backend(backend)
    run = LAYER_KERNELS.get(l1_weights.arch)
    if run is None:
        raise BackendError(
            f"there is no kernel for {l1_weights.arch} yet; pass backend='reference' for the slow "
            "definition in plain torch"
        )
    if not has_kernel(sym_buffer.device):
        raise BackendError(
            f"there is no kernel for {sym_buffer.device}; pass backend='reference' there"
        )
    if l1_weights.arch in _NEVER_RUN:
        _warn_once(l1_weights.arch)
    run(y, l1_weights, l2_weights, sym_buffer, swiglu_limit=swiglu_limit, shared=shared)


nvfp4_mega_moe = fp8_nvfp4_mega_moe


@cache
def _warn_once(arch: Arch) -> None:
    logger.warning(
        "the kernel for %s was compiled and emulated, never run on a GPU: its results may be "
        "wrong. megamoe verify compares them with the reference; docs/blackwell.md says what was "
        "checked without a GPU",
        arch,
    )


def check_is_pair(shared: object) -> None:
    if not isinstance(shared, tuple | list) or len(shared) != 2:
        raise LayoutError("shared is no pair (l1, l2) of transformed weights")


def check_backend(backend: str) -> Backend:
    """The name as a Backend; BackendError if it is none."""
    if backend == "kernel":
        return "kernel"
    if backend == "reference":
        return "reference"
    raise BackendError(f"backend is {backend!r}, expected 'kernel' or 'reference'")


def check_buffer(sym_buffer: SymmBuffer) -> None:
    if not isinstance(sym_buffer, SymmBuffer):
        raise DtypeError(
            f"sym_buffer is a {type(sym_buffer).__name__}, expected the result of "
            "get_symm_buffer_for_nvfp4_mega_moe"
        )


def _check_layer(
    l1: MegaMoEWeights, l2: MegaMoEWeights, sym_buffer: SymmBuffer, num_experts: int, kind: str
) -> None:
    check_layers(l1, l2, kind)
    hidden, intermediate = sym_buffer.hidden, sym_buffer.intermediate
    shapes = (
        (l1, "l1", 2 * intermediate, hidden),
        (l2, "l2", hidden, intermediate),
    )
    for weights, layer, rows, columns in shapes:
        name = f"{kind}{layer}_weights"
        found = (weights.num_experts, weights.rows, weights.columns)
        if found != (num_experts, rows, columns):
            raise LayoutError(
                f"{name} is {found[0]} experts of {found[1]}x{found[2]}, the buffer is made for "
                f"{num_experts} per rank of {rows}x{columns}"
            )
        if weights.weight.data_ptr() % 16:
            raise LayoutError(f"{name} does not begin at a multiple of 16 bytes: clone the weight")
        if weights.weight.device != sym_buffer.x.device:
            raise ShapeError(
                f"{name} is on {weights.weight.device}, the buffer on {sym_buffer.x.device}"
            )


def _check_activation(activation: str, arch: Arch, sym_buffer: SymmBuffer) -> None:
    if not isinstance(activation, str) or activation not in _WHY_NOT:
        raise RecipeError(f"activation is {activation!r}, expected one of: {', '.join(_WHY_NOT)}")
    if ACTIVATIONS[arch] != activation:
        raise ArchitectureError(
            f"{arch} has no activation {activation!r}: {_WHY_NOT[activation]}. The weights are for "
            f"{arch}, pass activation={ACTIVATIONS[arch]!r}"
        )
    if sym_buffer.activation != activation:
        raise LayoutError(
            f"the buffer is for activation {sym_buffer.activation!r}, not {activation!r}; allocate "
            "one for the activation that you ask for"
        )


def _check_output(y: Tensor, sym_buffer: SymmBuffer) -> None:
    check_dtype("y", y, torch.bfloat16)
    tokens = y.shape[0] if y.ndim else 0
    check_shape("y", y, (tokens, sym_buffer.hidden))
    if tokens > sym_buffer.num_max_tokens_per_rank:
        raise ShapeError(
            f"y has {tokens} tokens, the buffer holds {sym_buffer.num_max_tokens_per_rank}"
        )
    if not y.is_contiguous() or y.device != sym_buffer.x.device:
        raise ShapeError(
            f"y is on {y.device} with strides {y.stride()}, expected contiguous memory on "
            f"{sym_buffer.x.device}"
        )


def _run_reference(
    y: Tensor,
    l1: MegaMoEWeights,
    l2: MegaMoEWeights,
    sym_buffer: SymmBuffer,
    swiglu_limit: float | None,
    shared: tuple[MegaMoEWeights, MegaMoEWeights] | None,
) -> None:
    logger.info("mega-MoE on the reference backend: %d tokens", y.shape[0])
    rows = slice(0, y.shape[0])
    x: Tokens = sym_buffer.x[rows]
    if sym_buffer.x_sf is not None and sym_buffer.x_scale is not None:
        x = QuantizedTokens(sym_buffer.x[rows], sym_buffer.x_sf[rows], sym_buffer.x_scale[rows])
    tokens = RankTokens(x, sym_buffer.topk_idx[rows], sym_buffer.topk_weights[rows])
    (result,) = mega_moe(
        [tokens],
        *untransform_nvfp4_weights(l1, l2),
        activation=sym_buffer.activation,
        swiglu_limit=swiglu_limit,
        shared=None if shared is None else untransform_nvfp4_weights(*shared),
    )
    y.detach().copy_(result)  # y may want gradients; it gets none
