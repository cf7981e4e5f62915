"""Which tiling suits a call, and what its kernel is compiled for: both architectures."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from megamoe_kernel import (
    BackendError,
    CompileError,
    ShapeError,
    native,
    sm90_kernel,
    sm100_kernel,
)
from megamoe_kernel.buffer_sizes import MOST_RING_ROWS
from megamoe_kernel.jit.compile import KernelSource
from megamoe_kernel.jit.nvrtc import Nvrtc
from megamoe_kernel.jit.targets import Target
from megamoe_kernel.kernels import kernels_of
from megamoe_kernel.models import MODELS, MoEShape
from megamoe_kernel.reference import Activation
from megamoe_kernel.scalar_kernel import scalar_source
from megamoe_kernel.sm90_kernel import sm90_source
from megamoe_kernel.sm100_kernel import pair_tilings, sm100_source

pytest.importorskip("megamoe_kernel._native", reason="needs the compiled extension")

PRO, FLASH = MODELS["deepseek-v4-pro"], MODELS["deepseek-v4-flash"]
TINY = MoEShape(8, 2, 512, 256)
SHAPES = {"pro": PRO, "flash": FLASH, "tiny": TINY}
KERNELS: dict[str, Any] = {"sm_90a": sm90_kernel, "sm_100a": sm100_kernel}
SOURCES: dict[str, Any] = {"sm_90a": sm90_source, "sm_100a": sm100_source}
by_kernel = pytest.mark.parametrize("arch", KERNELS)
by_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def source(
    arch: str, shape: MoEShape, tiling: Any, ring_rows: int = MOST_RING_ROWS
) -> KernelSource:
    made: KernelSource = SOURCES[arch](shape, 8, ring_rows, tiling)
    return made


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
                rows *= tiling.ctas
                assert hidden % rows == 2 * intermediate % rows == 0


def test_narrow_layers_take_small_tasks() -> None:
    small = sm90_kernel.tiling_for(MoEShape(8, 2, 128, 128), 10_000)
    assert small == sm90_kernel.all_tilings()[0]
    assert all(t.tiles == 1 for t in sm100_kernel.tilings_of(MoEShape(8, 2, 128, 384)))


@by_kernel
def test_stages_are_as_many_as_fit(arch: str, nvrtc: Nvrtc) -> None:
    """The kernel itself refuses one stage more, in its own layout of shared memory."""
    place, most = (5, 24) if arch == "sm_90a" else (2, 8)
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


@pytest.mark.parametrize("shape", [PRO, FLASH], ids=["pro", "flash"])
def test_a_wave_shares_out_among_ctas_that_take_turns(shape: MoEShape) -> None:
    for tiling in every_tiling("sm_100a"):
        numbers = constants(source("sm_100a", shape, tiling).function, "StaticShape")
        wave_blocks, weight_rows = numbers[8], numbers[9]
        clusters = 148 // tiling.ctas
        tasks = 2 * shape.intermediate // (tiling.ctas * weight_rows)

        def idle(blocks: int, tasks: int = tasks, clusters: int = clusters) -> float:
            return -blocks * tasks % clusters / (blocks * tasks)

        assert idle(wave_blocks) == min(idle(blocks) for blocks in range(1, 17))


def test_a_wave_is_as_large_as_it_may_be_where_ctas_draw() -> None:
    for tiling in every_tiling("sm_90a"):
        for ring_rows, blocks in ((1 << 16, 16), (7 * tiling.block_rows, 3)):
            function = source("sm_90a", PRO, tiling, ring_rows=ring_rows).function
            assert constants(function, "StaticShape")[8] == blocks


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
        assert kernel.tilings_of(shape) == []
        with pytest.raises(ShapeError, match="multiples of 128"):
            kernel.tiling_for(shape, 5)
    for change in ({"block_rows": 0}, {"tiles": 0}, {"block_rows": -16}, {"tiles": 1 << 25}):
        with pytest.raises(ShapeError, match="no kernel is for these sizes"):
            source(arch, PRO, replace(tiling, **change))
    for ctas in (-1, 0, 3):
        with pytest.raises(ShapeError, match="one CTA or two"):
            source(arch, PRO, replace(tiling, ctas=ctas))
    for wrong in (replace(PRO, num_experts=0), replace(PRO, num_topk=0), replace(PRO, hidden=100)):
        with pytest.raises(ShapeError, match="no kernel is for these sizes"):
            source(arch, wrong, tiling)
    for ring_rows in (-1, 0, 16):
        with pytest.raises(ShapeError, match="two waves of blocks"):
            source(arch, PRO, tiling, ring_rows)
    with pytest.raises(ShapeError, match="at most one shared expert"):
        SOURCES[arch](PRO, 8, MOST_RING_ROWS, tiling, 2)
    odd = MoEShape(8, 2, 512, 384)  # three tiles of K in L2
    for unfit in (t for t in kernel.all_tilings() if arch == "sm_90a" and t.depth == 2):
        with pytest.raises(ShapeError, match="the tiling does not divide the layer"):
            source(arch, odd, unfit)
    many = MoEShape(8192, 32, 7168, 3072)
    with pytest.raises(ShapeError, match="no shared memory for stages"):
        source(arch, many, kernel.tilings_of(many)[-1])


@by_kernel
def test_every_number_of_a_kernel(arch: str) -> None:
    """But for stages, waves and sm_100a's warps and registers they are the tiling's and layer's."""
    for tiling in every_tiling(arch):
        made = SOURCES[arch](PRO, 8, 4096, tiling, 1)
        tile = constants(made.function, "Sm90Tiling" if arch == "sm_90a" else "Sm100Tiling")
        shape = constants(made.function, "StaticShape")
        if arch == "sm_90a":
            threads = 128 * (1 + tiling.groups * tiling.split)
            rows = 64 * tiling.groups * tiling.tiles
            own = (
                tiling.groups, tiling.split, tiling.depth, tiling.tiles, tiling.least,
                tile[5], tiling.producer_registers, tiling.consumer_registers, tiling.ctas,
            )  # fmt: skip
        else:
            threads, rows = 512, 128 * tiling.tiles
            own = (tiling.block_rows, tiling.tiles, tile[2], 5, 2, tiling.ctas, 80, 176)
        assert tile == list(own)
        assert made.threads == threads
        assert shape == [8, 48, 1, 6, 7168, 3072, 4096, tiling.block_rows, shape[8], rows]


def test_every_tiling_of_a_layer_is_among_its_kernels() -> None:
    targets: tuple[Target, ...] = ("sm_90a", "sm_100a")
    for arch in targets:
        functions = [made.function for made in kernels_of(PRO, 8, arch)]
        for tiling in KERNELS[arch].tilings_of(PRO):
            assert source(arch, PRO, tiling).function in functions


@pytest.mark.parametrize(("activation", "wave"), [("nvfp4", 2), ("bf16", 16)])
def test_the_scalar_kernel(activation: Activation, wave: int) -> None:
    """A block of 16 tokens takes 128 rows of the ring where it has block scales, else 16."""
    function = scalar_source(TINY, activation, 2, 512).function
    assert constants(function, "StaticShape") == [2, 4, 0, 2, 512, 256, 512, 16, wave, 128]


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
