"""What a config.json says of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from .errors import OptionError


def kv_cache_dtype(config: Mapping[str, Any]) -> Literal["fp8"] | None:
    """vLLM's --kv-cache-dtype; None leaves it to vLLM, which takes FP8 as well.

    Raises OptionError for a format that vLLM's attention for this model does not have.
    """
    quantization = config.get("quantization_config") or {}
    algorithm = quantization.get("kv_cache_quant_algo")
    scheme = quantization.get("kv_cache_scheme")
    if algorithm is None and isinstance(scheme, Mapping):
        bits = scheme.get("num_bits")
        algorithm = "FP8" if bits == 8 and scheme.get("type") == "float" else f"{bits} bits"
    if algorithm is None:
        return None
    if str(algorithm).upper() == "FP8":
        return "fp8"
    raise OptionError(
        f"config.json wants a KV cache in {algorithm}; DeepSeek-V4's attention has FP8 only. "
        "Say --kv-cache-dtype fp8, or export the model again."
    )
