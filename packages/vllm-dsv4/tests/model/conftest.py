"""One vLLM process for all tests of this folder, and checkpoints for it to load."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from vllm_dsv4.testing import Harness, StandInError

INSIDE = Path(__file__).with_name("inside.py")


@dataclass(frozen=True)
class Vllm:
    """The vLLM process. ``unimported`` is what `inside.registered` said before it was warm."""

    harness: Harness
    unimported: Mapping[str, Any]

    def call(self, function: str, **keywords: Any) -> Any:
        """A function of ``inside.py``, with the plugin loaded by its entry point."""
        return self.harness.call(INSIDE, function, **keywords)

    def load(self, folder: Path, **keywords: Any) -> Any:
        """A `LoadedModel`; raises RemoteError for whatever vLLM or the plugin raise."""
        return self.call("load", folder=folder, **keywords)


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    try:
        harness = Harness(tmp_path_factory.mktemp("vllm"))
    except StandInError as error:
        pytest.skip(str(error))
    with harness:
        unimported = harness.call(INSIDE, "registered")
        harness.warm()
        yield Vllm(harness, unimported)


@pytest.fixture(scope="session")
def load(vllm: Vllm, checkpoint: Callable[..., Path]) -> Callable[..., Any]:
    """Loads a variant of the tiny model, each way once; see `vllm_dsv4.testing.harness.load`."""
    done: dict[str, Any] = {}

    def go(variant: str = "full", scheme: str = "official", **keywords: Any) -> Any:
        key = repr((variant, scheme, sorted(keywords.items())))
        if key not in done:
            done[key] = vllm.load(checkpoint(variant, scheme), **keywords)
        return done[key]

    return go


@pytest.fixture(scope="session")
def source(checkpoints: ModuleType, checkpoint: Callable[..., Path]) -> Callable[..., Any]:
    """What a variant stores, under official names."""
    done: dict[str, dict[str, Tensor]] = {}

    def get(variant: str) -> dict[str, Tensor]:
        if variant not in done:
            done[variant] = checkpoints.read(checkpoint(variant))
        return done[variant]

    return get
