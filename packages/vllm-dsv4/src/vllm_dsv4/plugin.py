"""The entry point ``vllm.general_plugins``: what vLLM calls in each of its processes.

It registers three things by name or as a light class; the models are imported when one of our
checkpoints is served, by vLLM.
"""

from __future__ import annotations

import logging
from typing import Final

from . import compat

#: Our quantization config's name in vLLM.
QUANTIZATION: Final = "dsv4_nvfp4"
#: vLLM's architectures and the classes that stand for them; all inert for other checkpoints.
MODELS: Final = {
    "DeepseekV4ForCausalLM": "vllm_dsv4.model:DSV4ForCausalLM",
    "DeepSeekV4MTPModel": "vllm_dsv4.mtp:DSV4MTP",
}

_log = logging.getLogger(__name__)


def register() -> None:
    """Makes vLLM serve our checkpoints; may be called any number of times.

    Does nothing on a platform other than CUDA. With a vLLM outside the tested range only the claim
    is registered, which then refuses our checkpoints and leaves every other model alone.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    _log_as_vllm_does()
    problem = compat.version_problem()
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config

        from .claim import Claim
    except ImportError as error:
        _log.error("%s", problem or f"vllm-dsv4 cannot be registered: {error}. Reinstall vLLM.")
        return
    register_quantization_config(QUANTIZATION)(Claim)
    if problem:
        return

    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from .config_hook import ConfigHook

    for architecture, ours in MODELS.items():
        ModelRegistry.register_model(architecture, ours)
    MODELS_CONFIG_MAP["DeepseekV4ForCausalLM"] = ConfigHook


def _log_as_vllm_does() -> None:
    """vLLM configures its own logger only, after plugins are loaded; so ours becomes its child."""
    logging.getLogger(__package__).parent = logging.getLogger("vllm")
