"""The routed experts of one layer on a kernel from elsewhere (`moe_backend`).

It stands where vLLM has its MegaMoE experts and takes the same construction and the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_ep_group
from vllm.model_executor.models.utils import extract_layer_index
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from .config_hook import options_of
from .errors import LoadError, OptionError
from .moe_backend import ExpertWeights, MoEBackend, MoEShape, make_backend

_PARTS: Final = ("weight", "weight_scale", "weight_scale_2", "input_scale")


@lru_cache(maxsize=4)
def _backend(name: str, shape: MoEShape) -> MoEBackend:
    """One for all layers of a shape: they share its buffers."""
    capability = current_platform.get_device_capability()
    return make_backend(
        name, (capability.major, capability.minor), shape, get_ep_group().device_group
    )


class KernelExperts(nn.Module):
    """Holds the experts as the checkpoint has them until `prepare` hands them to the kernel.

    Raises OptionError if the kernel refuses the layer or the expert-parallel load balancer is on.
    """

    has_fused_shared_experts = False

    def __init__(
        self,
        vllm_config: VllmConfig,
        *,
        num_experts: int,
        num_local_experts: int,
        experts_start_idx: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        activation: Any,
        num_logical_experts: int,
        prefix: str,
        weight_format: Any = None,
        shared_experts: nn.Module | None = None,
    ) -> None:
        super().__init__()
        name = options_of(vllm_config).moe_kernel
        assert name is not None
        if num_logical_experts != num_experts or vllm_config.parallel_config.enable_eplb:
            raise OptionError(f"moe_kernel {name!r} knows no redundant experts: leave EPLB off.")
        self.prefix = prefix
        self.capture_fn: Callable[[Tensor], None] | None = None
        self.num_local_experts = num_local_experts
        self.experts_start_idx = experts_start_idx
        shape = MoEShape(
            num_experts=num_experts,
            num_local_experts=num_local_experts,
            first_expert=experts_start_idx,
            top_k=top_k,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            max_num_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            swiglu_limit=activation.clamp,
            ep_size=get_ep_group().world_size,
        )
        self.backend = _backend(name, shape)
        self.weights: Any = None
        for projection, rows, columns in (
            ("w13", 2 * intermediate_size, hidden_size),
            ("w2", hidden_size, intermediate_size),
        ):
            halves = 2 if projection == "w13" else 1
            self._register(projection, "weight", (rows, columns // 2), torch.uint8)
            self._register(projection, "weight_scale", (rows, columns // 16), torch.float8_e4m3fn)
            self._register(projection, "weight_scale_2", (halves,), torch.float32)
            self._register(projection, "input_scale", (halves,), torch.float32)

    @property
    def layer_id(self) -> int:
        """The layer's index, which vLLM's recorder of routed experts asks for."""
        return int(extract_layer_index(self.prefix))

    def _register(
        self, projection: str, part: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        data = torch.empty((self.num_local_experts, *shape), dtype=dtype)
        parameter = nn.Parameter(data, requires_grad=False)
        set_weight_attrs(parameter, {"weight_loader": self.weight_loader})
        self.register_parameter(f"{projection}_{part}", parameter)

    def weight_loader(
        self,
        param: nn.Parameter,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Copies one part of one expert's w1, w2 or w3 into its rows; other ranks' are left out."""
        local = expert_id - self.experts_start_idx
        if not 0 <= local < self.num_local_experts:
            return False if return_success else None
        target = param.data[local]
        if shard_id != "w2":
            target = target.chunk(2)[("w1", "w3").index(shard_id)]
        target.copy_(loaded_weight.reshape(target.shape))
        return True if return_success else None

    def prepare(self) -> None:
        """Gives the kernel its weights and drops the loaded ones.

        Raises LoadError if w1 and w3 of an expert disagree about their scale, which a kernel takes
        one of.
        """
        if self.weights is not None:
            raise LoadError(f"{self.prefix}: weights cannot be loaded twice into a moe_kernel.")
        gate, up = self.get_parameter("w13_weight_scale_2").unbind(1)
        if not torch.equal(gate, up):
            raise LoadError(f"{self.prefix}: w1 and w3 of an expert have two weight_scale_2.")
        w13, w2 = (self._projection(name) for name in ("w13", "w2"))
        self.weights = self.backend.prepare_weights(w13, w2)
        for name in [name for name, _ in self.named_parameters(recurse=False)]:
            delattr(self, name)

    def _projection(self, name: str) -> ExpertWeights:
        weight, scale, scale_2, input_scale = (
            self.get_parameter(f"{name}_{part}").data for part in _PARTS
        )
        return ExpertWeights(weight, scale, scale_2[:, 0].clone(), input_scale.amax(1))

    def forward(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: nn.Module | None = None,
    ) -> Tensor:
        """The routed experts by the kernel, and the shared ones by vLLM; bfloat16 [T, hidden]."""
        if self.capture_fn is not None:
            self.capture_fn(topk_ids)
        y = self.backend.forward(hidden_states, topk_ids, topk_weights, self.weights)
        return y if shared_experts is None else y + shared_experts(hidden_states)
