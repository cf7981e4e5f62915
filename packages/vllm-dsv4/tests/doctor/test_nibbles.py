"""Nibble order: told by columns where training left a trace, certain against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_dsv4.doctor import examine

EXPERT = "layers.1.ffn.experts.1"


def swap(content: Any, *modules: str) -> None:
    """Exchanges the nibbles of every packed weight, or of these modules."""
    for name, tensor in list(content.tensors.items()):
        chosen = name.removesuffix(".weight") in modules if modules else True
        if tensor.dtype == torch.uint8 and name.endswith(".weight") and chosen:
            content.tensors[name] = (tensor >> 4) | (tensor << 4)


@pytest.mark.parametrize("variant", ["full", "experts", "all-nvfp4"])
def test_all_packed_weights_alike(check, variant: str):
    made = check(swap, variant)
    found = [f for f in made.findings if "mean correlation" in f.found]
    assert [(f.code, f.level, f.evidence) for f in found] == [
        ("swapped-nibbles", "suspected", "statistics")
    ]
    assert {f.code for f in made.findings} == {"swapped-nibbles"}
    assert not made.healthy


def test_all_packed_weights_alike_under_hf_names(check):
    codes = {f.code for f in check(swap, "full", "hf").findings if f.level != "handled"}
    assert codes == {"swapped-nibbles"}


def test_the_reference_names_each(check, tiny, healthy):
    made = check(swap, "experts", reference=tiny)
    assert {(f.code, f.level, f.evidence) for f in made.findings} == {
        ("swapped-nibbles", "error", "reference")
    }
    packed = sum(t.dtype == torch.uint8 for t in healthy("experts").tensors.values())
    assert len(made.findings) == packed


def test_one_of_a_pair_shows_against_the_other(check, only):
    """Gate and up read the same input; which of the two it is needs the reference."""
    found = only(check(lambda content: swap(content, f"{EXPERT}.w3")))
    assert (found.code, found.tensor) == ("swapped-nibbles", f"{EXPERT}.w1.weight")
    assert (found.level, found.evidence) == ("suspected", "statistics")


def test_one_weight_alone_needs_the_reference(check, only, tiny):
    def change(content: Any) -> None:
        swap(content, "layers.1.ffn.experts.3.w2")

    assert check(change).findings == ()
    found = only(check(change, reference=tiny))
    assert (found.code, found.tensor) == ("swapped-nibbles", "layers.1.ffn.experts.3.w2.weight")
    assert (found.level, found.evidence) == ("error", "reference")


def test_random_weights_leave_the_question_open(healthy, writer, tmp_path):
    """Without a trace of training nothing is claimed, and the report says so."""
    content = healthy("full")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in content.tensors.items():
        if tensor.dtype == torch.uint8:
            content.tensors[name] = torch.randint(
                0, 256, tensor.shape, dtype=torch.uint8, generator=generator
            )
    made = examine(writer(content, tmp_path / "c"))
    assert made.findings == ()
    assert any("nibbles swapped in all" in question for question in made.open_questions)
