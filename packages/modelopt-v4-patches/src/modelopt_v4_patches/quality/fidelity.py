"""How far a checkpoint's weights are from the official ones, by role, in numbers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nvfp4_codec.checkpoint import Checkpoint
from nvfp4_codec.checkpoint.values import is_numeric, load_values
from nvfp4_codec.schemas.deepseek_v4 import Role, parse
from nvfp4_codec.sqnr import sqnr_of_pieces

from .evaluate import ReadWeight, official_families

#: The columns of tables; roles that are not here are kept as they are by everyone.
PARTS: Mapping[Role, str] = {
    "routed_expert": "experts",
    "shared_expert": "shared",
    "wq_a": "attn",
    "wq_b": "attn",
    "wkv": "attn",
    "wo_b": "attn",
    "wo_a": "wo_a",
    "indexer_wq_b": "indexer",
    "indexer_weights": "indexer",
    "compressor": "compressor",
}
MTP = "MTP blocks"


@dataclass(frozen=True)
class Fidelity:
    """A checkpoint's weights compared with the official ones.

    sqnr: dB by part of the main model, over all of its weights, and for `MTP`, over those that are
    there; inf where they are equal. nvfp4: official names of the modules that are stored so.
    quantized: whether any weight of the main model is stored in a format that quantizes activations
    too. digest: SHA-256 of the main model's values. expert_gain: <w, official> / <official,
    official> of its experts, below 1 where rounding shrinks them.
    """

    sqnr: Mapping[str, float]
    nvfp4: frozenset[str]
    quantized: bool
    digest: str
    expert_gain: float

    def error(self, part: str) -> float:
        """The part's relative error, ||w - official|| / ||official||; 0.0 only if all are equal."""
        return float(10 ** (-self.sqnr.get(part, math.inf) / 20))


def compare_weights(folder: Path, official: Path, read: ReadWeight = load_values) -> Fidelity:
    """Compare every weight, dequantized by ``read``, with the official one, dequantized rightly."""
    pieces: dict[str, list[tuple[Tensor, Tensor]]] = {}
    digest = hashlib.sha256()
    nvfp4, quantized = set(), False
    with Checkpoint.open(folder) as ours, Checkpoint.open(official) as theirs:
        reference = official_families(theirs)
        for name, family in sorted(official_families(ours).items()):
            in_main_model = not name.startswith("mtp.")
            if is_numeric(family):
                values = read(ours, family)
                parsed = parse(name, "official")
                assert parsed is not None
                assert parsed.template is not None
                role = parsed.template.row.role
                part = PARTS.get(role, "others") if in_main_model else MTP
                pair = (load_values(theirs, reference[name]), values)
                pieces.setdefault(part, []).append(pair)
            else:
                values = ours.tensor(family.weight.name)
            if in_main_model:
                digest.update(name.encode() + values.contiguous().view(torch.uint8).numpy().data)
                quantized = quantized or family.kind != "plain"
            if family.kind == "nvfp4":
                nvfp4.add(name.removesuffix(".weight"))
    sqnr = {part: sqnr_of_pieces(pairs) for part, pairs in pieces.items()}
    gain = _gain(pieces["experts"])
    return Fidelity(sqnr, frozenset(nvfp4), quantized, digest.hexdigest(), gain)


def _gain(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    product = sum(float((official.double() * values).sum()) for official, values in pairs)
    return product / sum(float(official.double().square().sum()) for official, _ in pairs)
