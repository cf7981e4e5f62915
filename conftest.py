"""What all tests share: where the packages are, GPU markers, and how long random tests search.

Nothing here needs more than pytest, so that `pytest -m gpu` runs on a machine with only pytest and
torch, from a plain checkout.
"""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent

# An installed package wins: it has its native extension. A checkout alone has the sources.
for _source in sorted(ROOT.glob("packages/*/src")):
    if importlib.util.find_spec(next(_source.iterdir()).name) is None:
        sys.path.append(str(_source))

_WANTS_GPU = re.compile(r"\b(gpu|hopper|blackwell|multi_gpu)\b")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the long tests (marker: full)")


def pytest_configure(config: pytest.Config) -> None:
    try:
        from hypothesis import settings
    except ImportError:
        return
    # Everyday runs repeat the same examples, so that a red build is red for everyone; the full
    # run looks for new ones.
    settings.register_profile("everyday", deadline=None, derandomize=True, database=None)
    settings.register_profile("full", deadline=None, max_examples=2000, print_blob=True)
    settings.load_profile("full" if config.getoption("--full") else "everyday")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, look into folders named gpu only: other files import the test peers."""
    expression: str = config.getoption("markexpr", "")
    wants_gpu = _WANTS_GPU.search(expression) and not re.search(r"\bnot\b", expression)
    if wants_gpu and collection_path.is_file() and collection_path.parent.name != "gpu":
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    full: bool = config.getoption("--full")
    for item in items:
        if item.get_closest_marker("full") and not full:
            item.add_marker(pytest.mark.skip(reason="long: runs with --full (session tests-full)"))
        if reason := _missing_hardware({marker.name for marker in item.iter_markers()}):
            item.add_marker(pytest.mark.skip(reason=reason))


def _missing_hardware(markers: set[str]) -> str | None:
    """Return what the test's markers ask for and this machine lacks."""
    if not markers & {"gpu", "hopper", "blackwell", "multi_gpu"}:
        return None
    import torch

    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU: torch.cuda.is_available() is False"
    major, minor = torch.cuda.get_device_capability()
    for marker, wanted in (("hopper", 9), ("blackwell", 10)):
        if marker in markers and major != wanted:
            return f"needs compute capability {wanted}.x, this GPU has {major}.{minor}"
    if "multi_gpu" in markers and (count := torch.cuda.device_count()) < 2:
        return f"needs two GPUs, this machine has {count}"
    return None
