"""A checkpoint put through the transform, and the fixture that does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor

from vllm_dsv4.options import Options
from vllm_dsv4.stored import read_stored
from vllm_dsv4.transform import Transform


class Run:
    """A checkpoint put through the transform: what went in, under official names, and came out."""

    def __init__(
        self,
        maker: ModuleType,
        folder: Path,
        options: Options,
        order: Callable[[Iterable[str]], Iterable[str]] = sorted,
        **arguments: object,
    ) -> None:
        self.stored = read_stored(folder)
        self.source: dict[str, Tensor] = maker.read(folder)
        self.transform = Transform(self.stored, options, **arguments)  # type: ignore[arg-type]
        stream = [(name, self.source[name]) for name in order(self.source)]
        self.yielded = list(self.transform.apply(stream))
        self.out = dict(self.yielded)
        self.report = self.transform.report


@pytest.fixture(scope="session")
def run(checkpoints: ModuleType, checkpoint: Callable[..., Path]) -> Callable[..., Run]:
    """Puts a variant through the transform, once for all tests; options by name."""

    done: dict[object, Run] = {}

    def go(
        variant: str = "full",
        scheme: str = "official",
        *,
        order: Callable[[Iterable[str]], Iterable[str]] = sorted,
        part: str = "all",
        shared_tp: int = 1,
        **options: object,
    ) -> Run:
        key = (variant, scheme, order, part, shared_tp, *sorted(options.items()))
        if key not in done:
            chosen = Options(**options)  # type: ignore[arg-type]
            done[key] = Run(
                checkpoints, checkpoint(variant, scheme), chosen, order,
                part=part, shared_tp=shared_tp,
            )  # fmt: skip
        return done[key]

    return go
