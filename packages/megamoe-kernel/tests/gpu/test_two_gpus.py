"""Symmetric memory over NVLink, and the neutral code in it: one process for each GPU."""

from __future__ import annotations

import pytest

from megamoe_kernel.verify.ranks import check_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]


def test_two_ranks() -> None:
    """1000 launches with unequal and missing tokens, equal to the reference over both ranks."""
    found = check_ranks(2)
    assert len(found) == 8, (
        found
    )  # on each: buffers, two activations without tensor cores, the layer
    assert [finding for finding in found if finding.status != "passed"] == []
