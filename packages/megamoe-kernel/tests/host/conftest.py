"""The scalar layer on emulated ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from megamoe_kernel import ExpertWeights


@pytest.fixture(scope="session")
def run_layer(host_library: ctypes.CDLL, emulated: ModuleType) -> Callable[..., Any]:
    """Run launches, each a list of every rank's tokens, through the neutral code."""

    def in_reading_order(
        w13: ExpertWeights,
        w2: ExpertWeights,
        shared: tuple[ExpertWeights, ExpertWeights] | None,
        num_ranks: int,
    ) -> Mapping[str, Tensor]:
        arranged = {}
        extras = shared or (None, None)
        for name, weights, extra in (("w13", w13, extras[0]), ("w2", w2, extras[1])):
            for attribute, stored in (
                ("codes", "weight"), ("scales", "weight_scale"), ("alpha", "weight_scale_2"),
            ):  # fmt: skip
                more = None if extra is None else getattr(extra, stored)
                tensor = emulated.by_rank(getattr(weights, stored), more, num_ranks)
                arranged[f"{name}_{attribute}"] = tensor
        return arranged

    def run(*arguments: Any, **options: Any) -> Any:
        activation = arguments[3]

        def call(*c_arguments: Any) -> int:
            run_and_message, rest = c_arguments[0], c_arguments[1:]
            code: int = host_library.megamoe_run_layer(
                run_and_message, int(activation == "nvfp4"), *rest
            )
            return code

        return emulated.run_layer(host_library, call, in_reading_order, *arguments, **options)

    return run
