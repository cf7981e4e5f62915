"""Failure records as a person reads them."""

from __future__ import annotations

from megamoe_kernel.failure import read_failure

NONE = 0xFFFFFFFF


def test_no_failure() -> None:
    assert read_failure([0] * 16) is None


def test_a_tile_that_waits_for_tokens() -> None:
    failure = read_failure([4, 3, 17, 32, 5, NONE, 64, 60, 1, *[0] * 7])
    assert failure is not None
    assert str(failure) == (
        "rank 3 gave up in stage L1, tile 5 (CTA 17, thread 32): it waited for the tile's tokens: "
        "60 of 64"
    )
    assert failure.peer is None


def test_a_rank_that_does_not_come() -> None:
    # As int32, in which torch shows the field.
    failure = read_failure([6, 0, 1, 2, -1, 7, 100, 99, 1, *[0] * 7])
    assert failure is not None
    assert (failure.tile, failure.peer, failure.complete) == (None, 7, True)
    assert str(failure) == (
        "rank 0 gave up in stage combine (CTA 1, thread 2): it waited for the results of rank 7"
    )


def test_an_unfinished_or_newer_record() -> None:
    assert read_failure([2, *[0] * 15]).complete is False  # type: ignore[union-attr]
    assert "unknown" in str(read_failure([99, *[0] * 15]))
