"""Reads a snapshot out of a model that modelopt has calibrated, or is calibrating."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from nvfp4_codec.schemas.deepseek_v4 import to_official

from ..errors import CalibrationError
from ..snapshot import FORMAT, VERSION, Snapshot, config_sha256

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger(__name__)

_EXPERTS = re.compile(r"(?:.*\.)?(model\.layers\.[0-9]+\.mlp\.experts)")


@dataclass(frozen=True)
class Facts:
    """Where a calibration's numbers come from; goes into the snapshot's metadata.

    config: the source's config.json. dataset: a name, no path of this machine.
    """

    config: Mapping[str, Any]
    dataset: str
    num_samples: int
    sequence_length: int
    kv_cache: str
    qformat: str = "nvfp4"


class Recorder:
    """Watches one model from before calibration until its snapshot is taken.

    Experts that no token reaches leave no trace in modelopt's quantizers, because a layer's experts
    share their input quantizers: a hook counts, and only while modelopt collects statistics.
    """

    def __init__(self, model: nn.Module, facts: Facts) -> None:
        self.facts = facts
        self._model = model
        self._quantizers: dict[str, Any] = {}
        self._tokens: dict[str, torch.Tensor] = {}
        self._earlier: Snapshot | None = None
        # Only the eager loop over experts calls F.linear, where modelopt's quantizers sit.
        model.set_experts_implementation("eager")  # type: ignore[operator]
        self._hooks = [
            module.register_forward_pre_hook(_counter(found[1], self._tokens))
            for name, module in model.named_modules()
            if (found := _EXPERTS.fullmatch(name))
        ]

    def close(self) -> None:
        """Removes the hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    def resume(self, earlier: Snapshot) -> None:
        """Takes over the layers that an interrupted layerwise calibration has finished.

        Raises CalibrationError if that was another calibration: modelopt does not look.
        """
        now = self._metadata({}, complete=False)
        for key in ("config_sha256", "dataset", "num_samples", "sequence_length", "modelopt"):
            if (before := earlier.metadata[key]) != now[key]:
                raise CalibrationError(
                    f"the interrupted calibration has {key} {before}, this one {now[key]}. Give "
                    "what it had, or another --checkpoint-dir and --overwrite."
                )
        self._earlier = earlier

    def find_quantizers(self) -> None:
        """Looks for quantizers, and keeps those that layerwise calibration hides when done."""
        self._quantizers.update(_named_quantizers(self._model))

    def unseen_experts(self) -> list[str]:
        """Official names of experts without a token, in layers that have been calibrated."""
        layers = {to_official(layer, "hf"): tokens for layer, tokens in self._tokens.items()}
        before = self._earlier.unseen_experts if self._earlier else ()
        found = [name for name in before if name.rpartition(".")[0] not in layers]
        for layer, tokens in layers.items():
            found += [f"{layer}.{expert}" for expert in (tokens == 0).nonzero().flatten().tolist()]
        return found

    def uncalibrated(self) -> list[str]:
        """Names of enabled quantizers that calibration left without a usable amax."""
        return [name for name, quantizer in self._calibratable() if not _usable(quantizer)]

    def snapshot(self, *, complete: bool = True) -> Snapshot:
        """The amax of all enabled quantizers, copied to the CPU.

        complete=False adds the layers of the calibration that is resumed: modelopt gives them
        their amax back only at its end. Raises CalibrationError for formats whose export needs
        more than amax.
        """
        self.find_quantizers()
        amax: dict[str, torch.Tensor] = {}
        about: dict[str, dict[str, Any]] = {}
        if self._earlier is not None and not complete:
            amax.update(self._earlier.amax)
            about.update(self._earlier.quantizers)
        for name, quantizer in self._calibratable():
            if getattr(quantizer, "_pre_quant_scale", None) is not None:
                raise CalibrationError(
                    f"quantizer {name}: it smooths activations (pre_quant_scale), which the "
                    "official weights are not prepared for. Calibrate with plain nvfp4."
                )
            value = _amax(quantizer)
            if value is None:
                continue
            amax[name] = value
            about[name] = _describe(name, quantizer, value)
        return Snapshot(amax, self._metadata(about, complete=complete))

    def _calibratable(self) -> Iterator[tuple[str, Any]]:
        """Enabled quantizers whose amax is measured, not a constant as under fp8_cast."""
        for name, quantizer in self._quantizers.items():
            if quantizer.is_enabled and not getattr(quantizer, "_use_constant_amax", False):
                yield name, quantizer

    def _metadata(self, about: Mapping[str, Any], *, complete: bool) -> dict[str, str]:
        facts = self.facts
        return {
            "format": FORMAT,
            "version": VERSION,
            "modelopt": version("nvidia-modelopt"),
            "transformers": version("transformers"),
            "torch": version("torch"),
            "config_sha256": config_sha256(facts.config),
            "dataset": facts.dataset,
            "num_samples": str(facts.num_samples),
            "sequence_length": str(facts.sequence_length),
            "kv_cache": facts.kv_cache,
            "qformat": facts.qformat,
            "quantizers": json.dumps(about, separators=(",", ":"), sort_keys=True),
            "unseen_experts": json.dumps(self.unseen_experts(), separators=(",", ":")),
            "complete": "true" if complete else "false",
        }


def _named_quantizers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from modelopt.torch.quantization.nn import TensorQuantizer

    for name, module in model.named_modules():
        if isinstance(module, TensorQuantizer):
            yield name, module


def _counter(layer: str, tokens: dict[str, torch.Tensor]) -> Any:
    def count(module: Any, arguments: tuple[Any, ...]) -> None:
        quantizer = getattr(module, "gate_up_proj_input_quantizer", None)
        if quantizer is None or not getattr(quantizer, "_if_calib", False):
            return
        chosen = arguments[1].detach().flatten().cpu()  # forward(hidden, top_k_index, weights)
        seen = chosen.bincount(minlength=module.num_experts)[: module.num_experts]
        tokens[layer] = tokens[layer] + seen if layer in tokens else seen

    return count


def _amax(quantizer: Any) -> torch.Tensor | None:
    """A quantizer's amax as F32 on the CPU; of static block quantizers the one over all blocks."""
    import torch

    value = getattr(quantizer, "_global_amax", None)
    if value is None:
        value = getattr(quantizer, "_amax", None)
    if value is None or value.is_meta:
        return None
    return value.detach().to("cpu", torch.float32, copy=True)  # type: ignore[no-any-return]


def _usable(quantizer: Any) -> bool:
    value = _amax(quantizer)
    return value is not None and bool((value.isfinite() & (value > 0)).any())


def _describe(name: str, quantizer: Any, amax: torch.Tensor) -> dict[str, Any]:
    kinds = ("input", "weight", "bmm", "output")
    found: dict[str, Any] = {
        "shape": list(amax.shape),
        "kind": next((kind for kind in kinds if f"{kind}_quantizer" in name), "other"),
    }
    bits, blocks, axis = quantizer.num_bits, quantizer.block_sizes, quantizer.axis
    found["num_bits"] = list(bits) if isinstance(bits, tuple) else bits
    if blocks:
        found["block"] = blocks.get(-1)
    if axis is not None:
        found["axis"] = list(axis) if isinstance(axis, tuple) else axis
    return found
