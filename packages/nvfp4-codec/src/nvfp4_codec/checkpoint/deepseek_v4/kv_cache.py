"""What the configs say of the KV cache: three keys, which different readers take.

modelopt writes ``kv_cache_scheme`` into config.json (compressed-tensors' form) and
``kv_cache_quant_algo`` into hf_quant_config.json; NVIDIA's experts-only checkpoints have both in
config.json. A reader that finds none keeps the cache in BF16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..verify import Finding
from .structure import problem

_NONE = "a BF16 cache"


def cache_of_algorithm(algorithm: object) -> str:
    """The cache that a ``kv_cache_quant_algo`` asks for, in words that can be compared."""
    if algorithm is None:
        return _NONE
    bits = 8 if algorithm in ("FP8", "INT8") else 4 if str(algorithm).startswith("NVFP4") else None
    return f"{algorithm}" if bits is None else f"a cache of {bits} bits"


def cache_of_scheme(scheme: object) -> str:
    """The cache that a ``kv_cache_scheme`` asks for."""
    if not scheme:
        return _NONE
    return f"a cache of {scheme.get('num_bits')} bits" if isinstance(scheme, dict) else repr(scheme)


def cache_of_config(quantization: Mapping[str, Any]) -> str:
    """The cache that quantization_config asks for, by whichever key it has."""
    if "kv_cache_scheme" in quantization:
        return cache_of_scheme(quantization["kv_cache_scheme"])
    return cache_of_algorithm(quantization.get("kv_cache_quant_algo"))


def check_kv_cache(quantization: Mapping[str, Any]) -> list[Finding]:
    """Both keys in quantization_config, saying different things."""
    if "kv_cache_quant_algo" not in quantization:
        return []
    algorithm = quantization["kv_cache_quant_algo"]
    scheme = cache_of_scheme(quantization.get("kv_cache_scheme"))
    if (cache := cache_of_algorithm(algorithm)) == scheme:
        return []
    return [
        problem(
            "quantization_config.kv_cache_quant_algo",
            f"{algorithm!r}: {cache}",
            f"{scheme}, as kv_cache_scheme says",
            "Some loaders read one key, some the other: make them agree, or export again.",
            "config-contradicts-itself",
        )
    ]
