"""The Hopper kernel against the reference: shapes, tilings, odd counts, graphs, repeats."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megamoe_kernel import SymmBuffer, transform_nvfp4_weights_for_mega_moe
from megamoe_kernel.sm90_kernel import TILINGS, Tiling, run_sm90_layer
from megamoe_kernel.verify.cases import CASES, TINY, Case, spread
from megamoe_kernel.verify.checks import (
    SWIGLU_LIMIT,
    Load,
    Run,
    check_layer,
    public_layer,
)

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True, scope="module")
def needs_hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


def _with(tiling: Tiling) -> Load:
    def load(*weights: object) -> Run:
        l1, l2 = transform_nvfp4_weights_for_mega_moe(*weights, arch="sm_90a")  # type: ignore[arg-type]

        def run(y: Tensor, buffer: SymmBuffer) -> None:
            run_sm90_layer(y, l1, l2, buffer, swiglu_limit=SWIGLU_LIMIT, tiling=tiling)

        return run

    return load


def _check(load: Load, cases: list[Case]) -> None:
    found = list(check_layer("sm_90a", load, "bf16", DEVICE, cases))
    assert len(found) == len(cases)
    assert [finding for finding in found if finding.status != "passed"] == []


def test_all_cases() -> None:
    _check(public_layer("sm_90a"), list(CASES))


@pytest.mark.parametrize("tiling", TILINGS, ids=lambda tiling: f"{tiling.block_rows} rows")
def test_every_tiling_with_any_number_of_tokens(tiling: Tiling) -> None:
    _check(_with(tiling), [case for case in CASES if case.shape == TINY])


def test_tokens_one_to_33() -> None:
    _check(public_layer("sm_90a"), [Case(f"{n} tokens", TINY, n, spread) for n in range(1, 34)])
