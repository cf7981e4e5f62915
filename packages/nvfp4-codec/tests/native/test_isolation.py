"""Each instruction-set file keeps its code to itself.

A function with external linkage in avx512.cpp (an inline one from a header, say) may be the
copy that the linker keeps for everybody, and then crashes on older processors.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
FLAGS = {
    "scalar": [],
    "avx2": ["-mavx2", "-mf16c", "-mfma", "-mbmi", "-mbmi2"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c", "-mfma"],
}


@pytest.mark.parametrize("isa", sorted(FLAGS))
def test_only_the_table_is_visible(isa: str, tmp_path: Path) -> None:
    compiler, nm = shutil.which("c++"), shutil.which("nm")
    if compiler is None or nm is None:
        pytest.skip("needs a C++ compiler and nm")
    machine = subprocess.run([compiler, "-dumpmachine"], capture_output=True, text=True, check=True)
    if isa != "scalar" and not machine.stdout.startswith("x86_64"):
        pytest.skip(f"{isa} is for x86-64, the compiler is for {machine.stdout.strip()}")
    unit = tmp_path / "unit.o"
    # Unoptimized, so that nothing disappears by inlining.
    command = [compiler, "-std=c++20", "-O0", "-w", "-fPIC", *FLAGS[isa]]
    subprocess.run([*command, "-c", str(CSRC / f"{isa}.cpp"), "-o", str(unit)], check=True)
    listing = subprocess.run([nm, "-C", str(unit)], capture_output=True, text=True, check=True)
    symbols = [line.split(maxsplit=2)[-2:] for line in listing.stdout.splitlines()]
    shared = [name for kind, name in symbols if kind in "TWVuBDR"]
    assert shared == [f"nvfp4::{isa}_kernels()"]
