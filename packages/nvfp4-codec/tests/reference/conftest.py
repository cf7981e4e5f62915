"""Every test here runs the reference, also where a faster backend is installed."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest

import nvfp4_codec


@pytest.fixture(scope="session")
def codec() -> Any:
    """The six operations, each with backend="reference"."""
    names = [name for name in nvfp4_codec.__all__ if name.startswith(("quantize_", "dequantize_"))]
    assert len(names) == 6
    bound = {
        name: functools.partial(getattr(nvfp4_codec, name), backend="reference") for name in names
    }
    return types.SimpleNamespace(**bound)
