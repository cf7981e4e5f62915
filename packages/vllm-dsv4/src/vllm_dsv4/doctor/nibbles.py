"""Whether nibbles are swapped in all packed weights alike, from columns of what is not packed.

Matrices that read the same input are large in the same columns: training makes up for loud
channels in all of them. Swapped nibbles exchange neighbouring columns, so packed weights then go
against the BF16 and FP8 ones beside them. One pair of matrices shows little; all of them together
do, if training left any trace. (In the trained tiny model the mean correlation is +0.2 to +0.6.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nvfp4_codec.checkpoint.contrast import can_contrast, contrast
from nvfp4_codec.checkpoint.deepseek_v4.stored import Model
from nvfp4_codec.checkpoint.families import Family
from nvfp4_codec.checkpoint.header import shown
from nvfp4_codec.checkpoint.structure import problems
from nvfp4_codec.checkpoint.verify import Finding

#: Matrices of a block that read the same input.
_SAME_INPUT: Final = (
    ("attn.wq_a", "attn.wkv", "attn.compressor.wkv", "attn.compressor.wgate",
     "attn.indexer.weights_proj", "attn.indexer.compressor.wkv", "attn.indexer.compressor.wgate"),
    ("attn.wq_b", "attn.indexer.wq_b"),
    ("ffn.shared_experts.w1", "ffn.shared_experts.w3",
     *(f"ffn.experts.{expert}.{name}" for expert in range(4) for name in ("w1", "w3"))),
)  # fmt: skip
_MOST_BLOCKS: Final = 6
#: Values of one matrix that are looked at.
_SAMPLE: Final = 1 << 20
#: From here on the sum of correlations is no accident: their spread is 1 if there is no relation.
_SIGNIFICANT: Final = 6.0
_LEAST_MEAN: Final = 0.1


class Evidence(NamedTuple):
    """Correlations of packed with unpacked columns: their number, mean, and sum in deviations."""

    pairs: int
    mean: float
    deviations: float

    @property
    def swapped(self) -> bool:
        """Whether the columns go against each other beyond accident."""
        return self.deviations < -_SIGNIFICANT and self.mean < -_LEAST_MEAN

    @property
    def sound(self) -> bool:
        """Whether they agree beyond accident."""
        return self.deviations > _SIGNIFICANT and self.mean > _LEAST_MEAN


NO_EVIDENCE: Final = Evidence(0, 0.0, 0.0)


def nibble_evidence(model: Model) -> Evidence:
    """Correlations over a few blocks that are spread over the model."""
    found: list[tuple[float, int]] = []
    for block in _blocks(model):
        for group in _SAME_INPUT:
            families = [family for name in group if (family := _family(model, f"{block}.{name}"))]
            packed = [f for f in families if f.kind == "nvfp4"]
            others = [f for f in families if f.kind != "nvfp4"]
            if packed and others:
                found += _correlations(model, packed, others)
    if not found:
        return NO_EVIDENCE
    scores = [math.atanh(max(min(r, 0.999), -0.999)) * math.sqrt(n) for r, n in found]
    mean = sum(r for r, _ in found) / len(found)
    return Evidence(len(found), mean, sum(scores) / math.sqrt(len(scores)))


def look_at_nibbles(model: Model, evidence: Evidence) -> list[Finding]:
    """The finding that packed columns are exchanged throughout, if the evidence says so."""
    if not evidence.swapped:
        return []
    packed = [s for s in model.tensors.values() if s.layout == "nvfp4"]
    first = packed[0].first
    return [
        Finding(
            "swapped-nibbles",
            shown(first.name),
            shown(first.file),
            f"neighbouring columns exchanged between packed and unpacked matrices of the same "
            f"input, here and in the others of {len(packed)} packed ones: mean correlation "
            f"{evidence.mean:.2f} over {evidence.pairs} pairs",
            "the same columns large in all of them",
            "Even k belongs in the low nibble: pack the weights again. --reference makes it "
            "certain.",
            "medium",
        )
    ]


def _blocks(model: Model) -> list[str]:
    blocks = [f"{block.kind}.{block.index}" for block in model.schema.config.blocks]
    count = min(_MOST_BLOCKS, len(blocks))
    return [blocks[i * len(blocks) // count] for i in range(count)]


def _family(model: Model, module: str) -> Family | None:
    stored = model.tensors.get(f"{module}.weight")
    family = None if stored is None else model.families.get(stored.first.name)
    if family is None or problems(family) or not can_contrast(family):
        return None
    return family


def _correlations(
    model: Model, packed: list[Family], others: list[Family]
) -> Iterator[tuple[float, int]]:
    profiles = {f.module: contrast(model.checkpoint, f, _SAMPLE) for f in (*packed, *others)}
    for a, b in product(packed, others):
        r = _correlation(profiles[a.module], profiles[b.module])
        if r is not None:
            yield r, profiles[a.module].size


def _correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float | None:
    if a.size != b.size or a.size < 32 or a.std() == 0 or b.std() == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])
