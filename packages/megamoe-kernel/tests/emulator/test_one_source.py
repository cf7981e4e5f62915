"""The compiled kernel and the emulated one are one source, but for the instructions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megamoe_kernel.models import MODELS
from megamoe_kernel.sm100_kernel import all_tilings, pair_tilings, sm100_source

pytest.importorskip("megamoe_kernel._native", reason="needs the compiled extension")

PACKAGE = Path(__file__).parents[2]
INCLUDE, CSRC = PACKAGE / "src" / "megamoe_kernel" / "include", PACKAGE / "csrc"
#: What is a GPU's alone: the entry point, its machine, its instructions.
GPU_ONLY = {"megamoe/impl/sm100.cuh", "megamoe/comm/device.cuh", "megamoe/ptx/sm100.cuh"}
#: What only the emulator's library has besides: the scalar layer, of which host runs are made.
HOST_ONLY = {"megamoe/impl/scalar.hpp", "megamoe/stages/scalar_mainloop.hpp"}


def headers_of(path: Path) -> set[str]:
    """All headers below megamoe/ that a file includes, and theirs."""
    found: set[str] = set()
    waiting = [path]
    while waiting:
        for name in re.findall(r'#include "([^"]+)"', waiting.pop().read_text()):
            folder = INCLUDE if name.startswith("megamoe/") else CSRC
            if name not in found:
                found.add(name)
                waiting.append(folder / name)
    return {name for name in found if name.startswith("megamoe/")}


def test_both_builds_have_one_list_of_sources() -> None:
    compiled = headers_of(INCLUDE / "megamoe/impl/sm100.cuh") | {"megamoe/impl/sm100.cuh"}
    emulated = headers_of(CSRC / "emulator" / "library.cpp")
    assert compiled - GPU_ONLY == emulated - HOST_ONLY
    assert compiled >= GPU_ONLY
    assert "megamoe/stages/sm100_mainloop.hpp" in emulated


def test_real_tilings_are_emulated() -> None:
    compiled = {
        found[1]
        for tiling in (*all_tilings(), *pair_tilings())
        if (source := sm100_source(MODELS["deepseek-v4-pro"], 8, 32768, tiling))
        and (found := re.search(r"Sm100Tiling<([\d, ]+)>", source.function))
    }
    emulated = re.findall(r"Sm100Tiling<([\d, ]+)>", (CSRC / "emulator/library.cpp").read_text())
    real = [constants for constants in emulated if constants.endswith("80, 176")]
    assert len(real) == 4
    assert set(real) <= compiled


def test_the_kernel_does_not_ask_who_compiles_it() -> None:
    # A branch on the compiler would be text that only one of the two runs. Annotations and exactly
    # rounded arithmetic differ by compiler, in common/ and in the declarations of instructions.
    for name in headers_of(CSRC / "emulator" / "library.cpp"):
        if not name.startswith("megamoe/common/") and name != "megamoe/ptx/sm100.hpp":
            assert "__CUDA" not in (INCLUDE / name).read_text(), name


def test_every_instruction_has_both_back_ends() -> None:
    declared = re.findall(r"^MEGAMOE_GPU_FN \w+ (\w+)\(", text("ptx/sm100.hpp"), re.M)
    assert len(declared) >= 20
    defined = re.findall(r"^__device__ __forceinline__ \w+ (\w+)\(", text("ptx/sm100.cuh"), re.M)
    assert sorted(declared) == sorted(defined)
    emulator = "".join(path.read_text() for path in (CSRC / "emulator").glob("*_instructions.hpp"))
    for name in declared:
        assert re.search(rf"^inline \w+ {name}\(", emulator, re.M), name


def text(name: str) -> str:
    return (INCLUDE / "megamoe" / name).read_text()
