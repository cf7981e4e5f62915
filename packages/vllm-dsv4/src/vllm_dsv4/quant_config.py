"""Which of vLLM's quantization methods runs each layer, by how the checkpoint stores it."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.modelopt import build_linear_method
from vllm.models.deepseek_v4 import DeepseekV4FP8Config

from .config_hook import options_of, stored_of
from .errors import LoadError
from .nvfp4_experts import ModelOptNVFP4Experts
from .options import Options, runtime_formats
from .plugin import QUANTIZATION
from .stored import Format, Stored
from .weight_map import official_modules


class DSV4NVFP4Config(DeepseekV4FP8Config):
    """vLLM's FP8 config of DeepSeek-V4, in which any linear may be NVFP4 or BF16 instead.

    FP8 layers are made by the base class, just as for an official checkpoint. ``stored`` travels
    to the workers with the config; the options are taken from vLLM's config where layers are built.
    """

    stored: Stored

    def __init__(self) -> None:
        super().__init__(activation_scheme="dynamic", weight_block_size=[128, 128])
        self._formats: dict[str, Format] | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> DSV4NVFP4Config:
        """Nothing is taken from the block: the stored tensors decide (`maybe_update_config`)."""
        return cls()

    @classmethod
    def get_name(cls) -> str:
        """Our name in vLLM."""
        return QUANTIZATION

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Called by vLLM right after construction, with the checkpoint's place."""
        self.stored = stored_of(model_name, revision)

    @property
    def moe_quant_algo(self) -> str:
        """The base class is asked for experts only where they are not NVFP4."""
        return ""

    @property
    def formats(self) -> dict[str, Format]:
        """In which format each linear runs, by official module name."""
        if self._formats is None:
            options: Options = options_of(get_current_vllm_config())
            self._formats = runtime_formats(self.stored, options)
        return self._formats

    def format_of(self, prefix: str) -> Format | None:
        """In which format vLLM's module runs; None for a module that holds no linear.

        Raises LoadError if fused linears disagree, which `runtime_formats` rules out.
        """
        num_layers = int(self.stored.config["num_hidden_layers"])
        formats = {self.formats.get(name) for name in official_modules(prefix, num_layers)}
        if len(formats) > 1:
            raise LoadError(f"{prefix}: its parts run as {', '.join(map(str, formats))}.")
        return formats.pop() if formats else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """vLLM's method for a layer; raises LoadError for a linear that the checkpoint lacks."""
        if not isinstance(layer, LinearBase | RoutedExperts):
            return super().get_quant_method(layer, prefix)
        own = self.format_of(prefix)
        if own is None:
            raise LoadError(
                f"{prefix}: no weight of this layer is in the checkpoint. Run 'vllm-dsv4 doctor'."
            )
        if isinstance(layer, LinearBase):
            if own == "bf16":
                return UnquantizedLinearMethod()
            if own == "nvfp4":
                return build_linear_method(self._get_nvfp4_config(), "NVFP4", prefix)
        elif own == "nvfp4":
            return ModelOptNVFP4Experts(
                quant_config=self._get_nvfp4_config(), moe_config=layer.moe_config
            )
        elif own == "bf16":
            return UnquantizedFusedMoEMethod(layer.moe_config)
        return super().get_quant_method(layer, prefix)
