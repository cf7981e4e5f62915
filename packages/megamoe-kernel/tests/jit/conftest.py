"""NVRTC as torch's requirements bring it, and a cache of the test's own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from megamoe_kernel import CompileError
from megamoe_kernel.jit.cache import CubinCache
from megamoe_kernel.jit.nvrtc import Nvrtc, find_nvrtc


@pytest.fixture(scope="session")
def nvrtc() -> Nvrtc:
    try:
        return find_nvrtc()
    except CompileError as error:
        pytest.skip(f"needs NVRTC, which torch for CUDA brings: {error}")


@pytest.fixture
def cache(tmp_path: Path) -> CubinCache:
    return CubinCache(tmp_path / "cubins")


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> CubinCache:
    """For all tests of a session: what takes seconds to compile is compiled once."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    return CubinCache(folder / "cubins")


@pytest.fixture(scope="session")
def run_tool(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """What a tool says of a cubin: its name, the cubin, options. Triton, of torch, brings some."""
    folder = tmp_path_factory.mktemp("tools")

    def run(name: str, cubin: bytes, *options: str) -> str:
        for distribution in metadata.distributions():
            if distribution.metadata["Name"] == "triton":
                for file in distribution.files or ():
                    if file.name == name:
                        path = folder / "kernel.cubin"
                        path.write_bytes(cubin)
                        command = [str(file.locate()), *options, str(path)]
                        return subprocess.run(
                            command, check=True, capture_output=True, text=True
                        ).stdout
        pytest.skip(f"needs {name}, which triton brings")

    return run
