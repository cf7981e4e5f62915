"""The kernel for Blackwell as the compiler makes it: its machine code has what it is meant to have.

Never run on a GPU. UE4M3 or UE8M0, a bit of the instruction's descriptor, does not show here; see
test_sm100_descriptors.py.
"""

from __future__ import annotations

import ctypes
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from megamoe_kernel import CompileError, sm100_kernel
from megamoe_kernel.buffer_layout import INCLUDE
from megamoe_kernel.buffer_sizes import MOST_RING_ROWS
from megamoe_kernel.jit.cache import CubinCache
from megamoe_kernel.jit.compile import KernelSource, compile_kernel
from megamoe_kernel.jit.nvrtc import Nvrtc
from megamoe_kernel.jit.targets import Target
from megamoe_kernel.launch import SHARED_BYTES
from megamoe_kernel.models import MODELS, MoEShape
from megamoe_kernel.sm100_kernel import (
    PAIR_TILINGS,
    TARGETS,
    TILINGS,
    Tiling,
    _arguments_type,
    sm100_source,
    tiling_for,
    tilings_of,
)

PRO, FLASH = MODELS["deepseek-v4-pro"], MODELS["deepseek-v4-flash"]
TINY = MoEShape(8, 2, 512, 256)
#: A stack frame of the one word to which tcgen05's allocation goes on its way; no spilled loops.
MOST_STACK_BYTES = 16
THREADS, MOST_REGISTERS = 512, 128
PARAMETER_AT = 0x380  # in constant memory


@dataclass(frozen=True)
class Machine:
    """A kernel's machine code: how often each instruction is there; registers; stack and
    parameter in bytes.
    """

    counts: Counter[str]
    registers: int
    stack: int
    parameter: int

    def count(self, pattern: str) -> int:
        found = (n for name, n in self.counts.items() if re.fullmatch(pattern, name))
        return sum(found)


def disassemble(cubin: bytes, run_tool: Callable[..., str]) -> Machine:
    code = run_tool("nvdisasm", cubin, "-c")
    usage = run_tool("cuobjdump", cubin, "-res-usage")
    found = re.search(r"Function sm100_layer:\s+REG:(\d+) STACK:(\d+).*CONSTANT\[0\]:(\d+)", usage)
    assert found is not None, usage
    names = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.a-z]*)", code, re.M)
    parameter = int(found[3]) - PARAMETER_AT
    return Machine(Counter(names), int(found[1]), int(found[2]), parameter)


def compiled(nvrtc: Nvrtc, source: KernelSource, target: Target) -> bytes:
    return nvrtc.compile(source.name, source.text, target, ())


def check(machine: Machine, tiling: Tiling) -> None:
    # A stage: four steps of K, in each a product for each tile of weights. sm_103a's disassembly
    # names the blocks' size, the others' the number of scales.
    pair = r"\.2CTA" if tiling.ctas == 2 else ""
    products = machine.count(rf"UTCOMMA{pair}\.(4X|BLOCK16)")
    assert products == 4 * tiling.tiles
    atoms = 4 * (tiling.tiles + tiling.scale_rows // 128)
    assert machine.count(rf"UTCCP\.T\.S{pair}\.4(x32dp128bit)?") == atoms
    # Neither the kind with UE8M0 scales over 32 nor any other.
    assert machine.count(r"UT[A-Z]*MMA.*") == products
    assert machine.count(r"UTMALDG\.2D.*") >= 2
    assert machine.count(r"UBLKCP.*") >= 2
    # Scales of tokens, to both CTAs at once; nothing else, and nobody else, copies to another CTA.
    assert machine.count(r"(UBLKCP|UTMALDG).*MULTICAST.*") == (tiling.ctas == 2)
    assert machine.count(r"LDTM\.16dp256bit\.x2") == 4  # two in each layer's epilogue
    assert machine.count(r"UTCBAR.*") == 2  # a stage is free, sums are complete
    assert machine.count(r"USETMAXREG.*") == 2
    assert machine.registers <= MOST_REGISTERS
    assert machine.stack <= MOST_STACK_BYTES


#: Of sm_100a those of Pro and pairs, of the others one of each kind; the rest in the long run.
CHOSEN: dict[Target, Sequence[Tiling]] = {
    "sm_100a": (*tilings_of(PRO), *PAIR_TILINGS),
    "sm_100f": (tiling_for(PRO, 8 * 64), PAIR_TILINGS[-1]),
    "sm_103a": (tiling_for(PRO, 8 * 64), PAIR_TILINGS[-1]),
}


@pytest.mark.parametrize(
    ("target", "tiling"),
    [
        pytest.param(
            target,
            tiling,
            marks=[] if tiling in CHOSEN[target] else pytest.mark.full,
            id=f"{target}-{tiling.ctas} x {tiling.tiles} x {tiling.block_rows}",
        )
        for target in TARGETS
        for tiling in (*TILINGS, *PAIR_TILINGS)
    ],
)
def test_the_machine_code_of_every_target_and_tiling(
    target: Target,
    tiling: Tiling,
    nvrtc: Nvrtc,
    shared_cache: CubinCache,
    run_tool: Callable[..., str],
    emulator_library: ctypes.CDLL,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = sm100_source(PRO, 8, MOST_RING_ROWS, tiling)
    with caplog.at_level(logging.WARNING):
        cubin = compile_kernel(source, target, cache=shared_cache).cubin
    assert caplog.messages == []
    machine = disassemble(cubin, run_tool)
    check(machine, tiling)
    # NVRTC and g++ agree on the argument's size; Python on its fields, below.
    offsets = (ctypes.c_int64 * 32)()
    assert machine.parameter == offsets[emulator_library.megamoe_sm100_arguments(offsets) - 1]


def test_other_layers_compile(nvrtc: Nvrtc) -> None:
    for source in (
        sm100_source(TINY, 2, 1024, TILINGS[0], num_shared=1),
        sm100_source(PRO, 2, 32768, TILINGS[3]),  # little shared memory is left beside the words
        sm100_source(MoEShape(8, 2, 128, 128), 1, 512, tilings_of(MoEShape(8, 2, 128, 128))[0]),
    ):
        assert b"sm100_layer" in compiled(nvrtc, source, "sm_100a")


def test_sizes_that_do_not_fit_do_not_compile(nvrtc: Nvrtc) -> None:
    # Two accumulators of 2 x 128 columns leave no room for scales in tensor memory.
    with pytest.raises(CompileError, match="two accumulators and the scales do not fit"):
        compiled(nvrtc, sm100_source(TINY, 1, 1024, Tiling(1, 128, 2)), "sm_100a")


def test_a_pair_whose_rows_do_not_divide_the_layer_does_not_compile(nvrtc: Nvrtc) -> None:
    source = sm100_source(MoEShape(8, 2, 384, 128), 1, 32768, PAIR_TILINGS[0])
    with pytest.raises(CompileError, match="shares_out"):
        compiled(nvrtc, source, "sm_100a")


def test_blocks_hold_most_experts_tokens() -> None:
    for shape in (PRO, FLASH):
        for tokens in (1, 8, 64, 256, 1024, 8192):
            mean = tokens * 8 * shape.num_topk / shape.num_experts
            tiling = tiling_for(shape, tokens * 8)
            assert mean + 1.2 * mean**0.5 <= tiling.block_rows or tiling is TILINGS[-1]


def test_every_tiling_has_stages_enough() -> None:
    for shape in (PRO, FLASH, TINY):
        for tiling in tilings_of(shape):
            assert tiling.stages(shape.num_experts, shape.num_experts) >= 3
    assert all(tiling.tiles == 1 for tiling in tilings_of(MoEShape(8, 2, 128, 384)))


@pytest.mark.parametrize("shape", [PRO, FLASH], ids=["pro", "flash"])
@pytest.mark.parametrize("tiling", [*TILINGS, *PAIR_TILINGS], ids=str)
def test_a_wave_shares_out_among_the_multiprocessors_of_a_b200(
    tiling: Tiling, shape: MoEShape
) -> None:
    found = re.search(r"StaticShape<([\d, ]+)>", sm100_source(shape, 8, 32768, tiling).function)
    assert found is not None
    wave_blocks = int(found[1].split(", ")[8])
    clusters = 148 // tiling.ctas
    tasks = 2 * shape.intermediate // (tiling.ctas * tiling.weight_rows)

    def idle(blocks: int) -> float:
        return -blocks * tasks % clusters / (blocks * tasks)

    assert idle(wave_blocks) == min(idle(blocks) for blocks in range(1, 17))


def test_numbers_that_python_repeats() -> None:
    names = {
        "kMmaRows": sm100_kernel._MMA_ROWS,
        "kSwizzleBytes": sm100_kernel._ROW_BYTES,
        "kTokenBoxRows": sm100_kernel._TOKEN_BOX_ROWS,
        "kScaleAtomBytes": sm100_kernel._SCALE_ATOM_BYTES,
        "kMostShared": SHARED_BYTES,
    }
    text = "".join(path.read_text() for path in (INCLUDE / "megamoe").rglob("*sm100*"))
    text += (INCLUDE / "megamoe" / "ptx" / "descriptors.hpp").read_text()
    for name, value in names.items():
        (found,) = re.findall(rf"constexpr int {name} = ([\d* ]+);", text)
        assert math.prod(map(int, found.split("*"))) == value, name


def test_the_table_of_tilings_in_the_docs() -> None:
    text = (INCLUDE.parents[4] / "docs" / "blackwell.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+), (\d+) \|$", text, re.M)
    expected = []
    for tiling in tilings_of(PRO):
        scales = 16 * (tiling.tiles + tiling.scale_rows // 128)
        used = 2 * tiling.tiles * tiling.block_rows + scales
        stages = tiling.stages(PRO.num_experts, PRO.num_experts // 8)
        allocated = 1 << max(5, (used - 1).bit_length())
        expected.append((tiling.block_rows, tiling.weight_rows, stages, used, allocated))
        assert stages == tiling.stages(FLASH.num_experts, FLASH.num_experts // 8)
    assert [tuple(map(int, row)) for row in rows] == expected


def test_arguments_lie_where_the_kernel_reads_them(emulator_library: ctypes.CDLL) -> None:
    offsets = (ctypes.c_int64 * 32)()
    count = emulator_library.megamoe_sm100_arguments(offsets)
    num_fields = 22  # of the buffer
    fields = _arguments_type(num_fields)
    found = [getattr(fields, name).offset for name, *_ in fields._fields_[:-1]]  # not the padding
    assert found == list(offsets[: count - 1])
    assert ctypes.sizeof(fields) >= offsets[count - 1]
