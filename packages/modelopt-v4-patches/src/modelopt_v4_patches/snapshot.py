"""The amax snapshot: all that export needs of a calibration, in one safetensors file.

One F32 tensor for each calibrated quantizer of nvidia-modelopt, under the quantizer's name in
memory. modelopt 0.45 to 0.47 name them alike (``<layer>`` is ``model.layers.3``):

=========================================================  =================================
``<layer>.self_attn.q_a_proj.input_quantizer``             a linear's input
``<layer>.self_attn.q_a_proj.weight_quantizer``            its weight
``<layer>.mlp.experts.gate_up_proj_input_quantizer``       one for all experts of a layer
``<layer>.mlp.experts.down_proj_input_quantizer``          one for all experts of a layer
``<layer>.mlp.experts.gate_up_proj_weight_quantizers.17``  an expert's w1 and w3 together
``<layer>.mlp.experts.down_proj_weight_quantizers.17``     an expert's w2
``<layer>.self_attn.{k,v}_bmm_quantizer``                  KV cache; no amax under fp8_cast
=========================================================  =================================

Amax are scalars in the dtype of the activations (BF16), so F32 holds them exactly. Experts that
some other version keeps as modules, or gives one input quantizer each, are understood as well.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nvfp4_codec.checkpoint.files import strict_json
from nvfp4_codec.checkpoint.header import TensorSpec, shown
from nvfp4_codec.checkpoint.reader import Checkpoint
from nvfp4_codec.checkpoint.writer import ShardWriter
from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import Scheme, to_official

from .errors import SnapshotError

if TYPE_CHECKING:
    import torch

FORMAT: Final = "dsv4-amax-snapshot"
VERSION: Final = "1"
#: What every snapshot says of itself besides ``format`` and ``version``.
REQUIRED: Final = (
    "modelopt", "transformers", "torch", "config_sha256", "dataset", "num_samples",
    "sequence_length", "kv_cache", "qformat", "quantizers", "complete",
)  # fmt: skip

_INPUT = ".input_quantizer"
# Fused experts: quantizers beside the stacked parameter; an index where each expert has its own.
_FUSED = re.compile(
    r"(?P<experts>.+\.experts)\.(?P<leaf>gate_up|gate|up|down)_proj_input_quantizers?"
    r"(?:\.(?P<expert>[0-9]+))?"
)
_LEAVES: Final = {"gate_up": ("w1", "w3"), "gate": ("w1",), "up": ("w3",), "down": ("w2",)}
_EXPERT = re.compile(r"(?P<experts>.+\.ffn\.experts)\.(?P<expert>[0-9]+)\.(?P<leaf>w[123])")
#: modelopt sees the names in memory; the other schemes cost nothing.
_SCHEMES: Final[tuple[Scheme, ...]] = ("hf", "official", "half_converted")
#: Keys of config.json that say how weights are stored, not which model it is.
_STORAGE: Final = frozenset(
    ("quantization_config", "expert_dtype", "torch_dtype", "dtype", "transformers_version",
     "_name_or_path", "architectures")
)  # fmt: skip


@dataclass(frozen=True)
class Snapshot:
    """Amax by quantizer name, and where they come from.

    amax: F32 on the CPU, each in the shape that modelopt gave it (mostly 0-dim).
    metadata: strings; ``quantizers`` and what else is structured is JSON.
    """

    amax: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]

    @classmethod
    def load(cls, path: str | Path) -> Snapshot:
        """Reads and checks a snapshot; nothing in it is executed.

        Raises SnapshotError naming the file, the key and the fix.
        """
        path = Path(path)
        where = str(path)
        if path.is_dir():
            raise SnapshotError(f"file {shown(where)}: a folder; give the snapshot file in it.")
        try:
            with Checkpoint.open(path) as file:
                metadata = dict(file.headers[path.name].metadata)
                _check_metadata(metadata, where)
                for info in file:
                    if info.dtype != "F32":
                        what = f"dtype {info.dtype}; a snapshot holds F32. Calibrate again."
                        raise _problem(what, where, info.name)
                snapshot = cls({info.name: file.tensor(info.name) for info in file}, metadata)
        except CheckpointError as error:
            # the codec names the file alone, as it would a shard
            text = str(error).removeprefix(f"file {error.file}")
            raise SnapshotError(f"file {shown(where)}{text}" if error.file else text) from None
        snapshot._check(where)
        return snapshot

    def save(self, path: str | Path) -> None:
        """Writes it so that the file is always whole: temporary name, fsync, rename.

        The bytes depend on the content only. Raises SnapshotError before anything is written if
        the metadata is incomplete, CheckpointError if the disk refuses.
        """
        metadata = {**self.metadata, "format": FORMAT, "version": VERSION}
        path = Path(path)
        _check_metadata(metadata, str(path))
        self._check(str(path))
        specs = [TensorSpec(name, "F32", tuple(t.shape)) for name, t in self.amax.items()]
        with ShardWriter(path, specs, metadata) as writer:
            for name, tensor in self.amax.items():
                writer.write_tensor(name, tensor)
            writer.commit()

    @property
    def complete(self) -> bool:
        """False for one that was written while a layerwise calibration went on."""
        return self.metadata["complete"] == "true"

    @property
    def quantizers(self) -> dict[str, dict[str, Any]]:
        """What each quantizer is: shape, kind, num_bits and, where known, block and axis."""
        found: dict[str, dict[str, Any]] = json.loads(self.metadata["quantizers"])
        return found

    @property
    def unseen_experts(self) -> tuple[str, ...]:
        """Official names of experts that no calibration token was routed to."""
        return tuple(json.loads(self.metadata.get("unseen_experts", "[]")))

    def input_amax(self, official_module: str) -> float | None:
        """The largest activation that calibration saw at the input of a module, or None.

        official_module: ``layers.3.attn.wq_a``, ``layers.3.ffn.experts.17.w1``. None means
        uncalibrated: absent, or 0, NaN or Inf. Of an amax with several values, the largest counts.

        modelopt's ``input_scale`` is ``amax / (6 * 448)``, one fp32 division
        (``NVFP4QTensor.get_activation_scaling_factor``).
        """
        name = self._inputs.get(official_module)
        if name is None and (found := _EXPERT.fullmatch(official_module)):
            name = self._inputs.get(f"{found['experts']}.*.{found['leaf']}")
        if name is None or self.amax[name].numel() == 0:
            return None
        value = float(self.amax[name].max())  # of values with a NaN the maximum is NaN
        return value if math.isfinite(value) and value > 0 else None

    @cached_property
    def _inputs(self) -> dict[str, str]:
        """Official module, or ``layers.3.ffn.experts.*.w1`` for all experts -> quantizer name."""
        found: dict[str, str] = {}
        for name in self.amax:
            for module in _modules_before(name):
                if (other := found.setdefault(module, name)) != name:
                    raise _problem(
                        f"{shown(other)} claims the input of {module} as well. Calibrate again.",
                        key=name,
                    )
        return found

    def _check(self, file: str) -> None:
        listed = self.quantizers
        for name, tensor in self.amax.items():
            about = listed.get(name)
            if about is None or about.get("shape") != list(tensor.shape):
                said = "nothing of it" if about is None else about.get("shape")
                raise _problem(
                    f"shape {list(tensor.shape)}, but the metadata says {said}. Calibrate again.",
                    file,
                    name,
                )
        if absent := sorted(listed.keys() - self.amax.keys()):
            raise _problem(
                f"{len(absent)} quantizers of the metadata have no amax, the first is this one. "
                "Calibrate again.",
                file,
                absent[0],
            )
        _ = self._inputs  # names that are not DeepSeek-V4's are refused here


def config_sha256(config: Mapping[str, Any]) -> str:
    """SHA-256 of a config.json that is equal for all storage formats of one model.

    Over canonical JSON (sorted keys, no spaces) without the keys that say how weights are stored,
    so the official checkpoint and its BF16 copy agree.
    """
    kept = {key: value for key, value in config.items() if key not in _STORAGE}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _modules_before(quantizer: str) -> Iterator[str]:
    """The official modules whose input a quantizer sees; none for weights, outputs, KV caches.

    Raises SnapshotError for an input quantizer of a module that DeepSeek-V4 does not have.
    """
    fused = _FUSED.fullmatch(quantizer)
    if fused is None and not quantizer.endswith(_INPUT):
        return
    module = _official(fused["experts"] if fused else quantizer.removesuffix(_INPUT), quantizer)
    if fused is None:
        yield module
    else:
        yield from (f"{module}.{fused['expert'] or '*'}.{leaf}" for leaf in _LEAVES[fused["leaf"]])


def _official(module: str, quantizer: str) -> str:
    for scheme in _SCHEMES:
        try:
            return to_official(module, scheme)
        except CheckpointError:
            continue
    raise _problem(
        "its module is none of DeepSeek-V4's in any known scheme. The snapshot is of another "
        "model, or of a version of transformers outside 5.8-5.24.",
        key=quantizer,
    )


def _check_metadata(metadata: Mapping[str, str], file: str) -> None:
    if (found := metadata.get("format", "not stated")) != FORMAT:
        raise _problem(
            f"its format is {found!r}, expected {FORMAT!r}: no amax snapshot. "
            "`dsv4-quantize calibrate` writes one.",
            file,
        )
    if (found := metadata.get("version", "not stated")) != VERSION:
        raise _problem(
            f"snapshot version {found!r}; this release reads {VERSION!r}. "
            "Use the release that wrote it, or calibrate again.",
            file,
        )
    if missing := [key for key in REQUIRED if key not in metadata]:
        raise _problem(f"the metadata lacks {', '.join(missing)}. Calibrate again.", file)
    if metadata["complete"] not in ("true", "false"):
        raise _problem(f"complete is {metadata['complete']!r}, expected 'true' or 'false'.", file)
    if not _is(metadata["quantizers"], dict, dict):
        raise _problem("quantizers is no JSON object of objects. Calibrate again.", file)
    if not _is(metadata.get("unseen_experts", "[]"), list, str):
        raise _problem("unseen_experts is no JSON list of names. Calibrate again.", file)


def _is(text: str, container: type, member: type) -> bool:
    try:
        document = strict_json(text.encode(), "")
    except CheckpointError:
        return False
    members = document.values() if isinstance(document, dict) else document
    return isinstance(document, container) and all(isinstance(one, member) for one in members)


def _problem(message: str, file: str | None = None, key: str | None = None) -> SnapshotError:
    where = [f"file {shown(file)}"] if file else []
    where += [f"key {shown(key)}"] if key else []
    return SnapshotError(f"{', '.join(where)}: {message}" if where else message)
