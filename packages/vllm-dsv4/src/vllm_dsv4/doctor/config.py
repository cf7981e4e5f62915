"""config.json: what is missing, what the plugin fills in, and what contradicts the tensors."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from nvfp4_codec.checkpoint.deepseek_v4.quantization import OLDER
from nvfp4_codec.checkpoint.deepseek_v4.structure import problem
from nvfp4_codec.checkpoint.header import shown
from nvfp4_codec.checkpoint.verify import Finding

from ..stored import complete_config

_BLOCK: Final = "quantization_config"
_FROM_SOURCE: Final = "Take it from the official config.json; `dsv4-quantize finalize` does."
#: Keys that say which layers there are: nothing but the right value helps.
_STRUCTURE: Final = ("compress_ratios", "num_hash_layers", "num_nextn_predict_layers")
_ROPE: Final = ("rope_scaling", "rope_theta", "compress_rope_theta")
#: Numbers that no tensor shows; without them readers take their own, whatever the model's are.
_NUMBERS: Final = {
    "rope_theta": "the base of the rotary embedding in layers without compression",
    "compress_rope_theta": "the base of the rotary embedding in compressed layers",
    "sliding_window": "how many tokens each layer sees uncompressed",
    "index_topk": "how many compressed entries the indexer picks",
    "max_position_embeddings": "the longest context",
    "routed_scaling_factor": "what the sum of the routed experts is multiplied by",
}
#: The same in every DeepSeek-V4, and in vLLM where config.json has none.
_USUAL: Final = ("swiglu_limit", "rms_norm_eps", "hc_eps", "hc_sinkhorn_iters")
_WHOLE: Final = (
    "sliding_window", "index_topk", "max_position_embeddings", "hc_sinkhorn_iters",
    "original_max_position_embeddings",
)  # fmt: skip
#: vLLM keeps them in 32 bits.
_MOST: Final = 2**31
#: Values that every DeepSeek-V4 has and no tensor shows; where config.json has none, vLLM has them.
_FIXED: Final[Mapping[str, tuple[object, str]]] = {
    "scoring_func": ("sqrtsoftplus", "how the gate's scores are made"),
    "hidden_act": ("silu", "the only one that vLLM has kernels for"),
}
#: Spellings of the dtype that neither vLLM's DeepSeek-V4 nor the plugin runs in.
_HALF: Final = ("float16", "half", "torch.float16")
_CLASS: Final = "DeepseekV4ForCausalLM"
#: Keys by which loaders choose what to build.
_CHOICES: Final = ("topk_method", f"{_BLOCK}.quant_method", f"{_BLOCK}.quant_algo")


def look_at_config(config: Mapping[str, Any], known: Iterable[Finding]) -> list[Finding]:
    """The codec's findings on config.json as serving sees them, and what it does not look at.

    ``known``: those findings. Raises CheckpointError for a value of an unusable type.
    """
    complete, _ = complete_config(config)
    derived = _filled(config, complete)
    findings = [_refined(finding, derived) for finding in known]
    told = {finding.tensor for finding in findings}
    for key in sorted(derived - told - set(_ROPE)):
        expected = repr(_value(complete, key))
        findings.append(problem(key, "absent", expected, _FROM_SOURCE, "config-missing-key"))
    others = [finding for finding in _wrong_values(config) if finding.tensor not in told]
    return findings + others + _numbers(complete, told) + _rope(config, complete, told)


def _wrong_values(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Values that are there and with which vLLM builds another model, or none."""

    def wrong(key: str, expected: str) -> Finding:
        return problem(key, shown(repr(config[key])), expected, _FROM_SOURCE, "config-value")

    for key, (value, why) in _FIXED.items():
        if key in config and config[key] != value:
            yield wrong(key, f"{value!r}, {why}")
    names = config.get("architectures")
    if names and not (isinstance(names, list) and _CLASS in names):
        yield wrong("architectures", f"[{_CLASS!r}], the class that vLLM and the plugin load")
    for key in ("norm_topk_prob", "tie_word_embeddings"):
        if key in config and not isinstance(config[key], bool):
            yield wrong(key, "true or false")
    if config.get("tie_word_embeddings") is True:
        expected = "false: the checkpoint has a head of its own"
        yield problem("tie_word_embeddings", "True", expected, _FROM_SOURCE, "config-tied-head")
    rope, head = config.get("qk_rope_head_dim"), config.get("head_dim")
    fits = type(rope) is int and rope % 2 == 0 and rope > 0
    if rope is not None and not (fits and (type(head) is not int or rope <= head)):
        yield wrong("qk_rope_head_dim", f"an even number from 2 to head_dim, {shown(repr(head))}")
    for key in ("dtype", "torch_dtype"):
        if config.get(key) in _HALF:
            yield wrong(key, "'bfloat16', in which DeepSeek-V4 runs")


def _numbers(complete: Mapping[str, Any], told: Container[str]) -> list[Finding]:
    absent = [
        problem(key, "absent", f"a number: {what}", _FROM_SOURCE, "config-lost-key")
        for key, what in _NUMBERS.items()
        if complete.get(key) is None and key not in told
    ]
    present = {key: complete.get(key) for key in (*_NUMBERS, *_USUAL) if key not in told}
    return absent + _no_numbers(present)


def _no_numbers(values: Mapping[str, object], within: str = "") -> list[Finding]:
    """What is there and is no number that such a key can have."""
    findings = []
    for key, value in values.items():
        types = (int,) if key in _WHOLE else (int, float)
        if value is None or (type(value) in types and 0 < value <= _MOST):  # type: ignore[operator]
            continue
        expected = "a positive whole number" if key in _WHOLE else "a positive number"
        findings.append(
            problem(within + key, shown(repr(value)), expected, _FROM_SOURCE, "config-value")
        )
    return findings


def _filled(config: Mapping[str, Any], complete: Mapping[str, Any]) -> set[str]:
    """Keys that a config lacks and that its completion has."""
    block, full = config.get(_BLOCK) or {}, complete.get(_BLOCK) or {}
    inner = {f"{_BLOCK}.{key}" for key, value in full.items() if value and not block.get(key)}
    return {key for key, value in complete.items() if value and not config.get(key)} | inner


def _value(config: Mapping[str, Any], key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _refined(finding: Finding, derived: Container[str]) -> Finding:
    """What nothing else in the folder settles gets a code of its own. derived: filled keys."""
    if finding.code == "config-missing-key" and finding.tensor not in derived:
        return replace(finding, code="config-lost-key")
    if finding.tensor == f"{_BLOCK}.kv_cache_quant_algo":
        return replace(finding, code="kv-cache-disagrees")
    if finding.file == OLDER:
        return replace(finding, code="older-config-disagrees")
    if finding.code == "config-disagrees" and finding.tensor in _STRUCTURE:
        return replace(finding, code="config-structure")
    chosen = finding.tensor in _CHOICES or finding.tensor.endswith(".group_size")
    if finding.code == "config-disagrees" and chosen:
        return replace(finding, code="config-value")
    return finding


def _rope(
    config: Mapping[str, Any], complete: Mapping[str, Any], told: Container[str]
) -> list[Finding]:
    flat = config.get("rope_scaling")
    if flat is not None:
        return [] if "rope_scaling" in told else _scaling(flat, "rope_scaling")
    nested = config.get("rope_parameters")
    if complete.get("rope_scaling") is None:
        return [
            problem(
                "rope_scaling",
                "absent",
                "how positions are scaled beyond the length that was trained",
                _FROM_SOURCE,
                "rope-missing",
            )
        ]
    if isinstance(nested, Mapping) and isinstance(nested.get("compress"), Mapping):
        found = "nested as {main, compress}, as transformers writes it"
        return [
            problem("rope_parameters", found, "rope_scaling, flat", _FROM_SOURCE, "nested-rope"),
            *_scaling(nested["compress"], "rope_parameters.compress"),
        ]
    return [
        problem("rope_scaling", "absent", "a value", _FROM_SOURCE, "config-missing-key"),
        *_scaling(nested, "rope_parameters"),
    ]


def _scaling(rope: object, key: str) -> list[Finding]:
    """Whether vLLM can scale by it (0.33.0: models/deepseek_v4/common/rope.py): it takes a kind
    that is absent for no scaling, and YaRN by two numbers.
    """
    if not isinstance(rope, Mapping):
        return [problem(key, shown(repr(rope)), "an object", _FROM_SOURCE, "config-value")]
    kind = rope.get("rope_type") or rope.get("type")
    if not isinstance(kind, str):
        found = "absent" if kind is None else shown(repr(kind))
        return [problem(f"{key}.type", found, "a word: 'yarn'", _FROM_SOURCE, "rope-missing")]
    needed = ("factor", "original_max_position_embeddings") if "yarn" in kind else ()
    absent = [
        problem(f"{key}.{name}", "absent", "a number: YaRN scales by it", _FROM_SOURCE,
                "rope-missing")
        for name in needed
        if rope.get(name) is None
    ]  # fmt: skip
    optional = ("beta_fast", "beta_slow")
    return absent + _no_numbers({n: rope.get(n) for n in (*needed, *optional)}, f"{key}.")
