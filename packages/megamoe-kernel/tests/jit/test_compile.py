"""Kernels compile for every target, without a GPU and without a CUDA toolkit."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megamoe_kernel import ArchitectureError, CompileError
from megamoe_kernel.jit import compile as jit_compile
from megamoe_kernel.jit.cache import CubinCache
from megamoe_kernel.jit.compile import KernelSource, compile_kernel, headers_hash
from megamoe_kernel.jit.cubin import check_cubin, read_cubin
from megamoe_kernel.jit.nvrtc import Nvrtc
from megamoe_kernel.jit.targets import TARGETS, Target
from megamoe_kernel.kernels import kernels_of
from megamoe_kernel.models import MODELS
from megamoe_kernel.prepare_kernel import VALUES, copy_source, prepare_source

PRO = MODELS["deepseek-v4-pro"]
#: The number in a cubin's flags, from ptxas: 100f is a kind of 100.
NUMBERS = {"sm_90a": 90, "sm_100a": 100, "sm_100f": 100, "sm_103a": 103}


@pytest.mark.parametrize("target", TARGETS)
def test_pro_kernels_are_for_the_target_asked_for(
    target: Target, nvrtc: Nvrtc, shared_cache: CubinCache, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("megamoe_kernel._native", reason="needs the compiled extension")
    for source in kernels_of(PRO, 8, target):
        with caplog.at_level(logging.WARNING):
            compiled = compile_kernel(source, target, cache=shared_cache)
        found = read_cubin(compiled.cubin)
        assert (found.target, found.sm) == (target, NUMBERS[target])
        assert source.name in found.kernels
        assert not caplog.messages  # the compiler's warnings, which all cost speed


@pytest.mark.parametrize("dtype", VALUES, ids=str)
@pytest.mark.parametrize("hidden", [128, 4096, 16384])
def test_prepare_inputs_of_any_width(
    dtype: torch.dtype, hidden: int, nvrtc: Nvrtc, cache: CubinCache
) -> None:
    source = prepare_source(dtype, hidden)
    assert source.threads % 32 == 0
    assert 32 <= source.threads <= 512
    compile_kernel(source, "sm_90a", cache=cache)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("hidden", [128, 7168, 16384])
def test_copy_inputs_of_any_width(
    ids: torch.dtype, hidden: int, nvrtc: Nvrtc, cache: CubinCache
) -> None:
    source = copy_source(ids, hidden, 6)
    assert source.threads % 32 == 0
    assert 32 <= source.threads <= 512
    compile_kernel(source, "sm_90a", cache=cache)


def test_the_second_time_is_from_the_cache(nvrtc: Nvrtc, cache: CubinCache) -> None:
    source = prepare_source(torch.bfloat16, 512)
    first = compile_kernel(source, "sm_90a", cache=cache)
    second = compile_kernel(source, "sm_90a", cache=cache)
    assert (first.cached, second.cached) == (False, True)
    assert second.cubin == first.cubin


@pytest.mark.parametrize("changed", ["headers", "text", "options", "target", "version"])
def test_whatever_decides_the_result_is_in_the_key(
    changed: str, nvrtc: Nvrtc, cache: CubinCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = prepare_source(torch.bfloat16, 512)
    compile_kernel(source, "sm_90a", cache=cache)
    target: Target = "sm_90a"
    options: tuple[str, ...] = ()
    if changed == "headers":
        monkeypatch.setattr(jit_compile, "headers_hash", lambda: "another")
    elif changed == "text":
        source = prepare_source(torch.bfloat16, 256)
    elif changed == "options":
        options = ("--generate-line-info",)
    elif changed == "target":
        target = "sm_103a"
    else:
        monkeypatch.setattr(nvrtc, "version", "99.0")
    assert not compile_kernel(source, target, cache=cache, options=options).cached


def test_the_hash_of_headers_sees_names_and_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit_compile, "INCLUDE", tmp_path)
    seen = [headers_hash()]
    for name, content in (("a.hpp", "1"), ("a.hpp", "2"), ("b.hpp", "2")):
        (tmp_path / name).write_text(content)
        seen.append(headers_hash())
    (tmp_path / "a.hpp").rename(tmp_path / "c.hpp")
    seen.append(headers_hash())
    assert len(set(seen)) == len(seen)


def test_broken_code_comes_with_the_compilers_words(nvrtc: Nvrtc, cache: CubinCache) -> None:
    source = replace(prepare_source(torch.bfloat16, 512), function="megamoe::no_such_function")
    with pytest.raises(CompileError, match=r"prepare_inputs for sm_90a:\n.*no_such_function"):
        compile_kernel(source, "sm_90a", cache=cache)
    assert not list(cache.folder.glob("*.cubin"))


def test_a_kernel_of_one_architecture_is_refused_for_another(
    nvrtc: Nvrtc, cache: CubinCache
) -> None:
    source: KernelSource = replace(prepare_source(torch.bfloat16, 512), targets=("sm_90a",))
    with pytest.raises(ArchitectureError, match="written for sm_90a, not for sm_100a"):
        compile_kernel(source, "sm_100a", cache=cache)
    with pytest.raises(CompileError, match="compiler is 'clang'"):
        compile_kernel(source, "sm_90a", cache=cache, compiler="clang")  # type: ignore[arg-type]


def test_a_cubin_of_another_target_is_noticed(nvrtc: Nvrtc, cache: CubinCache) -> None:
    """What broke a kernel of others: compiled for sm_100, meant for sm_100a."""
    source = prepare_source(torch.bfloat16, 512)
    cubin = compile_kernel(source, "sm_100f", cache=cache).cubin
    with pytest.raises(CompileError, match="for sm_100f, expected sm_100a"):
        check_cubin(cubin, "sm_100a")
    with pytest.raises(CompileError, match="for sm_100f, expected sm_90a"):
        check_cubin(cubin, "sm_90a")
    with pytest.raises(CompileError, match="no ELF file"):
        read_cubin(b"// PTX")


def test_nvcc_is_for_who_asks(cache: CubinCache, monkeypatch: pytest.MonkeyPatch) -> None:
    source = prepare_source(torch.bfloat16, 512)
    if shutil.which("nvcc"):
        compiled = compile_kernel(source, "sm_90a", cache=cache, compiler="nvcc")
        assert read_cubin(compiled.cubin).target == "sm_90a"
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CompileError, match="found no nvcc.*compiler='nvrtc'"):
        compile_kernel(source, "sm_90a", cache=cache, compiler="nvcc")


_MEASURED = """
import sys, torch
from pathlib import Path
from megamoe_kernel import api
from megamoe_kernel.jit import driver, nvrtc
from megamoe_kernel.jit.cache import CubinCache
from megamoe_kernel.jit.compile import compile_kernel
from megamoe_kernel.models import MODELS
from megamoe_kernel.scalar_kernel import scalar_source

# What an import does: nothing.
assert not torch.cuda.is_initialized()
assert nvrtc.find_nvrtc.cache_info().misses == driver._libcuda.cache_info().misses == 0

source = scalar_source(MODELS["deepseek-v4-pro"], "nvfp4", 8, 32768)
for target in ("sm_100f", "sm_103a"):
    compile_kernel(source, target, cache=CubinCache(Path(sys.argv[1])))
# Not ru_maxrss: a child starts with its parent's, and a test worker's is large.
peak = next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
assert int(peak.split()[1]) < 1e6, peak  # kB
"""


def test_memory_of_a_pro_layer(nvrtc: Nvrtc, tmp_path: Path) -> None:
    """The whole layer, composed: at most 1 GB with torch's import; time: benchmarks/compile.py."""
    folder = tmp_path / "cubins"
    result = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(folder)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    found = {read_cubin(_cubin(path)).target for path in folder.glob("*.cubin")}
    assert found == {"sm_100f", "sm_103a"}


def _cubin(path: Path) -> bytes:
    return path.read_bytes().partition(b"\n")[2]
