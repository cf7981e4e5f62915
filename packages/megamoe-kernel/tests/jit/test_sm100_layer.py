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
    TARGETS,
    Tiling,
    _arguments_type,
    all_tilings,
    pair_tilings,
    sm100_source,
    tiling_for,
    tilings_of,
)

pytest.importorskip("megamoe_kernel._native", reason="needs the compiled extension")

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
    atoms = 4 * (tiling.tiles + -(-tiling.block_rows // 128))
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
    "sm_100a": (*tilings_of(PRO), *pair_tilings()),
    "sm_100f": (tiling_for(PRO, 8 * 64), pair_tilings()[-1]),
    "sm_103a": (tiling_for(PRO, 8 * 64), pair_tilings()[-1]),
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
        for tiling in (*all_tilings(), *pair_tilings())
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
        sm100_source(TINY, 2, 1024, all_tilings()[0], num_shared=1),
        sm100_source(PRO, 2, 32768, all_tilings()[3]),  # little room beside the words
        sm100_source(MoEShape(8, 2, 128, 128), 1, 512, tilings_of(MoEShape(8, 2, 128, 128))[0]),
    ):
        assert b"sm100_layer" in compiled(nvrtc, source, "sm_100a")


def test_sizes_that_do_not_fit_do_not_compile(nvrtc: Nvrtc) -> None:
    # Two accumulators of 2 x 128 columns leave no room for scales in tensor memory.
    with pytest.raises(CompileError, match="two accumulators and the scales do not fit"):
        compiled(nvrtc, sm100_source(TINY, 1, 1024, Tiling(128, 2)), "sm_100a")


def test_a_pair_whose_rows_do_not_divide_the_layer_does_not_compile(nvrtc: Nvrtc) -> None:
    source = sm100_source(MoEShape(8, 2, 384, 128), 1, 32768, pair_tilings()[0])
    with pytest.raises(CompileError, match="shares_out"):
        compiled(nvrtc, source, "sm_100a")


def test_numbers_that_python_repeats() -> None:
    names = {
        "kMmaRows": sm100_kernel._MMA_ROWS,
        "kSwizzleBytes": sm100_kernel._ROW_BYTES,
        "kTokenBoxRows": sm100_kernel._TOKEN_BOX_ROWS,
        "kMostShared": SHARED_BYTES,
    }
    headers = ("stages/sm100_sizes.hpp", "ptx/descriptors.hpp", "impl/shared_memory.hpp")
    text = "".join((INCLUDE / "megamoe" / name).read_text() for name in headers)
    for name, value in names.items():
        (found,) = re.findall(rf"constexpr int {name} = ([\d* ]+);", text)
        assert math.prod(map(int, found.split("*"))) == value, name


def test_the_table_of_tilings_in_the_docs() -> None:
    text = (INCLUDE.parents[4] / "docs" / "blackwell.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+), (\d+) \|$", text, re.M)
    expected = []
    for tiling in tilings_of(PRO):
        scales = 16 * (tiling.tiles + -(-tiling.block_rows // 128))
        used = 2 * tiling.tiles * tiling.block_rows + scales
        allocated = 1 << max(5, (used - 1).bit_length())
        (stages,) = {
            int(sm100_source(shape, 8, MOST_RING_ROWS, tiling).function.split(", ")[2])
            for shape in (PRO, FLASH)
        }
        expected.append((tiling.block_rows, 128 * tiling.tiles, stages, used, allocated))
    assert [tuple(map(int, row)) for row in rows] == expected


def test_arguments_lie_where_the_kernel_reads_them(emulator_library: ctypes.CDLL) -> None:
    offsets = (ctypes.c_int64 * 32)()
    count = emulator_library.megamoe_sm100_arguments(offsets)
    num_fields = 22  # of the buffer
    fields = _arguments_type(num_fields)
    found = [getattr(fields, name).offset for name, *_ in fields._fields_[:-1]]  # not the padding
    assert found == list(offsets[: count - 1])
    assert ctypes.sizeof(fields) >= offsets[count - 1]
