"""The GPU tests of the Triton kernels, run without a GPU in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton (torch brings it on x86-64 Linux)")

GPU_TESTS = Path(__file__).parents[1] / "gpu" / "test_triton.py"


def test_kernels_give_the_reference_bytes_in_the_interpreter() -> None:
    # In a process of its own: triton reads the variable when the kernels are imported.
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(GPU_TESTS)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
