"""The checkpoints that are served: exports of the trained tiny model, some changed on purpose.

Except for `swapped`, a change keeps every value of the model, or multiplies it by a power of two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .damage import EMPHASIS

Tensors = dict[str, Tensor]
Edit = Callable[[Tensors], None]

#: Of the layer after the two that are changed alike in `subnormal`.
_SWAPPED = "layers.2.ffn.experts.0."
_EXPERT = re.compile(r"\.ffn\.(experts\.[0-9]+|shared_experts)\.w[123]\.weight(_scale)?$")
_SMALLEST = -9  # the exponent of E4M3's least subnormal


@dataclass(frozen=True)
class Variant:
    """An export, changed by ``edit`` and then renamed.

    export, scheme: as in checkpoints.py. config: what becomes of config.json's entries.
    """

    export: str = "full"
    scheme: str = "official"
    edit: Edit | None = None
    config: Mapping[str, Any] | None = None

    def make(self, folder: Path, checkpoints: ModuleType) -> Path:
        """Writes the checkpoint to the new folder. checkpoints: the maker of exports."""
        official = folder if self.scheme == "official" else folder.with_name(f"{folder.name}-0")
        checkpoints.make(official, self.export)
        if self.edit is not None:
            checkpoints.change(official, self.edit)
        if self.config is not None:
            checkpoints.change_config(official, lambda config: config.update(self.config))
        if folder != official:
            checkpoints.rename(official, folder, self.scheme)
        return folder


def emphasize(tensors: Tensors) -> None:
    """What attention adds to the residual stream, `EMPHASIS` times."""
    for name, tensor in tensors.items():
        if re.fullmatch(r"layers\.[0-9]+\.attn\.wo_b\.weight_scale_2", name):
            tensor.mul_(EMPHASIS)


def swap_nibbles(tensors: Tensors) -> None:
    """Of one expert of one layer: what comes of the other order of two codes in a byte."""
    for name, tensor in tensors.items():
        if name.startswith(_SWAPPED) and name.endswith(".weight"):
            tensor.copy_((tensor << 4) | (tensor >> 4))


def subnormal(tensors: Tensors) -> None:
    """Block scales of experts as small as E4M3 allows, weight_scale_2 as much larger.

    Every other expert of layers 0 and 1, so that a factor common to a layer's experts cannot
    help, and all experts of the others. The pair w1 and w3 moves together.
    """
    for module in [name.removesuffix(".weight_scale_2") for name in tensors]:
        found = re.fullmatch(r"layers\.([0-9]+)\.ffn\.experts\.([0-9]+)\.w([12])", module)
        if found is None or (int(found[1]) < 2 and int(found[2]) % 2):
            continue
        modules = [module] if found[3] == "2" else [module, module.removesuffix("1") + "3"]
        scales = [tensors[f"{name}.weight_scale"].float() for name in modules]
        assert all(torch.equal(scale, scale.log2().round().exp2()) for scale in scales), module
        least = min(float(scale[scale > 0].min().log2()) for scale in scales)
        factor = 2.0 ** (_SMALLEST - least)
        for name, scale in zip(modules, scales, strict=True):
            tensors[f"{name}.weight_scale"] = (scale * factor).to(torch.float8_e4m3fn)
            tensors[f"{name}.weight_scale_2"] = tensors[f"{name}.weight_scale_2"] / factor


def widen(tensors: Tensors) -> None:
    """Experts twice as wide, half of it zero: each of two ranks gets whole blocks of 128."""
    for name, tensor in tensors.items():
        if not _EXPERT.search(name):
            continue
        dim = 1 if ".w2." in name else 0
        raw = tensor.view(torch.uint8)
        halves = [torch.cat([half, torch.zeros_like(half)], dim) for half in raw.chunk(2, dim)]
        tensors[name] = torch.cat(halves, dim).view(tensor.dtype)


VARIANTS: Mapping[str, Variant] = {
    "experts": Variant("experts"),
    "full": Variant(),
    "swapped": Variant(edit=swap_nibbles),
    "subnormal": Variant(edit=subnormal),
    "heavy": Variant(edit=emphasize),
    "heavy-hf": Variant("all-nvfp4", "hf", edit=emphasize),
    "wide": Variant("no-mtp", edit=widen, config={"moe_intermediate_size": 256}),
}
#: Whose values a variant has, where they are another's.
SAME_VALUES: Mapping[str, str] = {
    "experts": "official", "swapped": "full", "subnormal": "full", "wide": "full",
}  # fmt: skip
