"""Config time: what config.json lacks, and what cannot work, before a GPU is touched.

vLLM calls a class of its registry once for the model's config and once for the whole one; ours
stands in the entry of DeepSeek-V4 and does first what vLLM's own does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config.kernel import NATIVE_MEGA_MOE_BACKENDS
from vllm.model_executor.models.config import DeepseekV4ForCausalLMConfig

from .claim import NO_MTP, describes_ours, is_experts_only
from .errors import OptionError, StoredError
from .moe_backend import find_backend
from .options import KEY, Options, runtime_formats
from .plugin import QUANTIZATION
from .stored import Stored, complete_config, promised, read_stored

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_log = logging.getLogger(__name__)


@lru_cache(maxsize=2)
def stored_of(model: str, revision: str | None) -> Stored:
    """What a model's checkpoint holds: its headers where it is a folder, else its config.json."""
    folder = Path(model)
    return read_stored(folder) if folder.is_dir() else promised(_config_of(model, revision))


def _config_of(model: str, revision: str | None) -> Mapping[str, Any]:
    """config.json as it is; transformers' object no longer tells what was missing."""
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    config: Mapping[str, Any] | None = get_hf_file_to_dict("config.json", model, revision)
    if config is None:
        raise StoredError(f"{model}: no config.json there. Give a checkpoint folder.")
    return config


def options_of(vllm_config: VllmConfig) -> Options:
    """The options of ``--additional-config``; raises OptionError for one that does not exist."""
    additional = vllm_config.additional_config
    return Options.from_mapping(additional.get(KEY) if isinstance(additional, dict) else None)


class ConfigHook(DeepseekV4ForCausalLMConfig):
    """vLLM's config hook of DeepSeek-V4, and ours after it."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        """Fills the gaps of config.json in the config object, with one WARNING."""
        DeepseekV4ForCausalLMConfig.verify_and_update_model_config(model_config)
        hf_config = model_config.hf_config
        if describes_ours(hf_config, getattr(hf_config, "quantization_config", None)):
            complete, notes = complete_config(_config_of(model_config.model, model_config.revision))
            if notes:
                _log.warning("config.json has gaps: %s.", "; ".join(notes))
            # transformers' class derives the others from its own dialect.
            if getattr(hf_config, "topk_method", None) is None:
                hf_config.topk_method = complete["topk_method"]

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Takes over what vLLM cannot serve, and refuses what nobody can.

        Raises OptionError and StoredError, as do `Options` and `runtime_formats`.
        """
        DeepseekV4ForCausalLMConfig.verify_and_update_config(vllm_config)
        model = vllm_config.model_config
        quantization = getattr(model.hf_config, "quantization_config", None)
        if not describes_ours(model.hf_config, quantization):
            return
        options = options_of(vllm_config)
        if is_experts_only(quantization):
            if not (_uses_mega_moe(vllm_config) or options != Options()):
                return
            model.quantization = QUANTIZATION
        stored = stored_of(model.model, model.revision)
        runtime_formats(stored, options)
        if options.moe_kernel is not None:
            find_backend(options.moe_kernel)
            if not _uses_mega_moe(vllm_config):
                raise OptionError(
                    f"moe_kernel {options.moe_kernel!r} gets its tokens from vLLM's MegaMoE layer: "
                    "add --moe-backend deep_gemm_mega_moe --enable-expert-parallel."
                )
        speculative = vllm_config.speculative_config
        if speculative is not None and speculative.method == "dspark":
            raise StoredError(
                f"{model.model}: drafting by DSpark blocks is not supported for NVFP4 checkpoints. "
                "Leave --speculative-config away."
            )
        if speculative is not None and speculative.method == "mtp" and not stored.has_mtp:
            raise StoredError(f"{model.model}: {NO_MTP}")


def _uses_mega_moe(vllm_config: VllmConfig) -> bool:
    return bool(vllm_config.kernel_config.moe_backend in NATIVE_MEGA_MOE_BACKENDS)
