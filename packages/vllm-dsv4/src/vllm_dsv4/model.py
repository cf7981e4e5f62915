"""vLLM's DeepSeek-V4, loaded from our checkpoints and with NVFP4 experts under MegaMoE.

Every class here is vLLM's for every other checkpoint: ours differ only where vLLM's quantization
config is `DSV4NVFP4Config`. The classes in between exist because vLLM's constructors name each
other: `compat.with_names`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.fused_moe.deep_gemm_mega_moe import MEGA_MOE_NVFP4
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import fused_topk_bias
from vllm.models.deepseek_v4.nvidia.model import (
    DeepseekV4DecoderLayer,
    DeepseekV4ForCausalLM,
    DeepseekV4Model,
    DeepseekV4MoE,
)

from .compat import with_names
from .config_hook import options_of
from .errors import LoadError
from .kernel_experts import KernelExperts
from .loading import Loading
from .quant_config import DSV4NVFP4Config


class DSV4MoE(DeepseekV4MoE):
    """vLLM's MoE layer; under MegaMoE its experts are in the format that the checkpoint has."""

    _init_nvfp4 = with_names(DeepseekV4MoE._init_mega_moe_experts, MEGA_MOE_MXFP4=MEGA_MOE_NVFP4)
    _init_kernel = with_names(
        DeepseekV4MoE._init_mega_moe_experts, DeepGemmMegaMoEExperts=KernelExperts
    )

    def _init_mega_moe_experts(self, vllm_config: VllmConfig, config: Any, prefix: str) -> None:
        own = vllm_config.quant_config.format_of(f"{prefix}.experts")
        if options_of(vllm_config).moe_kernel is not None:
            if own != "nvfp4":
                raise LoadError(f"{prefix}.experts are {own}; a moe_kernel takes NVFP4.")
            self._init_kernel(vllm_config, config, prefix)
        elif own == "nvfp4":
            self._init_nvfp4(vllm_config, config, prefix)
        else:
            super()._init_mega_moe_experts(vllm_config, config, prefix)

    def forward(
        self,
        hidden_states: Tensor,
        input_ids: Tensor | None = None,
        mega_gate_metadata: Any = None,
    ) -> Tensor:
        """As vLLM's, but with a kernel from elsewhere the gate does not take DeepGEMM's."""
        if not isinstance(self.experts, KernelExperts):
            return super().forward(hidden_states, input_ids, mega_gate_metadata)
        logits, _ = self.gate(hidden_states)
        topk_weights, topk_ids = fused_topk_bias(
            hidden_states=hidden_states,
            gating_output=logits,
            scoring_func=self.scoring_func,
            e_score_correction_bias=self.gate.e_score_correction_bias,
            topk=self.n_activated_experts,
            renormalize=self.renormalize,
            indices_type=self.hash_indices_dtype,
            input_tokens=input_ids,
            hash_indices_table=self.gate.tid2eid,
            routed_scaling_factor=self.routed_scaling_factor,
        )
        y = self.experts(hidden_states, topk_weights, topk_ids, self.shared_experts)
        return y.view(hidden_states.shape)


class DSV4DecoderLayer(DeepseekV4DecoderLayer):
    """vLLM's layer around our MoE."""

    __init__ = with_names(DeepseekV4DecoderLayer.__init__, DeepseekV4MoE=DSV4MoE)


class DSV4Model(DeepseekV4Model):
    """vLLM's stack of our layers."""

    __init__ = with_names(DeepseekV4Model.__init__, DeepseekV4DecoderLayer=DSV4DecoderLayer)

    @staticmethod
    def _pad_shared_expert_weight(quant_config: object, name: str, loaded_weight: Tensor) -> Tensor:
        """The transform has padded it, in every format; vLLM's own rule knows FP8 only."""
        return loaded_weight


class DSV4ForCausalLM(DeepseekV4ForCausalLM):
    """Stands for vLLM's class in its registry."""

    was_loaded = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        self.is_ours = isinstance(vllm_config.quant_config, DSV4NVFP4Config)
        if self.is_ours:
            self.model_cls = DSV4Model
            self.options = options_of(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Takes a checkpoint's tensors in any of its schemes; raises CheckpointError, LoadError."""
        if not self.is_ours:
            return super().load_weights(weights)
        model = self.model
        loading = Loading(
            self,
            model.quant_config,
            self.options,
            is_first=not self.was_loaded,
            part="model",
            shared_tp=shared_tp(model.use_sequence_parallel),
            layers=range(model.start_layer, model.end_layer),
        )
        loaded = super().load_weights(loading.stream(weights))
        loading.finish(loaded)
        self.was_loaded = True
        return loaded


def shared_tp(use_sequence_parallel: bool) -> int:
    """Over how many ranks vLLM splits the shared experts: none where it splits the tokens."""
    return 1 if use_sequence_parallel else get_tensor_model_parallel_world_size()
