"""The native extension compiles, without a warning, for what no session builds it for.

The tests run on what the machine's own compiler made. Here the same sources go through clang and,
for 64-bit ARM, a cross compiler, with the options of CMakeLists.txt; nothing is linked.
"""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

CODEC = Path(__file__).resolve().parent.parent / "packages" / "nvfp4-codec"
COMMON = sorted(path.name for path in (CODEC / "csrc").glob("*.cpp") if "avx" not in path.name)
X86 = ["avx2.cpp", "avx512.cpp"]

OPTIONS = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
OPTIONS += ["-ffp-contract=off", "-fno-trapping-math"]
AVX2 = ["-mavx2", "-mf16c", "-mfma", "-mbmi", "-mbmi2"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
FLAGS = {"avx2.cpp": AVX2, "avx512.cpp": AVX512 + AVX2}


def clang() -> list[str]:
    if found := _find_clang():
        return [found]
    pytest.skip("needs clang++, or clang++-14 and later, on PATH")


def _find_clang() -> str | None:
    names = ["clang++", *(f"clang++-{version}" for version in range(30, 13, -1))]
    return next(filter(None, map(shutil.which, names)), None)


def arm() -> list[str]:
    if found := shutil.which("aarch64-linux-gnu-g++"):
        return [found]
    command = [_find_clang() or "", "--target=aarch64-linux-gnu"]
    if command[0] and _compiles(command, "#include <vector>\n"):
        return command
    pytest.skip("needs aarch64-linux-gnu-g++, or clang++ with an aarch64 C++ library, on PATH")


def _compiles(command: list[str], text: str) -> bool:
    probe = [*command, "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(probe, input=text, text=True, capture_output=True).returncode == 0


def compile_source(compiler: list[str], source: str, folder: Path) -> None:
    arguments = [*OPTIONS, *FLAGS.get(source, [])]
    if source == "module.cpp":
        # Types only: generating its code takes long and shows nothing more.
        pybind11 = pytest.importorskip("pybind11", reason="needs the headers of pybind11")
        includes = [pybind11.get_include(), sysconfig.get_path("include")]
        arguments += ["-fsyntax-only", *(f"-isystem{include}" for include in includes)]
        if not _compiles([*compiler, *arguments], "#include <Python.h>\n"):
            pytest.skip(f"needs Python.h, usable for {compiler[-1]}, in {includes[1]}")
    else:
        arguments += ["-O1", "-c", "-o", str(folder / "object.o")]
    command = [*compiler, *arguments, str(CODEC / "csrc" / source)]
    result = subprocess.run(command, text=True, capture_output=True)
    assert result.returncode == 0, result.stderr[-4000:]


@pytest.mark.parametrize("source", COMMON)
def test_compiles_for_arm(source: str, tmp_path: Path) -> None:
    compile_source(arm(), source, tmp_path)


@pytest.mark.parametrize("source", COMMON + X86)
def test_compiles_with_clang(source: str, tmp_path: Path) -> None:
    compiler = clang()
    if source in X86 and not sysconfig.get_platform().endswith("x86_64"):
        pytest.skip("needs an x86_64 machine")
    compile_source(compiler, source, tmp_path)


def test_the_options_are_those_of_the_build() -> None:
    build = (CODEC / "CMakeLists.txt").read_text()
    assert all(source in build for source in COMMON + X86)
    for option in {*OPTIONS[3:5], *OPTIONS[6:], *AVX2, *AVX512}:
        assert option in build, option
