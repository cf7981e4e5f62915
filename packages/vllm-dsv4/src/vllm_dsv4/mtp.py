"""vLLM's MTP draft of DeepSeek-V4, loaded from our checkpoints; vLLM's own for every other."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from vllm.config import VllmConfig
from vllm.models.deepseek_v4.nvidia.mtp import (
    DeepSeekV4MTP,
    DeepSeekV4MultiTokenPredictor,
    DeepSeekV4MultiTokenPredictorLayer,
    _use_sequence_parallel,
)

from .compat import with_names
from .config_hook import options_of
from .loading import Loading
from .model import DSV4DecoderLayer, shared_tp
from .quant_config import DSV4NVFP4Config


class DSV4PredictorLayer(DeepSeekV4MultiTokenPredictorLayer):
    """vLLM's MTP block around our layer."""

    __init__ = with_names(
        DeepSeekV4MultiTokenPredictorLayer.__init__, DeepseekV4DecoderLayer=DSV4DecoderLayer
    )


class DSV4Predictor(DeepSeekV4MultiTokenPredictor):
    """vLLM's stack of our MTP blocks."""

    __init__ = with_names(
        DeepSeekV4MultiTokenPredictor.__init__,
        DeepSeekV4MultiTokenPredictorLayer=DSV4PredictorLayer,
    )


class DSV4MTP(DeepSeekV4MTP):
    """Stands for vLLM's class in its registry."""

    was_loaded = False
    _init_ours = with_names(DeepSeekV4MTP.__init__, DeepSeekV4MultiTokenPredictor=DSV4Predictor)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        self.is_ours = isinstance(vllm_config.quant_config, DSV4NVFP4Config)
        if not self.is_ours:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            return
        self._init_ours(vllm_config=vllm_config, prefix=prefix)
        self.options = options_of(vllm_config)
        self.pad_shared_expert = False  # the transform has padded it, in every format
        self.use_sequence_parallel = _use_sequence_parallel(vllm_config)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Takes the whole checkpoint's tensors; raises CheckpointError if it has no MTP blocks."""
        if not self.is_ours:
            return super().load_weights(weights)
        loading = Loading(
            self,
            self.quant_config,
            self.options,
            is_first=not self.was_loaded,
            part="mtp",
            shared_tp=shared_tp(self.use_sequence_parallel),
        )
        loaded = super().load_weights(loading.stream(weights))
        loading.finish(loaded)
        self.was_loaded = True
        return loaded
