"""Write one safetensors file so that a kill at any moment loses nothing.

The header is complete before the first data byte, so tensors can be filled in any order
at their final place in a temporary file; then fsync, rename, fsync of the folder. A file
under its final name is therefore always whole.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from ..errors import CheckpointError
from .digest import FileDigest
from .header import Layout, TensorSpec, build_header, shown
from .reader import Bytes, Checkpoint, TensorInfo

if TYPE_CHECKING:
    import torch

TEMP_SUFFIX: Final = ".nvfp4-tmp"
_TEMP: Final = re.compile(rf"\.(?:[0-9a-f]{{8}}\.)?(.+){re.escape(TEMP_SUFFIX)}", re.DOTALL)
_COPY_CHUNK: Final = 1 << 27
_WRITE_CHUNK: Final = 1 << 30

#: Called with a step's name before it happens; tests raise or kill in it.
Fault = Callable[[str], None]
Advance = Callable[[int], None]


def no_fault(step: str) -> None:
    """The fault hook of normal operation."""


def no_advance(count: int) -> None:
    """The progress hook of a silent run."""


def temp_path(path: Path) -> Path:
    """Where a file is written before it gets its name: a new place at each call.

    A worker that was given up may still be writing; it must not share a file with the next.
    """
    return path.with_name(f".{secrets.token_hex(4)}.{path.name}{TEMP_SUFFIX}")


def written_as(name: str) -> str | None:
    """The final name of the file that a temporary name was made for; None for other names."""
    match = _TEMP.fullmatch(name)
    return match[1] if match else None


class ShardWriter:
    """Fills one file; use as a context manager, then ``commit``.

    Every tensor of ``specs`` must be written exactly once. Leaving the context without
    ``commit`` removes the temporary file. layout: where things go, if not where ``build_header``
    puts them; ``adopt`` must follow. digest: compute the file's SHA-256 while writing.
    """

    def __init__(
        self,
        path: Path,
        specs: Iterable[TensorSpec],
        metadata: Mapping[str, str] | None = None,
        *,
        layout: Layout | None = None,
        digest: bool = False,
        fault: Fault = no_fault,
        advance: Advance = no_advance,
    ) -> None:
        self.path = path
        self.temp = temp_path(path)
        self.specs = {spec.name: spec for spec in specs}
        self._adopts = layout is not None
        layout = layout or build_header(self.specs.values(), metadata)
        self.ranges, self.size = layout.ranges, layout.size
        self._header = layout.header
        self.notes: dict[str, Any] = {}
        self._missing = set(self.ranges)
        self._sealed = False
        self._last_copies: list[tuple[int, Checkpoint, TensorInfo]] = []
        self._digest: FileDigest | None = None
        self._fault = fault
        self._advance = advance
        self._kernel_copy = hasattr(os, "copy_file_range")
        fault("open")
        with self._reported():
            self._fd = os.open(self.temp, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            if not self._adopts:
                self._check_space()
            if digest:
                self._digest = FileDigest(self._fd)
            if not self._adopts:
                self._write_at(self._header, 0)
        except BaseException:
            self._abandon()
            raise

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._abandon()

    def _abandon(self) -> None:
        if self._digest is not None:
            self._digest.stop()
            self._digest = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            with suppress(OSError):
                self.temp.unlink()

    def write(self, name: str, data: Bytes | bytes) -> None:
        """Writes a whole tensor from bytes or a flat uint8 array."""
        begin, end = self._claim(name)
        view = memoryview(data) if isinstance(data, bytes) else data.data
        if len(view) != end - begin:
            raise CheckpointError(
                f"{len(view)} bytes were produced, {end - begin} were announced.",
                file=shown(self.path.name),
                tensor=shown(name),
            )
        self._write_at(view, begin)
        self._advance(len(view))

    def write_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Writes a torch tensor after comparing its dtype's size and shape with the spec."""
        import torch

        spec = self.specs[name]
        if tuple(tensor.shape) != spec.shape:
            raise CheckpointError(
                f"shape {tuple(tensor.shape)} was produced, {spec.shape} was announced.",
                file=shown(self.path.name),
                tensor=shown(name),
            )
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self.write(name, flat.numpy())

    def note(self, name: str, value: Any) -> None:
        """Adds a JSON value to the job's manifest, if it has one; a name has one note."""
        if name in self.notes:
            raise CheckpointError(
                "was noted twice.", file=shown(self.path.name), tensor=shown(name)
            )
        self.notes[name] = value

    def copy(self, name: str, source: Checkpoint, info: TensorInfo, *, last: bool = False) -> None:
        """Copies a tensor's bytes verbatim, inside the kernel where it can.

        last: when all else is written, in the order of the file. Worth it for most of a file's
        bytes: all before them is then whole, and the digest keeps step with the copying.
        """
        begin, end = self._claim(name)
        if info.nbytes != end - begin:
            raise CheckpointError(
                f"{info.nbytes} bytes in the source, {end - begin} were announced.",
                file=shown(info.file),
                tensor=shown(info.name),
            )
        if last:
            self._last_copies.append((begin, source, info))
        else:
            self._transfer(source, info, begin)

    def adopt(self, source: Checkpoint, file: str, but: Collection[str] = ()) -> bool:
        """Takes over all data of a source file, as it lies there, under this file's header.

        The new layout must come from ``header.relabel``. Returns True if the two files now share
        their blocks on disk: that needs a file system with reflinks and equally long headers.
        ``but``: tensors that the caller writes afterwards.
        """
        start, length = len(self._header), self.size - len(self._header)
        offset = source.headers[file].data_offset
        found = os.fstat(source.fd(file)).st_size - offset
        if found != length:
            raise CheckpointError(
                f"{found} bytes of data in the source, {length} were announced.", file=shown(file)
            )
        self._fault("write")
        shared = offset == start and share_blocks(source.fd(file), self._fd)
        if shared:
            self._advance(length)
        else:
            self._check_space()
            whole = TensorInfo(file, "U8", (length,), file, offset, length)
            self._transfer(source, whole, start, digest=False)
        self._write_at(self._header, 0)
        for name in [name for name in self._missing if name not in but]:
            self._wrote(*self._claim(name))
        return shared

    def _transfer(
        self, source: Checkpoint, info: TensorInfo, begin: int, *, digest: bool = True
    ) -> None:
        fd, done = source.fd(info.file), 0
        while done < info.nbytes:
            count = min(_COPY_CHUNK, info.nbytes - done)
            self._fault("write")
            got = self._copy_some(fd, info, begin, done, count)
            if got == 0:
                raise CheckpointError(
                    "reading failed: the file ends early; it shrank after it was opened. "
                    "Fetch it again.",
                    file=shown(info.file),
                    tensor=shown(info.name),
                )
            self._start_writeback(begin + done, got)
            if digest:
                self._wrote(begin + done, begin + done + got)
            done += got
            self._advance(got)

    def _start_writeback(self, offset: int, count: int) -> None:
        """Lets the disk begin now; it would idle until the fsync. Linux does not wait here."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._fd, offset, count, os.POSIX_FADV_DONTNEED)

    def _copy_some(self, fd: int, info: TensorInfo, begin: int, done: int, count: int) -> int:
        if self._kernel_copy:
            try:
                return os.copy_file_range(fd, self._fd, count, info.offset + done, begin + done)
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY:
                    raise self._error(error, f" while copying {shown(info.name)}") from None
                self._kernel_copy = False  # another file system, or an old kernel
        try:
            data = os.pread(fd, min(count, 1 << 23), info.offset + done)
        except OSError as error:
            raise CheckpointError(
                f"reading failed: {error.strerror}. Check the disk, or fetch the file again.",
                file=shown(info.file),
                tensor=shown(info.name),
            ) from None
        self._pwrite(data, begin + done)
        return len(data)

    def seal(self) -> str | None:
        """Makes the data durable, still under the temporary name; its SHA-256 if asked for.

        Raises CheckpointError if a tensor is missing.
        """
        if self._missing:
            first = min(self._missing)
            raise CheckpointError(
                f"{len(self._missing)} announced tensors were not written, the first is this one.",
                file=shown(self.path.name),
                tensor=shown(first),
            )
        for begin, source, info in sorted(self._last_copies, key=lambda copy: copy[0]):
            self._transfer(source, info, begin)
        with self._reported():
            self._fault("fsync")
            os.fsync(self._fd)  # the digest's thread catches up meanwhile
            self._sealed = True
            return self._digest.result() if self._digest is not None else None

    def commit(self) -> None:
        """Gives the file its name, after ``seal`` if that was not called."""
        if not self._sealed:
            self.seal()
        with self._reported():
            self._fault("rename")
            os.replace(self.temp, self.path)
            os.close(self._fd)
            self._fd = -1
            self._fault("fsync folder")
            sync_folder(self.path.parent)

    def _claim(self, name: str) -> tuple[int, int]:
        if name not in self._missing:
            why = "was written twice" if name in self.ranges else "was not announced"
            raise CheckpointError(why, file=shown(self.path.name), tensor=shown(name))
        self._missing.discard(name)
        return self.ranges[name]

    def _check_space(self) -> None:
        """A full disk is known before any work is done.

        Reserving the space (fallocate) would be certain, but makes the fsync slower.
        """
        stats = os.fstatvfs(self._fd)
        if 0 < stats.f_bavail * stats.f_frsize < self.size:  # some file systems report 0
            raise self._error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def _wrote(self, begin: int, end: int) -> None:
        if self._digest is not None:
            self._digest.wrote(begin, end)

    def _write_at(self, data: bytes | memoryview, offset: int) -> None:
        self._pwrite(data, offset)
        self._wrote(offset, offset + len(data))

    def _pwrite(self, data: bytes | memoryview, offset: int) -> None:
        view, done = memoryview(data), 0
        while done < len(view):
            self._fault("write")
            with self._reported():
                done += os.pwrite(self._fd, view[done : done + _WRITE_CHUNK], offset + done)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Turns an OSError of a write into the CheckpointError that says what to do."""
        try:
            yield
        except OSError as error:
            raise self._error(error) from None

    def _error(self, error: OSError, doing: str = "") -> CheckpointError:
        return write_error(error, self.path, self.size, doing)


def share_blocks(source: int, target: int) -> bool:
    """Makes one open file a copy of another without copying, if the file system can (reflink)."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        return False
    return True


_FICLONE: Final = 0x40049409  # linux/fs.h; fcntl.FICLONE since Python 3.12
_NO_KERNEL_COPY: Final = (
    errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF, errno.EPERM,
)  # fmt: skip


def write_error(error: OSError, path: Path, size: int, doing: str = "") -> CheckpointError:
    """The error for a failed write: how much was needed, how much is free, what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with suppress(OSError):
            stats = os.statvfs(path.parent)
            free = stats.f_bavail * stats.f_frsize
            return CheckpointError(
                f"the disk is full{doing}: this file needs {size} bytes, {free} are free. "
                "Make room, then run the same command again, with --resume if it has that.",
                file=shown(str(path)),
            )
    return CheckpointError(
        f"writing failed{doing}: {error.strerror}. Repair that, then run the same command "
        "again, with --resume if it has that.",
        file=shown(str(path)),
    )


def write_small(path: Path, data: bytes, fault: Fault = no_fault) -> None:
    """Writes a small file the same way: temporary name, fsync, rename, fsync of the folder."""
    temp = temp_path(path)
    try:
        fault("open")
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            view = memoryview(data)
            while len(view):
                fault("write")
                view = view[os.write(fd, view) :]
            fault("fsync")
            os.fsync(fd)
        finally:
            os.close(fd)
        fault("rename")
        os.replace(temp, path)
        fault("fsync folder")
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            temp.unlink()
        raise write_error(error, path, len(data)) from None


def sync_folder(folder: Path) -> None:
    """Makes a rename in the folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
