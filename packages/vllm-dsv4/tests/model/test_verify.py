"""``verify_load``: what arrives wrongly is named, whoever made the mistake."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_dsv4.testing import RemoteError

from .conftest import Vllm
from .wide import make_wide

VERIFY = {"verify_load": True}
MEGA: dict[str, Any] = {"moe_backend": "deep_gemm_mega_moe", "expert_parallel": True}


@pytest.mark.parametrize("variant", ["full", "all-nvfp4", "two-scales", "wo-a-bf16"])
@pytest.mark.parametrize("dtype", ["stored", "fp8", "bf16"])
def test_a_right_load_passes(vllm: Vllm, checkpoint: Any, variant: str, dtype: str) -> None:
    options = {**VERIFY, "attn_dtype": dtype, "shared_dtype": dtype, "indexer_dtype": dtype}
    before = len(vllm.harness.log())
    vllm.load(checkpoint(variant), options=options)
    assert "verified: 58 linears hold what is stored" in vllm.harness.log()[before:]


def test_every_rank_and_the_draft_pass(
    vllm: Vllm, tmp_path: Path, checkpoints: ModuleType, checkpoint: Any
) -> None:
    folder = make_wide(tmp_path, checkpoints)
    vllm.call("load_ranks", folder=folder, ranks=[0, 1, 7], tp=8, options=VERIFY)
    vllm.call("load_ranks", folder=checkpoint("full"), ranks=[0, 1], tp=2, mtp=True, options=VERIFY)
    for mtp in (False, True):
        vllm.call(
            "load_ranks", folder=checkpoint("full"), ranks=[1], tp=2, mtp=mtp, options=VERIFY,
            **MEGA,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "verified", "rest"),
    [
        ("full", 58, "1 linears, head"),
        ("two-scales", 58, "1 linears, head"),
        # Fused FP8 shared experts are in a layout that is not read back.
        ("experts", 46, "13 linears, head, layers.0.ffn.shared_experts.w1"),
    ],
)
def test_megamoes_experts_are_read_back_from_the_kernels_layout(
    vllm: Vllm, checkpoint: Any, variant: str, verified: int, rest: str
) -> None:
    before = len(vllm.harness.log())
    vllm.load(checkpoint(variant), options=VERIFY, **MEGA)
    log = vllm.harness.log()[before:]
    assert f"verified: {verified} linears hold what is stored" in log
    assert f"not verified: {rest}" in log


@pytest.mark.parametrize(
    ("damage", "layer"),
    [
        (
            "an expert's nibbles swapped",
            r"layers\.1\.ffn\.experts\.0\.w3 .*layers\.1\.ffn\.experts",
        ),
        ("an expert's scale rows turned", r"layers\.1\.ffn\.experts\.0\.w2 "),
        ("an expert's gate rows turned", r"layers\.1\.ffn\.experts\.0\.w1 "),
    ],
)
@pytest.mark.parametrize("arguments", [{}, MEGA], ids=["own kernel", "MegaMoE"])
def test_a_wrong_expert_is_named(
    vllm: Vllm, checkpoint: Any, damage: str, layer: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(RemoteError, match=layer) as caught:
        vllm.call(
            "load_damaged", damage=damage, folder=checkpoint("full"), options=VERIFY, **arguments
        )
    assert caught.value.kind == "LoadError"


@pytest.mark.parametrize(
    ("damage", "layer"),
    [
        ("ones for scales", r"layers\.0\.attn\.wo_a .*wo_a\)"),
        ("no common scale", r"layers\.[0-3]\.(attn\.w(q_a|kv)|ffn\.shared_experts\.w[13]) "),
        ("no weight_scale_2", r"layers\.[123]\.attn\.(indexer\.)?compressor\.w(kv|gate) "),
        ("nibbles swapped", r"layers\.[0-3]\.attn\.wq_b "),
        ("not written", r"layers\.2\.attn\.wo_b .*model\.layers\.2\.attn\.wo_b"),
        ("input_scale multiplied in", r"layers\.[0-3]\.attn\.wq_b "),
    ],
)
def test_a_wrong_load_is_named(vllm: Vllm, checkpoint: Any, damage: str, layer: str) -> None:
    with pytest.raises(RemoteError, match=layer) as caught:
        vllm.call("load_damaged", damage=damage, folder=checkpoint("two-scales"), options=VERIFY)
    assert caught.value.kind == "LoadError"
    assert "is not what the checkpoint holds" in caught.value.message


def test_unverified_it_would_have_passed(vllm: Vllm, checkpoint: Any) -> None:
    vllm.call("load_damaged", damage="ones for scales", folder=checkpoint("two-scales"))


def test_a_parameter_that_never_came_is_named_even_unverified(vllm: Vllm, checkpoint: Any) -> None:
    with pytest.raises(RemoteError, match=r"1 parameters were not in the checkpoint: .*attn_sink"):
        vllm.call("load_damaged", damage="a tensor lost", folder=checkpoint("full"))
