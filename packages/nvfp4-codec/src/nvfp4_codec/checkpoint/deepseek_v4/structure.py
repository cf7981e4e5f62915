"""What the tensors alone say of the model's structure, held against config.json.

A wrong ``compress_ratios`` would make every name of a layer unknown or missing. So where the
tensors leave no doubt they decide, and the contradiction is one finding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...schemas.deepseek_v4 import ModelConfig, Template
from ..reader import TensorInfo
from ..verify import Finding

CONFIG: Final = "config.json"
#: Keys that loaders ask for by name, and what happens without them.
_NEEDED: Final = {
    "architectures": "loaders choose the model class by it",
    "compress_ratios": "transformers renames it and loses the MTP blocks' entries",
    "num_hash_layers": "transformers renames it",
    "topk_method": "without it loaders make no gate bias, and the stored one has no place",
    "expert_dtype": "it says how routed experts are stored",
}
#: Keys that say how weights are stored, or who wrote the file; not which model it is.
_STORAGE: Final = {
    "architectures", "dtype", "num_nextn_predict_layers", "quantization_config", "torch_dtype",
    "transformers_version", "_name_or_path",
}  # fmt: skip
#: Where transformers keeps what it renames.
_RENAMED: Final = {
    "rope_scaling": "rope_parameters",
    "rope_theta": "rope_parameters",
    "compress_rope_theta": "rope_parameters",
}
_FROM_SOURCE: Final = (
    "Take it from the source's config.json; `dsv4-quantize finalize` does that for an export."
)


@dataclass(frozen=True)
class Structure:
    """What was seen: blocks (``layers.3``, ``mtp.0``), each compressor's ratio, kinds of gates."""

    blocks: frozenset[str]
    ratios: Mapping[str, int]
    hashed: frozenset[int]
    scored: frozenset[int]

    @classmethod
    def of(
        cls, raw: Mapping[tuple[Template, tuple[str, ...]], Mapping[str, TensorInfo]]
    ) -> Structure:
        """From the parts of all tensors that some name of the schema fits."""
        blocks: set[str] = set()
        ratios: dict[str, int] = {}
        hashed: set[int] = set()
        scored: set[int] = set()
        for (template, indices), parts in raw.items():
            if not indices:
                continue
            block = f"{template.official.partition('.')[0]}.{indices[0]}"
            blocks.add(block)
            row = template.row.official
            if row == "attn.compressor.ape" and parts[""].shape:
                # one row for each position of a window
                ratios[block] = parts[""].shape[0]
            elif row == "ffn.gate.tid2eid" and not template.in_mtp:
                hashed.add(int(indices[0]))
            elif row == "ffn.gate.bias" and not template.in_mtp:
                scored.add(int(indices[0]))
        return cls(frozenset(blocks), ratios, frozenset(hashed), frozenset(scored))

    @property
    def num_hashed(self) -> int | None:
        """Leading layers that route by token id, None if the tensors leave a doubt."""
        count = len(self.hashed)
        certain = self.hashed == set(range(count)) and not self.hashed & self.scored
        return count if certain and (self.hashed or self.scored) else None


def problem(key: str, found: str, expected: str, fix: str, code: str) -> Finding:
    """A finding about a key of config.json."""
    return Finding(code, key, CONFIG, found, expected, fix)


def model_config(config: Mapping[str, Any], seen: Structure) -> tuple[ModelConfig, list[Finding]]:
    """The model's structure, and where config.json lacks something or contradicts the tensors.

    Raises CheckpointError if a size is missing, or it is not DeepSeek-V4.
    """
    findings = [
        problem(key, "absent", f"a value: {why}", _FROM_SOURCE, "config-missing-key")
        for key, why in _NEEDED.items()
        if config.get(key) in (None, "", []) and (key != "expert_dtype" or _quantized(config))
    ]
    method = config.get("topk_method")
    if method and method != "noaux_tc":
        expected = "'noaux_tc', for which loaders make the gate bias"
        findings.append(
            problem("topk_method", repr(method), expected, _FROM_SOURCE, "config-disagrees")
        )
    known = dict(config)
    num_layers = config.get("num_hidden_layers")
    layers = range(num_layers if isinstance(num_layers, int) else 0)
    if not config.get("compress_ratios") and not config.get("layer_types"):
        known["compress_ratios"] = [seen.ratios.get(f"layers.{i}", 0) for i in layers]
    if config.get("num_hash_layers") is None and config.get("mlp_layer_types") is None:
        known["num_hash_layers"] = seen.num_hashed or 0
    made = ModelConfig.from_dict(known)
    changed: dict[str, Any] = {}
    ratios = [block.ratio for block in made.blocks]
    for i, block in enumerate(made.blocks):
        name = f"{block.kind}.{block.index}"
        stored = seen.ratios.get(name, block.ratio)
        if stored != block.ratio and stored in (4, 128):
            ratios[i] = stored
            findings.append(
                problem(
                    "compress_ratios",
                    f"{block.ratio} for {name}",
                    f"{stored}, the rows of {name}.attn.compressor.ape",
                    _FROM_SOURCE,
                    "config-disagrees",
                )
            )
            changed["compress_ratios"] = ratios
    declared, stored_hashed = sum(block.hashed for block in made.blocks), seen.num_hashed
    between = None if stored_hashed is None else range(*sorted((declared, stored_hashed)))
    if between and all(i in seen.hashed or i in seen.scored for i in between):
        findings.append(
            problem(
                "num_hash_layers",
                str(declared),
                f"{stored_hashed}, the layers that store ffn.gate.tid2eid",
                _FROM_SOURCE,
                "config-disagrees",
            )
        )
        changed["num_hash_layers"] = stored_hashed
    if changed:
        known |= changed
        made = ModelConfig.from_dict(known)
    return _mtp(made, known, seen, findings), findings


def _mtp(
    made: ModelConfig, known: dict[str, Any], seen: Structure, findings: list[Finding]
) -> ModelConfig:
    """MTP blocks that are declared and lost, or stored and not declared."""
    key = "num_nextn_predict_layers"
    declared = sum(block.kind == "mtp" for block in made.blocks)
    stored = sum(block.startswith("mtp.") for block in seen.blocks)
    if declared and not stored:
        findings.append(
            problem(
                key,
                f"{declared} MTP block(s) declared, none stored",
                "the tensors mtp.*",
                "Copy them from the source (`dsv4-quantize finalize` does), or set the key to 0 "
                "and cut compress_ratios: speculative decoding cannot start without them.",
                "missing-mtp",
            )
        )
        return made.without_mtp()
    if stored and not declared:
        found = f"{known.get(key)!r}, and {stored} MTP block(s) are stored"
        findings.append(problem(key, found, str(stored), _FROM_SOURCE, "config-disagrees"))
        return ModelConfig.from_dict({**known, key: stored})
    return made


def _quantized(config: Mapping[str, Any]) -> bool:
    return bool(config.get("quantization_config"))


def check_same_model(config: Mapping[str, Any], source: Mapping[str, Any]) -> list[Finding]:
    """Keys of the source's config.json that are absent or have another value."""
    findings = []
    for key, value in source.items():
        if key in _STORAGE or (key in _NEEDED and config.get(key) in (None, "", [])):
            continue  # told already, or not a difference of the model
        if key not in config:
            if key in _RENAMED and _RENAMED[key] in config:
                continue
            found, code = "absent", "config-missing-key"
        elif config[key] != value:
            found, code = repr(config[key]), "config-differs"
        else:
            continue
        findings.append(problem(key, found, f"{value!r}, as in the source", _FROM_SOURCE, code))
    return findings
