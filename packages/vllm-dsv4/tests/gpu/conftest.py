"""One fleet of engines for all tests; what was measured is written down as it comes."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .agreement import Logprobs
from .fleet import Fleet, Served

Record = Callable[..., None]
Reference = Callable[[str, Sequence[Sequence[int]]], list[Logprobs]]


@pytest.fixture(scope="session")
def place(
    checkpoints: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The folder of a checkpoint by name, made when first asked for."""
    from .variants import VARIANTS

    base, lock = tmp_path_factory.mktemp("served"), threading.RLock()

    def find(name: str) -> Path:
        with lock:
            folder = base / name
            if name == "official":
                official: Path = checkpoints.TINY
                return official
            if not folder.exists():
                if name == "prepared":
                    _prepare(find("full"), folder)
                else:
                    VARIANTS[name].make(folder, checkpoints)
            return folder

    return find


def _prepare(source: Path, folder: Path) -> None:
    from vllm_dsv4.cli import main

    assert main(["prepare", str(source), str(folder)]) == 0


@pytest.fixture(scope="session")
def fleet(
    request: pytest.FixtureRequest,
    place: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    """Started with every engine that the chosen tests name."""
    import torch

    found = Fleet(tmp_path_factory.mktemp("engines"), place, torch.cuda.device_count())
    wanted: set[str] = set()
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        skipped = item.get_closest_marker("skip") is not None
        if callspec is not None and "served" in callspec.params and not skipped:
            wanted.update(_names(callspec.params["served"]))
    found.start(wanted)
    yield found
    found.close()


def _names(parameter: Any) -> tuple[str, ...]:
    return (parameter,) if isinstance(parameter, str) else tuple(parameter)


@pytest.fixture
def served(request: pytest.FixtureRequest, fleet: Fleet, record: Record) -> Any:
    """What the engine of that name answered, or a tuple of several; indirect parameters."""
    names = _names(request.param)
    results = []
    for name in names:
        one = fleet.served(name)
        record("engine", engine=name, code=one.code, seconds=round(one.seconds, 1), **_times(one))
        results.append(one)
    return results[0] if isinstance(request.param, str) else tuple(results)


def _times(served: Served) -> dict[str, Any]:
    if served.code:
        return {}
    return {key: value for key, value in served.about.items() if key.endswith("_seconds")}


@pytest.fixture(scope="session")
def reference(place: Callable[[str], Path]) -> Reference:
    """float32 logprobs of sequences under a checkpoint's values; each sequence is run once."""
    from .reference import load_model, logprobs
    from .variants import SAME_VALUES

    models: dict[str, Any] = {}
    known: dict[tuple[str, tuple[int, ...]], Logprobs] = {}

    def get(checkpoint: str, sequences: Sequence[Sequence[int]]) -> list[Logprobs]:
        name = SAME_VALUES.get(checkpoint, checkpoint)
        keys = [(name, tuple(sequence)) for sequence in sequences]
        if any(key not in known for key in keys) and name not in models:
            models[name] = load_model(place(name))
        for key in keys:
            if key not in known:
                (known[key],) = logprobs(models[name], [key[1]])
        return [known[key] for key in keys]

    return get


@pytest.fixture(scope="session")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Appends a line of JSON to measured.jsonl in pytest's base folder."""
    path = tmp_path_factory.getbasetemp() / "measured.jsonl"

    def write(what: str, **values: Any) -> None:
        with path.open("a") as file:
            file.write(json.dumps({"what": what, **values}) + "\n")

    return write


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests here need vLLM, and the exporter that makes their checkpoints."""
    here = Path(__file__).parent
    missing = [name for name in ("vllm", "transformers") if importlib.util.find_spec(name) is None]
    for item in items:
        if missing and item.path.parent == here and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"{' and '.join(missing)} not installed"))
