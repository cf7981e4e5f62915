"""The changed checkpoints have the values they should have; needs no GPU and no vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from .variants import SAME_VALUES, VARIANTS

Place = Callable[[str], Path]


def values(folder: Path, checkpoints: ModuleType, oracle: ModuleType) -> dict[str, Tensor]:
    """Every linear of the main model, dequantized."""
    tensors = checkpoints.read(folder)
    modules = [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.dim() == 2 and not name.startswith("mtp.")
    ]
    return {module: oracle.values(tensors, module) for module in modules}


def different(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> set[str]:
    assert ours.keys() == theirs.keys()
    return {name for name in ours if not torch.equal(ours[name], theirs[name])}


def test_small_scales_keep_every_value(
    place: Place, checkpoints: ModuleType, oracle: ModuleType
) -> None:
    usual, small = (place(name) for name in ("full", "subnormal"))
    found = [values(folder, checkpoints, oracle) for folder in (usual, small)]
    assert different(*found) == set()
    scales = {
        name: tensor.float()
        for name, tensor in checkpoints.read(small).items()
        if name.startswith("layers.") and ".experts." in name and name.endswith("weight_scale")
    }
    least = [float(scale[scale > 0].min()) for scale in scales.values()]
    assert least.count(2.0**-9) > len(least) // 2
    assert any(float(scale.max()) == 256 for scale in scales.values())


def test_a_wide_checkpoint_computes_the_same(
    place: Place, checkpoints: ModuleType, oracle: ModuleType
) -> None:
    """Its experts' middle columns are the narrow one's, and zeros."""
    wide = values(place("wide"), checkpoints, oracle)
    for name, narrow in values(place("full"), checkpoints, oracle).items():
        if ".ffn.experts." not in name and "shared_experts" not in name:
            assert torch.equal(wide[name], narrow), name
            continue
        dim = 1 if name.endswith("w2") else 0
        quarters = wide[name].chunk(4, dim)
        assert torch.equal(torch.cat([quarters[0], quarters[2]], dim), narrow), name
        assert not quarters[1].any(), name
        assert not quarters[3].any(), name


def test_the_control_differs_in_one_expert(
    place: Place, checkpoints: ModuleType, oracle: ModuleType
) -> None:
    found = [values(place(name), checkpoints, oracle) for name in ("full", "swapped")]
    assert different(*found) == {f"layers.2.ffn.experts.0.w{i}" for i in (1, 2, 3)}


def test_attention_counts_four_times_in_the_heavy_one(
    place: Place, checkpoints: ModuleType, oracle: ModuleType
) -> None:
    full, heavy = (values(place(name), checkpoints, oracle) for name in ("full", "heavy"))
    changed = different(heavy, full)
    assert changed == {f"layers.{i}.attn.wo_b" for i in range(4)}
    assert all(torch.equal(heavy[name], 4 * full[name]) for name in changed)


@pytest.mark.parametrize("name", SAME_VALUES)
def test_what_stands_for_another_is_a_variant_of_it(name: str) -> None:
    assert SAME_VALUES[name] in {*VARIANTS, "official"}
