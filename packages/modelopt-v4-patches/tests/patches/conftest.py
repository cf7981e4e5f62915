"""Every test starts from unpatched packages and leaves them so."""

import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from modelopt_v4_patches.registry import revert_patches

sys.path.append(str(Path(__file__).parent))  # for fake_gpu


@pytest.fixture(scope="session", autouse=True)
def modelopt() -> Any:
    """modelopt.torch.quantization; with it, everything that the patches touch is imported."""
    for package in ("modelopt", "transformers"):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install 'modelopt-v4-patches[modelopt]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # modelopt warns of this transformers, torch of its own use
        import_module("modelopt.torch.export")
        import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
        return import_module("modelopt.torch.quantization")


@pytest.fixture(autouse=True)
def unpatched(modelopt: Any) -> Iterator[None]:
    revert_patches()
    yield
    revert_patches()
