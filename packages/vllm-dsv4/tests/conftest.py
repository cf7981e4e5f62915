"""Test checkpoints and an oracle for the whole package, loaded when a test asks for them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def _load(stem: str) -> ModuleType:
    """A module beside this file: importlib mode puts no folder on sys.path."""
    name = f"vllm_dsv4_test_{stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{stem}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def checkpoints() -> ModuleType:
    """The maker of test checkpoints, ``checkpoints.py``."""
    return _load("checkpoints")


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    """What stored tensors mean, ``oracle.py``."""
    return _load("oracle")


@pytest.fixture(scope="session")
def checkpoint(
    checkpoints: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """A checkpoint of the tiny model by variant and scheme; made once, to be read only."""
    base = tmp_path_factory.mktemp("checkpoints")

    def get(variant: str = "full", scheme: str = "official") -> Path:
        folder = base / f"{variant}-{scheme}"
        if not folder.exists():
            checkpoints.make(folder, variant, scheme)
        return folder

    return get
