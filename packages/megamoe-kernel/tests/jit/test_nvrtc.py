"""Where NVRTC comes from, and what is said when it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from megamoe_kernel import CompileError
from megamoe_kernel.jit import nvrtc as jit_nvrtc
from megamoe_kernel.jit.nvrtc import Nvrtc, find_nvrtc


def test_it_is_the_one_of_the_installed_packages(nvrtc: Nvrtc) -> None:
    path = Path(nvrtc.path)
    if not path.is_absolute():
        pytest.skip("needs the package nvidia-cuda-nvrtc: NVRTC was found by the loader")
    assert path.name.startswith("libnvrtc.so.")
    assert nvrtc.version.count(".") == 2


def test_no_nvrtc_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_nvrtc, "distributions", lambda: iter(()))
    monkeypatch.setattr(jit_nvrtc, "_SONAMES", ("libnvrtc.so.0",))
    with pytest.raises(CompileError, match="pip install nvidia-cuda-nvrtc"):
        find_nvrtc.__wrapped__()


def test_an_old_one_is_refused(nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_nvrtc, "_OLDEST", (99, 0))
    with pytest.raises(CompileError, match="expected at least 99.0"):
        Nvrtc(nvrtc.path)
