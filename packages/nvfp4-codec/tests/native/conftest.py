"""Fixtures of the native backend's tests; without the extension they are skipped by name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from nvfp4_codec import native

RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def _needs_extension() -> None:
    reason = native.unavailable_reason()
    if reason:
        pytest.skip(reason)


@pytest.fixture(params=native.isa_names() or ("extension missing",))
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set of this machine, by name."""
    return str(request.param)


@pytest.fixture
def run_python() -> RunPython:
    """Run code in a fresh interpreter with this one's path; keywords set environment variables."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(filter(None, sys.path))
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run
