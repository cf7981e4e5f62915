"""SHA-256 of a file while it is being written, without a pass over it afterwards.

Tensors may be written in any order, SHA-256 needs one: a thread follows the part of the file
that is whole from its start, reading it back from the page cache. Both the reading and the
hashing run outside Python's lock, so the next bytes are copied meanwhile.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from typing import Final

_PIECE: Final = 1 << 18  # stays in a core's cache between the read and the hash


class FileDigest:
    """Follows the writer of ``fd``; the descriptor stays open until ``result`` or ``stop``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._sha256 = hashlib.sha256()
        self._whole = 0  # every byte before it is written
        self._ahead: dict[int, int] = {}
        self._last = False
        self._stopped = False
        self._error: OSError | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._follow, name="sha256", daemon=True)
        self._thread.start()

    def wrote(self, begin: int, end: int) -> None:
        """The file's bytes from ``begin`` to ``end`` are final; ranges come in any order."""
        if begin == end:
            return
        with self._changed:
            self._ahead[begin] = end
            while (then := self._ahead.pop(self._whole, None)) is not None:
                self._whole = then
            self._changed.notify()

    def result(self) -> str:
        """The digest in hexadecimal, once all that was written is hashed. Raises OSError."""
        self._end()
        if self._error is not None:
            raise self._error
        return self._sha256.hexdigest()

    def stop(self) -> None:
        """Ends the thread without a result."""
        self._stopped = True
        self._end()

    def _end(self) -> None:
        with self._changed:
            self._last = True
            self._changed.notify()
        self._thread.join()

    def _follow(self) -> None:
        view, done = memoryview(bytearray(_PIECE)), 0
        try:
            while not self._stopped:
                with self._changed:
                    while not (self._last or self._whole > done):
                        self._changed.wait()
                    whole = self._whole
                if whole == done:
                    return
                while done < whole and not self._stopped:
                    got = os.preadv(self._fd, [view[: whole - done]], done)
                    if got == 0:
                        raise OSError(errno.EIO, "the file shrank while it was being written")
                    self._sha256.update(view[:got])
                    done += got
        except OSError as error:
            self._error = error
