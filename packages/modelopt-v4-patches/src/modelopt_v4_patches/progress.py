"""Bytes, rate and time left: a bar if a person is looking, a log line now and then if not."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nvfp4_codec.checkpoint.writer import Advance

_EVERY_S = 10.0
_AT_ONCE_S = 1.0

_log = logging.getLogger(__name__)


@contextmanager
def progress(label: str, total: int) -> Iterator[Advance]:
    """Shows how much of ``total`` bytes is done, on standard error or in the log."""
    if not sys.stderr.isatty():
        yield LogLines(label, total).advance
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)


class LogLines:
    """A log line each ten seconds; rate and time left are those of the last five minutes."""

    def __init__(self, label: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._label = label
        self._total = total
        self._clock = clock
        self._done = 0
        self._start = self._said = clock()
        self._samples = deque([(self._start, 0)], maxlen=30)

    def advance(self, count: int) -> None:
        """``count`` more bytes are done."""
        self._done += count
        now = self._clock()
        if now - self._start < _AT_ONCE_S:
            # what a resumed run finds finished is reported at once, and says nothing of speed
            self._samples[0] = (now, self._done)
        if now - self._said < _EVERY_S:
            return
        self._said = now
        then, before = self._samples[0]
        self._samples.append((now, self._done))
        rate = (self._done - before) / (now - then)
        left = f", {_duration((self._total - self._done) / rate)} left" if rate > 0 else ""
        _log.info(
            "%s: %.2f of %.2f GB, %.3f GB/s%s",
            self._label, self._done / 1e9, self._total / 1e9, rate / 1e9, left,
        )  # fmt: skip


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
