"""The Hopper kernel as the compiler sees it: every tiling, at the sizes of the models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megamoe_kernel import CompileError
from megamoe_kernel.jit.nvrtc import find_nvrtc
from megamoe_kernel.kernels import kernels_of
from megamoe_kernel.models import MODELS, MoEShape
from megamoe_kernel.sm90_kernel import all_tilings, sm90_source

pytest.importorskip("megamoe_kernel._native", reason="needs the compiled extension")

PRO = MODELS["deepseek-v4-pro"]


def test_every_tiling_is_compiled_for_a_model() -> None:
    """test_compile.py compiles them without a warning: ptxas warns where it waits after each
    wgmma, or does not heed setmaxnreg."""
    functions = {source.function for source in kernels_of(PRO, 8, "sm_90a")}
    assert all(
        any(f"Sm90Tiling<{listed}" in function for function in functions)
        for listed in (
            f"{t.groups}, {t.split}, {t.depth}, {t.tiles}, {t.least}," for t in all_tilings()
        )
    )


def test_a_shared_expert_and_several_ranks_compile() -> None:
    shape = MoEShape(8, 2, 512, 256)
    for num_ranks in (1, 2):
        source = sm90_source(shape, num_ranks, 512, all_tilings()[0], num_shared=1)
        assert find_nvrtc().compile(source.name, source.text, "sm_90a", ())


def test_registers_that_nobody_gives_up_do_not_compile() -> None:
    for change in ({"consumer_registers": 112}, {"producer_registers": 72}):
        source = sm90_source(PRO, 8, 32768, replace(all_tilings()[2], **change))
        with pytest.raises(CompileError, match="producer_registers"):
            find_nvrtc().compile(source.name, source.text, "sm_90a", ())
