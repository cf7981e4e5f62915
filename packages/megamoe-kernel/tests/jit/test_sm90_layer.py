"""The Hopper kernel as the compiler sees it: every tiling, at the sizes of the models."""

from __future__ import annotations

import logging

import pytest

from megamoe_kernel.jit.compile import KernelSource
from megamoe_kernel.jit.nvrtc import find_nvrtc
from megamoe_kernel.models import MODELS, MoEShape
from megamoe_kernel.sm90_kernel import TILINGS, sm90_source, sm90_sources, tiling_for

PRO = MODELS["deepseek-v4-pro"]


def _compile(source: KernelSource) -> bytes:
    return find_nvrtc().compile(source.name, source.text, "sm_90a", ())


@pytest.mark.parametrize("source", sm90_sources(PRO, 8, 32768), ids=lambda source: source.threads)
def test_products_overlap_with_decoding(
    source: KernelSource, caplog: pytest.LogCaptureFixture
) -> None:
    # ptxas says so where it waits after each wgmma, or does not heed setmaxnreg.
    with caplog.at_level(logging.WARNING):
        assert b"sm90_layer" in _compile(source)
    assert caplog.records == []


def test_a_shared_expert_and_several_ranks_compile() -> None:
    shape = MoEShape(8, 2, 512, 256)
    for num_ranks in (1, 2):
        assert _compile(sm90_source(shape, num_ranks, 512, TILINGS[0], num_shared=1))


def test_blocks_hold_most_experts_tokens() -> None:
    for tokens in (1, 8, 64, 256, 1024, 4096):
        mean = tokens * 8 * PRO.num_topk / PRO.num_experts
        tiling = tiling_for(PRO, tokens * 8)
        assert (
            mean + 1.2 * mean**0.5 <= tiling.block_rows
            or tiling.block_rows == TILINGS[-1].block_rows
        )


def test_narrow_layers_take_small_tasks() -> None:
    assert tiling_for(MoEShape(8, 2, 128, 128), 10_000) is TILINGS[0]
