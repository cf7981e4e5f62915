"""Plan a rewrite shard by shard: which tensors are kept, which are produced, and how.

Output files keep the names of the source's; what is produced from a weight goes where the
weight was. Every step fills the tensors of one family, so memory is bounded by one of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..errors import CheckpointError
from .families import Family
from .files import inside, read_config_file, read_small
from .header import TensorSpec, shown
from .job import Shard, Step, json_bytes
from .reader import Checkpoint, TensorInfo
from .writer import ShardWriter

#: Files beside the weights that belong to a model. Anything else, code above all, stays.
COPIED_NAMES: Final = frozenset({
    "config_sentence_transformers.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "modules.json",
    "sentence_bert_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "tokenization_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "LICENSE",
    "LICENSE.txt",
    "1_Pooling/config.json",
})  # fmt: skip
_MAX_COPIED_BYTES: Final = 1 << 28


@dataclass
class Rewrite:
    """Collects the shards of a job."""

    source: Checkpoint
    _specs: dict[str, list[TensorSpec]] = field(default_factory=dict)
    _steps: dict[str, list[tuple[int, Step]]] = field(default_factory=dict)

    def keep(self, infos: Iterable[TensorInfo]) -> None:
        """Copies tensors verbatim into the shard of the same name."""
        for info in infos:
            self.copy(info, info.spec, info.file)

    def copy(self, info: TensorInfo, spec: TensorSpec, file: str) -> None:
        """Copies a tensor's bytes under another name, dtype or shape of the same size."""

        def step(writer: ShardWriter) -> None:
            writer.copy(spec.name, self.source, info)

        self.produce(file, [spec], step, info.offset)

    def produce(self, file: str, specs: Iterable[TensorSpec], step: Step, order: int) -> None:
        """Adds tensors that ``step`` writes; steps run by ``order``, the source's offset."""
        self._specs.setdefault(file, []).extend(specs)
        self._steps.setdefault(file, []).append((order, step))

    def shards(self) -> tuple[Shard, ...]:
        """The shards in the source's order; a file left with no tensor is dropped."""
        made = []
        for file in self.source.paths:
            if file not in self._specs:
                continue
            steps = [step for _, step in sorted(self._steps[file], key=lambda pair: pair[0])]
            metadata = self.source.headers[file].metadata or {"format": "pt"}
            made.append(Shard(file, tuple(self._specs[file]), tuple(steps), metadata))
        if not made:
            raise CheckpointError("holds no tensors.", file=shown(str(self.source.root)))
        return tuple(made)


def documents(
    source: Checkpoint, change_config: Callable[[dict[str, Any]], None]
) -> dict[str, bytes]:
    """The small files of the output folder: allow-listed ones, and config.json as changed.

    A checkpoint opened as one file has none. Raises CheckpointError for a broken config.json.
    """
    if not source.is_folder:
        return {}
    found: dict[str, bytes] = {}
    for name in sorted(COPIED_NAMES):
        if os.path.lexists(source.root / name):
            path = inside(source.root, name, str(source.root))
            found[name] = read_small(path, _MAX_COPIED_BYTES, name)
    config = read_config(source.root)
    if config is not None:
        change_config(config)
        found["config.json"] = json_bytes(config)
    return found


def read_config(folder: Path) -> dict[str, Any] | None:
    """config.json of a checkpoint folder, None if there is none."""
    path = folder / "config.json"
    if not os.path.lexists(path):
        return None
    inside(folder, path.name, str(folder))
    config = read_config_file(path, path.name)
    try:
        json_bytes(config)
    except RecursionError:
        raise CheckpointError("is nested too deeply; repair it.", file=path.name) from None
    return config


def modelopt_config(quantized: Iterable[Family], kept: Iterable[Family]) -> dict[str, Any]:
    """``quantization_config`` for a checkpoint whose only quantized format is NVFP4.

    ``ignore`` names the linear layers that stay as they are. Without an ``input_scale`` the
    algorithm is W4A16_NVFP4: a loader told "NVFP4" would quantize activations with a scale
    that is not there.
    """
    quantized = list(quantized)
    names = {family.module for family in quantized}
    ignore = sorted(
        family.module
        for family in kept
        if family.weight.name.endswith(".weight")
        and len(family.shape) == 2
        and family.module not in names
    )
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "quant_method": "modelopt",
        "quant_algo": nvfp4_algorithm(quantized),
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ignore,
        "producer": {"name": "nvfp4-codec"},
    }


def nvfp4_algorithm(quantized: Iterable[Family]) -> str:
    """ModelOpt's name: "NVFP4" if every weight has an activation scale, else weight-only."""
    suffixes = ("input_scale", "input_global_scale")
    scaled = (any(e.name.endswith(suffixes) for e in family.extras) for family in quantized)
    return "NVFP4" if all(scaled) else "W4A16_NVFP4"
