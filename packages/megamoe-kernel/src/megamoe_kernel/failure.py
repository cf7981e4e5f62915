"""What a kernel wrote into the buffer's field "failure" when a wait took too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: ``Wait`` of include/megamoe/common/failure.hpp, by number: the stage, and what it waited for.
WAITS = (
    ("none", "nothing"),
    ("route", "the other CTAs of its rank"),
    ("dispatch", "the routes of rank {peer}"),
    ("fetch", "L2 of the tile that had the ring slot before"),
    ("L1", "the tile's tokens"),
    ("L2", "the tile's L1 tasks"),
    ("combine", "the results of rank {peer}"),
    ("mainloop", "a stage, a tile or a plan in shared memory to be filled or free"),
)
_HAS_COUNT = ("fetch", "L1", "L2")


@dataclass(frozen=True)
class Failure:
    """The first wait that a rank gave up.

    rank, cta, thread: who waited. tile: the block of tokens, counted over the launch, or None.
    peer: the rank that did not signal, or None. expected, found: of the counter that was polled.
    complete: False if the record was read while it was written; then numbers may be missing.
    """

    stage: str
    waited_for: str
    rank: int
    cta: int
    thread: int
    tile: int | None
    peer: int | None
    expected: int
    found: int
    complete: bool

    def __str__(self) -> str:
        tile = "" if self.tile is None else f", tile {self.tile}"
        count = f": {self.found} of {self.expected}" if self.stage in _HAS_COUNT else ""
        return (
            f"rank {self.rank} gave up in stage {self.stage}{tile} (CTA {self.cta}, thread "
            f"{self.thread}): it waited for {self.waited_for}{count}"
        )


def read_failure(words: Sequence[int]) -> Failure | None:
    """Decode the 16 words of the field, signed or not; None if no wait was given up.

    After a failure the buffer's counters are of no use, and a launch returns at once, without a
    result: all ranks call ``SymmBuffer.clear`` before the next one.
    """
    wait, rank, cta, thread, tile, peer, expected, found, complete = (
        word & 0xFFFFFFFF for word in words[:9]
    )
    if wait == 0:
        return None
    stage, waited_for = WAITS[wait] if wait < len(WAITS) else ("unknown", f"wait {wait}")
    return Failure(
        stage,
        waited_for.format(peer=peer),
        rank,
        cta,
        thread,
        _or_none(tile),
        _or_none(peer),
        expected,
        found,
        complete == 1,
    )


def _or_none(word: int) -> int | None:
    return None if word == 0xFFFFFFFF else word
