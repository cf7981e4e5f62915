"""The class that vLLM asks whether a checkpoint's quantization is ours.

It is registered in every process and for every model, so it imports no model and no kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from . import compat
from .errors import LoadError, StoredError
from .plugin import QUANTIZATION
from .stored import is_ours

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

#: Said where speculative decoding is asked for, and nowhere else.
NO_MTP: Final = (
    "speculative decoding by MTP is asked for, and the checkpoint has no MTP blocks. Leave "
    "--speculative-config away, or export the model with its MTP blocks."
)


def is_experts_only(quantization: object) -> bool:
    """Whether a quantization block has the layout that NVIDIA publishes, and stock vLLM serves."""
    methods = ("fp8", "deepseek_v4_fp8")
    return isinstance(quantization, dict) and quantization.get("quant_method") in methods


def is_draft(hf_config: Any) -> bool:
    """Whether vLLM made this config for the draft model, which are the checkpoint's MTP blocks."""
    return "DeepSeekV4MTPModel" in (getattr(hf_config, "architectures", None) or ())


def describes_ours(hf_config: Any, quantization: object) -> bool:
    """Whether transformers' config object and a quantization block are of one of our checkpoints.

    vLLM renames the model type of a draft; a checkpoint with a vision tower is another model.
    """
    model_type = "deepseek_v4" if is_draft(hf_config) else getattr(hf_config, "model_type", None)
    if getattr(hf_config, "vision_n_layers", 0):
        return False
    return is_ours({"model_type": model_type, "quantization_config": quantization})


class Claim(QuantizationConfig):
    """Claims our checkpoints, and makes `quant_config.DSV4NVFP4Config` of them.

    The experts-only layout is left to vLLM, which serves it; `config_hook` takes it over where
    vLLM cannot.
    """

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Our name if the checkpoint is ours.

        Raises VersionError if it is and vLLM is not the tested one, StoredError for a draft that
        is not there.
        """
        if not describes_ours(hf_config, hf_quant_cfg):
            return None
        if is_draft(hf_config) and not getattr(hf_config, "num_nextn_predict_layers", 0):
            raise StoredError(NO_MTP)
        if is_experts_only(hf_quant_cfg):
            return None
        compat.require_tested_version()
        return QUANTIZATION

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """The config that builds layers; imports vLLM's model."""
        from .quant_config import DSV4NVFP4Config

        return DSV4NVFP4Config.from_config(config)

    @classmethod
    def get_name(cls) -> str:
        """Our name in vLLM."""
        return QUANTIZATION

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """BF16, which DeepSeek-V4 runs in."""
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Hopper: vLLM's DeepSeek-V4 attention has no kernels for less."""
        return 90

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        """Nothing besides config.json."""
        return []

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Never asked: `from_config` makes another class."""
        raise LoadError(f"{prefix}: vLLM asked the claim for a method. Report this, please.")
