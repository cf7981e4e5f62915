"""NVRTC as torch's requirements bring it, and a cache of the test's own."""

from __future__ import annotations

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
