"""Which tiling suits a call, and what its kernel is compiled for: both architectures."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from megamoe_kernel import BackendError, CompileError, native, sm90_kernel, sm100_kernel
from megamoe_kernel.buffer_sizes import MOST_RING_ROWS
from megamoe_kernel.jit.compile import KernelSource
from megamoe_kernel.jit.nvrtc import Nvrtc
from megamoe_kernel.models import MODELS, MoEShape
from megamoe_kernel.sm90_kernel import sm90_source
from megamoe_kernel.sm100_kernel import pair_tilings, sm100_source

pytest.importorskip("megamoe_kernel._native", reason="needs the compiled extension")

PRO, FLASH = MODELS["deepseek-v4-pro"], MODELS["deepseek-v4-flash"]
TINY = MoEShape(8, 2, 512, 256)
SHAPES = {"pro": PRO, "flash": FLASH, "tiny": TINY}
KERNELS: dict[str, Any] = {"sm_90a": sm90_kernel, "sm_100a": sm100_kernel}
MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148}  # of an H200, of a B200
by_kernel = pytest.mark.parametrize("arch", KERNELS)
by_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def source(
    arch: str, shape: MoEShape, tiling: Any, ring_rows: int = MOST_RING_ROWS
) -> KernelSource:
    make = {"sm_90a": sm90_source, "sm_100a": sm100_source}[arch]
    return make(shape, 8, ring_rows, tiling)


def constants(function: str, template: str) -> list[int]:
    """The arguments of a template in a kernel's type."""
    found = re.search(rf"{template}<([\d, ]+)>", function)
    assert found is not None
    return [int(value) for value in found[1].split(", ")]


def every_tiling(arch: str) -> list[Any]:
    return [*KERNELS[arch].all_tilings(), *(pair_tilings() if arch == "sm_100a" else ())]


@by_kernel
@by_shape
def test_blocks_hold_most_experts_tokens_from_1_to_8192(arch: str, shape: MoEShape) -> None:
    kernel, rows = KERNELS[arch], 0
    offered = kernel.tilings_of(shape)
    most = max(tiling.block_rows for tiling in offered)
    for tokens in range(1, 8193):
        tiling = kernel.tiling_for(shape, tokens * 8)
        assert tiling in offered
        assert tiling.block_rows >= rows or tiling == offered[0]
        rows = tiling.block_rows
        mean = tokens * 8 * shape.num_topk / shape.num_experts
        assert mean <= rows or rows == most
        if shape != TINY and tokens in (1, 8, 64, 256, 1024, 4096, 8192):
            assert mean + 1.2 * mean**0.5 <= rows or rows == most


@by_kernel
def test_no_layer_is_left_without_a_tiling(arch: str) -> None:
    for hidden in range(128, 1025, 128):
        for intermediate in range(128, 1025, 128):
            shape = MoEShape(8, 2, hidden, intermediate)
            tilings = KERNELS[arch].tilings_of(shape)
            assert KERNELS[arch].tiling_for(shape, 100_000) == tilings[-1]
            for tiling in tilings:
                rows = constants(source(arch, shape, tiling).function, "StaticShape")[-1]
                assert hidden % rows == 2 * intermediate % rows == 0


def test_narrow_layers_take_small_tasks() -> None:
    small = sm90_kernel.tiling_for(MoEShape(8, 2, 128, 128), 10_000)
    assert small == sm90_kernel.all_tilings()[0]
    assert all(t.tiles == 1 for t in sm100_kernel.tilings_of(MoEShape(8, 2, 128, 384)))


@by_kernel
def test_stages_are_as_many_as_fit(arch: str, nvrtc: Nvrtc) -> None:
    """The kernel itself refuses one stage more, in its own layout of shared memory."""
    place, most = (4, 24) if arch == "sm_90a" else (2, 8)
    template = "Sm90Tiling" if arch == "sm_90a" else "Sm100Tiling"
    for tiling in every_tiling(arch):
        if arch == "sm_90a" and tiling == sm90_kernel.all_tilings()[0]:
            continue  # for layers that no other fits
        function = source(arch, PRO, tiling).function
        numbers = constants(function, template)
        assert 3 <= numbers[place] <= most
        if numbers[place] == most:
            continue
        more = [*numbers[:place], numbers[place] + 1, *numbers[place + 1 :]]
        listed, longer = (", ".join(map(str, row)) for row in (numbers, more))
        text = source(arch, PRO, tiling).text.replace(listed, longer)
        with pytest.raises(CompileError, match="kMostShared"):
            nvrtc.compile("layer", text, "sm_90a" if arch == "sm_90a" else "sm_100a", ())


@by_kernel
@pytest.mark.parametrize("shape", [PRO, FLASH], ids=["pro", "flash"])
def test_a_wave_shares_out_among_the_multiprocessors(arch: str, shape: MoEShape) -> None:
    for tiling in every_tiling(arch):
        numbers = constants(source(arch, shape, tiling).function, "StaticShape")
        wave_blocks, weight_rows = numbers[8], numbers[9]
        clusters = MULTIPROCESSORS[arch] // tiling.ctas
        tasks = 2 * shape.intermediate // (tiling.ctas * weight_rows)

        def idle(blocks: int, tasks: int = tasks, clusters: int = clusters) -> float:
            return -blocks * tasks % clusters / (blocks * tasks)

        assert idle(wave_blocks) == min(idle(blocks) for blocks in range(1, 17))


@by_kernel
def test_a_small_ring_holds_two_waves(arch: str) -> None:
    for tiling in every_tiling(arch):
        numbers = constants(source(arch, PRO, tiling, ring_rows=1024).function, "StaticShape")
        block = -(-tiling.block_rows // 128) * 128 if arch == "sm_100a" else tiling.block_rows
        assert 1 <= numbers[8] <= 1024 // block // 2


@by_kernel
def test_sizes_that_no_kernel_has_are_refused(arch: str) -> None:
    kernel = KERNELS[arch]
    tiling = kernel.all_tilings()[0]
    for shape in (MoEShape(8, 2, 100, 128), MoEShape(8, 2, 128, 64)):
        with pytest.raises(ValueError, match="no tiling fits"):
            kernel.tiling_for(shape, 5)
    for wrong in (replace(tiling, block_rows=0), replace(tiling, tiles=0), replace(tiling, ctas=0)):
        with pytest.raises(ValueError, match="not positive"):
            source(arch, PRO, wrong)
    with pytest.raises(ValueError, match="not positive"):
        source(arch, MoEShape(8, 0, 128, 128), tiling)
    with pytest.raises(TypeError):
        source(arch, PRO, replace(tiling, block_rows=2**40))


@by_kernel
def test_without_the_extension_no_kernel_is_chosen(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiling = KERNELS[arch].all_tilings()[0]
    monkeypatch.setattr(native, "import_error", "No module named '_native'")
    with pytest.raises(BackendError, match=r"Reinstall it with CMake and a C\+\+20 compiler"):
        KERNELS[arch].tilings_of(PRO)
    with pytest.raises(BackendError, match="compiled extension"):
        source(arch, PRO, tiling)
