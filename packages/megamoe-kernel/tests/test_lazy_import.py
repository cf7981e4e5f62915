"""Importing the package costs nothing and touches nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import megamoe_kernel


def test_import_waits_for_nothing() -> None:
    code = "import sys, megamoe_kernel; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there() -> None:
    for name in megamoe_kernel.__all__:
        assert getattr(megamoe_kernel, name) is not None
    assert set(megamoe_kernel.__all__) <= set(dir(megamoe_kernel))
    with pytest.raises(AttributeError, match="no attribute 'kernel'"):
        megamoe_kernel.kernel  # noqa: B018
