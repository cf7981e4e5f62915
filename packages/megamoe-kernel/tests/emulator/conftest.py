"""The layer for sm_100a on emulated ranks, with weights as layout_sm100 arranges them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from megamoe_kernel import ExpertWeights, transform_nvfp4_weights_for_mega_moe
from megamoe_kernel.weights import MegaMoEWeights


def _words(weights: MegaMoEWeights) -> Tensor:
    """The scale words in the order of memory: [experts, K / 64, rows]."""
    assert weights.scale is not None
    return weights.scale.transpose(1, 2).contiguous()


@pytest.fixture(scope="session")
def mutants(emulator_library: ctypes.CDLL) -> list[str]:
    """What mutants do; 0 is none."""
    emulator_library.megamoe_mutant.restype = ctypes.c_char_p
    found: list[str] = []
    while (words := emulator_library.megamoe_mutant(len(found))) is not None:
        found.append(words.decode())
    return found


@pytest.fixture(scope="session")
def run_sm100(
    host_library: ctypes.CDLL, emulator_library: ctypes.CDLL, emulated: ModuleType
) -> Callable[..., Any]:
    """Run launches, each a list of every rank's tokens, through the kernel for sm_100a."""

    def arranged(
        w13: ExpertWeights,
        w2: ExpertWeights,
        shared: tuple[ExpertWeights, ExpertWeights] | None,
        num_ranks: int,
    ) -> Mapping[str, Tensor]:
        layers = transform_nvfp4_weights_for_mega_moe(w13, w2, arch="sm_100a")
        extras: tuple[MegaMoEWeights | None, ...] = (None, None)
        if shared is not None:
            extras = transform_nvfp4_weights_for_mega_moe(*shared, arch="sm_100a")
        result = {}
        for name, weights, extra in zip(("w13", "w2"), layers, extras, strict=True):
            for attribute, get in (
                ("codes", lambda w: w.weight), ("scales", _words), ("alpha", lambda w: w.alpha),
            ):  # fmt: skip
                more = None if extra is None else get(extra)
                result[f"{name}_{attribute}"] = emulated.by_rank(get(weights), more, num_ranks)
        return result

    def run(*arguments: Any, ctas: int = 1, mutant: int = 0, **options: Any) -> Any:
        def call(layer_run: Any, *rest: Any) -> int:
            code: int = emulator_library.megamoe_emulate_sm100(layer_run, ctas, mutant, *rest)
            return code

        return emulated.run_layer(host_library, call, arranged, *arguments, "nvfp4", **options)

    return run
