"""New headers and JSON files for a checkpoint without copying it, safe against a kill.

Before anything changes, a journal in the same folder holds the old and the new bytes of all that
will: the headers, which are equally long, and the small files. Each header is then one write, in
a place that the journal knows. Whatever an interruption leaves, writing all new bytes gives the
finished checkpoint, and writing all old ones the original; the journal goes last.

The journal is itself a safetensors file, so that its reader checks it and its writer makes it
appear whole or not at all.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from nvfp4_codec.checkpoint import Checkpoint, ShardWriter
from nvfp4_codec.checkpoint.files import open_regular
from nvfp4_codec.checkpoint.header import Layout, TensorSpec, shown
from nvfp4_codec.checkpoint.writer import (
    Fault,
    no_fault,
    sync_folder,
    write_error,
    write_small,
    written_as,
)
from nvfp4_codec.errors import CheckpointError

JOURNAL_NAME: Final = ".dsv4-finalize.journal"
_HEADERS, _DOCUMENTS = "header/", "document/"
_SECTOR: Final = 512  # what a disk writes whole


def is_interrupted(folder: Path) -> bool:
    """Whether a run in this folder was killed before its end."""
    return (folder / JOURNAL_NAME).exists()


def relabel_in_place(
    source: Checkpoint,
    layouts: Mapping[str, Layout],
    documents: Mapping[str, bytes],
    *,
    fault: Fault = no_fault,
) -> None:
    """Writes each file's new header over its old one, and the small files; under ``locked``.

    Raises CheckpointError, with nothing changed, if a header does not fit, a file has another name
    elsewhere (a link), or the disk is full.
    """
    old: dict[str, bytes] = {}
    new: dict[str, bytes] = {}
    for file, layout in layouts.items():
        _check_own(source.paths[file], file)
        length = source.headers[file].data_offset
        if len(layout.header) != length:
            raise CheckpointError(
                f"the new header has {len(layout.header)} bytes, the old one {length}: it does not "
                "fit. Write to a new folder instead.",
                file=shown(file),
            )
        before = os.pread(source.fd(file), length, 0)
        if before != layout.header:
            old[_HEADERS + file], new[_HEADERS + file] = before, layout.header
    for name, data in documents.items():
        path = source.root / name
        if path.exists():
            _check_own(path, name)
            before = path.read_bytes()
            if before == data:
                continue
            old[_DOCUMENTS + name] = before
        new[_DOCUMENTS + name] = data
    if not new:
        return
    _write_journal(source, old, new, fault)
    _apply(source.root, undo=False, fault=fault)


def finish(folder: Path, *, undo: bool = False, fault: Fault = no_fault) -> None:
    """Completes an interrupted run, or takes it back with ``undo``; under ``locked``.

    Raises CheckpointError if there is none, or a file was changed by somebody else since.
    """
    if not is_interrupted(folder):
        raise CheckpointError(
            f"holds no {JOURNAL_NAME}: no run in place was interrupted here; a finished one cannot "
            "be undone.",
            file=shown(str(folder)),
        )
    _apply(folder, undo=undo, fault=fault)


def _check_own(path: Path, file: str) -> None:
    if path.is_symlink() or path.stat().st_nlink > 1:
        raise CheckpointError(
            "is a link, or has a second name: writing into it would change another folder, such as "
            "a download cache. Write to a new folder instead.",
            file=shown(file),
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps others from changing the folder in place; CheckpointError if one is at it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise CheckpointError(
            "another process is changing this checkpoint; wait for it.", file=shown(str(folder))
        ) from None
    finally:
        os.close(fd)


def _write_journal(
    source: Checkpoint, old: Mapping[str, bytes], new: Mapping[str, bytes], fault: Fault
) -> None:
    path = source.root / JOURNAL_NAME
    for leftover in source.root.iterdir():
        if written_as(leftover.name) == JOURNAL_NAME:
            leftover.unlink()
    contents = {f"old/{name}": data for name, data in old.items()}
    contents |= {f"new/{name}": data for name, data in new.items()}
    sizes = {file: os.fstat(source.fd(file)).st_size for file in source.paths}
    metadata = {"format": "dsv4-finalize-journal", "sizes": json.dumps(sizes)}
    specs = [TensorSpec(name, "U8", (len(data),)) for name, data in contents.items()]
    with ShardWriter(path, specs, metadata, fault=fault) as writer:
        for name, data in contents.items():
            writer.write(name, data)
        writer.commit()


def _apply(folder: Path, *, undo: bool, fault: Fault) -> None:
    """Brings every file of the journal to its new state, or its old one; then drops it."""
    path = folder / JOURNAL_NAME
    with Checkpoint(folder, {JOURNAL_NAME: path}, is_folder=False) as journal:
        sizes = json.loads(journal.headers[JOURNAL_NAME].metadata["sizes"])
        wanted, other = ("old/", "new/") if undo else ("new/", "old/")
        names = {name.removeprefix("new/") for name in journal.tensors if name.startswith("new/")}
        headers = sorted(name for name in names if name.startswith(_HEADERS))
        for name in headers:
            file = name.removeprefix(_HEADERS)
            states = (journal.read(wanted + name).tobytes(), journal.read(other + name).tobytes())
            _check_unchanged(folder / file, sizes[file], *states)
        for name in headers:
            header = journal.read(wanted + name).tobytes()
            _write_header(folder / name.removeprefix(_HEADERS), header, fault)
        for name in sorted(names.difference(headers)):
            document = folder / name.removeprefix(_DOCUMENTS)
            if wanted + name in journal:
                write_small(document, journal.read(wanted + name).tobytes(), fault)
            else:
                document.unlink(missing_ok=True)
    fault("remove journal")
    path.unlink()
    sync_folder(folder)


def _check_unchanged(path: Path, size: int, wanted: bytes, other: bytes) -> None:
    """Every sector of the header is an old or a new one: the file is the journal's, even if a
    write was torn.
    """
    fd = open_regular(path, path.name)
    try:
        current, found = os.pread(fd, len(wanted), 0), os.fstat(fd).st_size
    finally:
        os.close(fd)
    pieces = [slice(at, at + _SECTOR) for at in range(0, len(wanted), _SECTOR)]
    if found != size or any(current[p] not in (wanted[p], other[p]) for p in pieces):
        raise CheckpointError(
            f"was changed since the interrupted run, which {JOURNAL_NAME} describes; nothing was "
            "written now. Put the file back as it was.",
            file=shown(path.name),
        )


def _write_header(path: Path, header: bytes, fault: Fault) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fault("write header")
        done = 0
        while done < len(header):
            done += os.pwrite(fd, memoryview(header)[done:], done)
        fault("fsync header")
        os.fsync(fd)
    except OSError as error:
        raise write_error(error, path, len(header)) from None
    finally:
        os.close(fd)
