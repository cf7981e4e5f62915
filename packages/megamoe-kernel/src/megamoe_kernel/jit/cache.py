"""Compiled kernels on disk, by what they were made of.

An entry's name is the hash of everything that decides its content, so nothing is ever stale. A
cubin runs with the rights of this process: the folder must belong to this user and be closed to
others, and an entry is used only if its hash is right. Processes may share the folder: one compiles
while the others wait, and an entry appears whole or not at all.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from ..errors import CacheError

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "MEGAMOE_KERNEL_CACHE"
#: Of the key and of the entry's form; a change leaves old entries alone.
VERSION = 1
_MAGIC = b"megamoe-cubin "


@cache
def default_folder() -> Path:
    """$MEGAMOE_KERNEL_CACHE, else megamoe-kernel in the user's cache folder. Read once.

    A relative XDG_CACHE_HOME is ignored, as its specification demands. Raises CacheError where
    there is no home folder to put it in.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        if chosen:
            return Path(chosen).expanduser()
        if not base.is_absolute():
            base = Path.home() / ".cache"
    except RuntimeError as error:
        raise CacheError(
            f"no folder for compiled kernels: {error}; set {CACHE_VARIABLE} to a folder of yours, "
            "by its absolute path"
        ) from error
    return base / "megamoe-kernel"


class CubinCache:
    """A folder of cubins.

    Made with mode 0700 if it is missing, and so are folders on the way to it. Raises CacheError if
    it is a link, belongs to another user, or lets others in; so does ``get`` for an entry, and
    where it cannot read or write.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        try:
            _make_private(self.folder)
            found = self.folder.lstat()
        except OSError as error:
            raise CacheError(
                f"cannot use {self.folder} for compiled kernels: {error.strerror}; set "
                f"{CACHE_VARIABLE} to a folder of yours"
            ) from error
        _check_mine(self.folder, found, stat.S_ISDIR, "a folder")

    def get(self, parts: Mapping[str, str], make: Callable[[], bytes]) -> tuple[bytes, bool]:
        """The cubin made of these parts, and whether it was here already."""
        key = key_of(parts)
        if (cubin := self._read(key)) is not None:
            return cubin, True
        with self._lock(key):
            # Another process may have been faster.
            if (cubin := self._read(key)) is not None:
                return cubin, True
            cubin = make()
            self._write(key, parts, cubin)
            return cubin, False

    def path(self, parts: Mapping[str, str]) -> Path:
        """Where the entry of these parts is, or would be."""
        return self.folder / f"{key_of(parts)}.cubin"

    def _read(self, key: str) -> bytes | None:
        path = self.folder / f"{key}.cubin"
        # Not blocking: a FIFO in an entry's place would make it wait for ever.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheError(f"cannot read {path}: {error.strerror}; remove it") from error
        try:
            _check_mine(path, os.fstat(descriptor), stat.S_ISREG, "a file")
            with open(descriptor, "rb", closefd=False) as file:
                head, _, cubin = file.read().partition(b"\n")
        finally:
            os.close(descriptor)
        if head != _head(key, cubin):
            logger.warning("%s is damaged; the kernel is compiled again", path)
            return None
        return cubin

    def _write(self, key: str, parts: Mapping[str, str], cubin: bytes) -> None:
        """Whole or not at all: a temporary file that is renamed. Beside it, what it is made of."""
        readable = json.dumps({"version": VERSION, **parts}, indent=1).encode()
        for name, content in (
            (f"{key}.json", readable),
            (f"{key}.cubin", _head(key, cubin) + b"\n" + cubin),
        ):
            try:
                _replace(self.folder / name, content)
            except OSError as error:
                raise _cannot_write(self.folder / name, error) from error

    @contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        path = self.folder / f"{key}.lock"
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise _cannot_write(path, error) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                # Some network file systems. Entries still appear whole; only work is done twice.
                logger.warning("%s cannot be locked: %s", self.folder, error.strerror)
            yield
        finally:
            os.close(descriptor)


def _make_private(folder: Path) -> None:
    """The folder, and whatever is missing above it, closed to others."""
    # Not parents=True, which gives parents the umask's mode.
    for missing in reversed([path for path in folder.parents if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def key_of(parts: Mapping[str, str]) -> str:
    """A hash of the parts, names included."""
    ordered = json.dumps([VERSION, sorted(parts.items())])
    return hashlib.sha256(ordered.encode()).hexdigest()


def _head(key: str, cubin: bytes) -> bytes:
    """The first line of an entry; with the key, so that entries cannot change places."""
    digest = hashlib.sha256(key.encode() + cubin).hexdigest()
    return _MAGIC + f"{VERSION} {digest}".encode()


def _replace(path: Path, content: bytes) -> None:
    # mkstemp makes files that only this user can read or write.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _cannot_write(path: Path, error: OSError) -> CacheError:
    if error.errno in (errno.EISDIR, errno.ELOOP):
        fix = "a folder or link is in its place, remove it"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = f"make room there, or set {CACHE_VARIABLE} to a folder of yours on another disk"
    else:
        fix = f"set {CACHE_VARIABLE} to a folder that this process can write"
    return CacheError(f"cannot write {path}: {error.strerror}; {fix}")


def _is_shared(folder: Path, found: os.stat_result) -> bool:
    """Whether more than a cache is in there, so that closing it would shut others out."""
    ours = (".cubin", ".json", ".lock")
    return (
        bool(found.st_mode & stat.S_ISVTX)
        or folder == Path()
        or any(entry.suffix not in ours for entry in folder.iterdir())
    )


def _check_mine(
    path: Path, found: os.stat_result, is_kind: Callable[[int], bool], kind: str
) -> None:
    if not is_kind(found.st_mode):
        raise CacheError(f"{path} is not {kind}; remove it, or set {CACHE_VARIABLE}")
    if found.st_uid != os.geteuid():
        raise CacheError(
            f"{path} belongs to user {found.st_uid}, this process runs as {os.geteuid()}; set "
            f"{CACHE_VARIABLE} to a folder of yours"
        )
    if mode := stat.S_IMODE(found.st_mode) & 0o077:
        fix = f"Set {CACHE_VARIABLE} to a folder of yours"
        if stat.S_ISREG(found.st_mode):
            fix = "Remove it"
        elif _is_shared(path, found):
            fix += " that holds nothing else; it is made if it is missing"
        else:
            fix += f", or: chmod go= {path}"
        raise CacheError(
            f"{path} is open to others (mode {stat.S_IMODE(found.st_mode):04o}, expected no bits "
            f"of {mode:04o}); whoever can write there can run code here. {fix}"
        )
