"""The fast forward pass computes what transformers' eager one does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modelopt_v4_patches.quality import forward, text
from modelopt_v4_patches.quality.evaluate import load_model

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and torch's own
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def models(tiny: Path) -> tuple[nn.Module, nn.Module]:
    return load_model(tiny), load_model(tiny, fast=False)


@pytest.mark.parametrize("length", [1, 127, 256, 700], ids=lambda n: f"{n} tokens")
@pytest.mark.parametrize("topk", [16, 512], ids=lambda k: f"top {k}")
def test_logits_are_those_of_eager_transformers(
    models: tuple[nn.Module, nn.Module], length: int, topk: int
) -> None:
    # With 16 entries to choose the indexer leaves something out from token 67 on.
    module: Any
    for model in models:
        for module in model.modules():
            if hasattr(module, "index_topk"):
                module.index_topk = topk
                if hasattr(module.scorer, "topk"):
                    module.scorer.topk = topk
    ids = torch.from_numpy(text.held_out_windows(2, 1024))[:, :length]
    with torch.inference_mode():
        fast = models[0](ids, attention_mask=forward.no_mask(ids), use_cache=False).logits
        eager = models[1](ids, use_cache=False).logits
    assert fast.shape == (2, length, 512)
    torch.testing.assert_close(fast, eager, rtol=0, atol=2e-4)


def test_what_the_indexer_leaves_out_is_seen(models: tuple[nn.Module, nn.Module]) -> None:
    """The comparison above would notice an indexer that chooses at random."""
    ids = torch.from_numpy(text.held_out_windows(1, 1024))[:, :700]
    with torch.inference_mode():
        results = []
        for topk in (16, 512):
            module: Any
            for module in models[0].modules():
                if hasattr(module, "index_topk"):
                    module.index_topk = module.scorer.topk = topk
            results.append(models[0](ids, attention_mask=forward.no_mask(ids), use_cache=False))
    assert (results[0].logits - results[1].logits).abs().max() > 0.1
