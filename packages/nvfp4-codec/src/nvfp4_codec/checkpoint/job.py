"""Run a planned rewrite of a checkpoint, so that it can be killed and continued.

A job knows every output name, dtype and shape before it starts. It writes a small plan
file first; each shard then appears under its name only when whole (see ``writer``); the
plan file goes last. Continuing compares the plan with the one on disk, so an interrupted
run is never completed with other arguments, another input or another version. What is on
disk under a final name is checked (size and header) and kept; everything else is redone.

Shards are independent: ``run`` writes them here, or hands their names to a ``Spread``, whose
workers make the same job again and call ``write_shard``.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from .. import __version__
from ..errors import CheckpointError
from .files import open_regular, read_small
from .header import Layout, TensorSpec, build_header, shown
from .manifest import RECORDS_NAME, Record, manifest, read_notes
from .names import check_names
from .reader import INDEX_NAME, Checkpoint
from .writer import (
    Advance,
    Fault,
    ShardWriter,
    no_advance,
    no_fault,
    sync_folder,
    write_error,
    write_small,
    written_as,
)

PLAN_NAME: Final = ".nvfp4-progress.json"
_MAX_PLAN_BYTES: Final = 1 << 28

_log = logging.getLogger(__name__)

Step = Callable[[ShardWriter], None]
#: Writes the named shards into a folder, anywhere; yields each name once its file is whole.
Spread = Callable[[Sequence[str], Path], Iterator[str]]


@dataclass(frozen=True)
class Shard:
    """One output file: what it holds and the steps that fill it, in order.

    adopted: the layout of a file that a step takes over from the source (``ShardWriter.adopt``).
    """

    file: str
    specs: tuple[TensorSpec, ...]
    steps: tuple[Step, ...]
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})
    adopted: Layout | None = None

    @cached_property
    def layout(self) -> Layout:
        """Its header and where each tensor goes."""
        return self.adopted or build_header(self.specs, self.metadata)


@dataclass(frozen=True)
class Job:
    """A rewrite. ``arguments`` are what the output bytes depend on besides the input.

    manifest: the name of a JSON file, written last into an output folder, with every file's
    size and SHA-256 and the notes of the steps (``ShardWriter.note``). None: there is none.
    """

    command: str
    arguments: Mapping[str, Any]
    source: Checkpoint
    shards: tuple[Shard, ...]
    documents: Mapping[str, bytes] = field(default_factory=dict)
    manifest: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the output: what ``advance`` adds up to."""
        return sum(_data_bytes(shard) for shard in self.shards)


@dataclass(frozen=True)
class Outcome:
    """Files written by this run, files kept from an earlier one, and bytes in total.

    notes: those of the manifest, of all shards; empty if the job has none.

    complete_unchecked: the output was found complete. Its names, headers, sizes and small
    files are what this run would write, but the values cannot be compared: the run that wrote
    them has removed its plan, so it may have had another input or other arguments.
    """

    written: tuple[str, ...]
    kept: tuple[str, ...]
    nbytes: int
    complete_unchecked: bool = False
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Target:
    """Where a job writes: the shards under their final names, relative to ``folder``.

    records: the folder of the shards' records, there if and only if ``manifest`` is.
    """

    folder: Path
    plan: Path
    shards: tuple[Shard, ...]
    documents: Mapping[str, bytes]
    manifest: Path | None = None
    records: Path | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the manifest, which is written last, is there."""
        return self.manifest is not None and self.manifest.exists()

    def is_done(self, shard: Shard) -> bool:
        """Whether the shard has its name and, where that is asked for, its record."""
        if not (self.folder / shard.file).exists():
            return False
        if self.records is None:
            return True
        record = Record.read(self.records, shard.file)
        if record is None:
            return False
        stat = (self.folder / shard.file).stat()
        if (stat.st_size, stat.st_mtime_ns) == (record.bytes, record.modified_ns):
            return True
        _log.warning("%s was changed after it was written: written again", shown(shard.file))
        return False


def run(
    job: Job,
    output: Path,
    *,
    resume: bool = False,
    fault: Fault = no_fault,
    advance: Advance = no_advance,
    spread: Spread | None = None,
) -> Outcome:
    """Writes the job's checkpoint to ``output``: a folder, or one file ending in .safetensors.

    spread: who writes the shards of a folder; None writes them here, in order. What a spread
    shard did is seen at its end only: ``advance`` gets all its bytes, ``fault`` nothing.

    Raises CheckpointError if the output exists (unless ``resume``), lies in the input, or
    belongs to another run; if the disk is full; if the input cannot be read.
    """
    target = _target(job, output)
    small = [*target.documents, *([target.manifest.name] if target.manifest is not None else [])]
    check_names((target.plan.name, RECORDS_NAME), target.shards, small)
    plan = _plan(job, target)
    with _exclusive(target.folder, output):
        if _claim(target, output, plan, resume, fault):
            _log.warning(
                "%s holds no %s: it is complete, or was not made by nvfp4; nothing was changed. "
                "Headers and sizes fit this run; input and arguments could not be compared.",
                shown(str(output)),
                target.plan.name,
            )
            kept = tuple(shard.file for shard in target.shards)
            notes = read_notes(target.manifest) if target.manifest is not None else {}
            return Outcome((), kept, 0, complete_unchecked=True, notes=notes)
        lock = _lock(target, output)
    try:
        outcome = _write(target, fault, advance, spread if target.folder == output else None)
        fault("remove plan")
        with _exclusive(target.folder, output):
            target.plan.unlink()
            sync_folder(target.folder)
        return outcome
    finally:
        os.close(lock)


@contextmanager
def _exclusive(folder: Path, output: Path) -> Iterator[None]:
    """Holds a lock on the folder while a plan in it is looked at and made, or removed.

    Two processes can then not both find no plan and claim the output.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise CheckpointError(
            "exists already, or lies below a file; a folder is needed there. Choose another "
            "output.",
            file=shown(str(output)),
        ) from None
    except OSError as error:
        raise write_error(error, output, 0) from None
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _lock(target: _Target, output: Path) -> int:
    """A descriptor that keeps the plan locked: the output is ours until it is closed."""
    lock = open_regular(target.plan, target.plan.name)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise CheckpointError(
            "another process is writing this output; wait for it.", file=shown(str(output))
        ) from None
    return lock


def write_shard(
    job: Job,
    file: str,
    folder: Path,
    *,
    fault: Fault = no_fault,
    advance: Advance = no_advance,
) -> None:
    """Writes one shard of a job whose plan is in ``folder``; what a worker of a Spread calls."""
    shard = next(shard for shard in job.shards if shard.file == file)
    _write_shard(shard, folder, folder / RECORDS_NAME if job.manifest else None, fault, advance)


def _write_shard(
    shard: Shard, folder: Path, records: Path | None, fault: Fault, advance: Advance
) -> None:
    path = folder / shard.file
    path.parent.mkdir(parents=True, exist_ok=True)
    with ShardWriter(
        path,
        shard.specs,
        shard.metadata,
        layout=shard.adopted,
        digest=records is not None,
        fault=fault,
        advance=advance,
    ) as writer:
        for step in shard.steps:
            step(writer)
        sha256 = writer.seal()
        if records is not None:
            assert sha256 is not None
            modified_ns = writer.temp.stat().st_mtime_ns  # the rename does not change it
            record = Record(shard.layout.size, sha256, modified_ns, writer.notes)
            record.write(records, shard.file, fault)
        writer.commit()


def _write(target: _Target, fault: Fault, advance: Advance, spread: Spread | None) -> Outcome:
    _sweep(target)
    nbytes = sum(shard.layout.size for shard in target.shards)
    kept, pending = [], {}
    complete = target.is_complete
    for shard in target.shards:
        if complete or target.is_done(shard):
            _check_finished(shard, target.folder / shard.file)
            kept.append(shard.file)
            advance(_data_bytes(shard))
        else:
            pending[shard.file] = shard
    if pending and target.records is not None:
        target.records.mkdir(exist_ok=True)
    if spread is None:
        for shard in pending.values():
            _write_shard(shard, target.folder, target.records, fault, advance)
    elif pending:
        _write_elsewhere(target, pending, advance, spread)
    for name, data in target.documents.items():
        path = target.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_small(path, data, fault)
    notes = _write_manifest(target, fault)
    return Outcome(tuple(pending), tuple(kept), nbytes, notes=notes)


def _write_elsewhere(
    target: _Target, pending: Mapping[str, Shard], advance: Advance, spread: Spread
) -> None:
    """Has the pending shards written, and looks at each: a worker may be on another machine."""
    left = dict(pending)
    for file in spread(tuple(pending), target.folder):
        shard = left.pop(file)
        _check_finished(shard, target.folder / file)
        advance(_data_bytes(shard))
    if left:
        raise CheckpointError(
            f"{len(left)} shards were not written, the first is this one. Run the same command "
            "with --resume.",
            file=shown(next(iter(left))),
        )
    _sweep(target)


def _write_manifest(target: _Target, fault: Fault) -> Mapping[str, Any]:
    if target.manifest is None or target.records is None:
        return {}
    if not target.is_complete:
        records = {}
        for shard in target.shards:
            record = Record.read(target.records, shard.file)
            assert record is not None  # is_done, or written just now
            records[shard.file] = record
        write_small(target.manifest, json_bytes(manifest(records, target.documents)), fault)
    fault("remove records")
    shutil.rmtree(target.records, ignore_errors=True)
    return read_notes(target.manifest)


def _sweep(target: _Target) -> None:
    """Removes what killed processes left of this output's files."""
    for path in _leftovers(target):
        path.unlink(missing_ok=True)


def _leftovers(target: _Target) -> Iterator[Path]:
    finals = [target.folder / shard.file for shard in target.shards]
    finals += [target.folder / name for name in target.documents]
    finals += [path for path in (target.plan, target.manifest) if path is not None]
    ours = set(finals)
    for folder in {path.parent for path in finals}:
        for path in list(folder.iterdir()) if folder.is_dir() else ():
            name = written_as(path.name)
            if name is not None and folder / name in ours:
                yield path


def _data_bytes(shard: Shard) -> int:
    return sum(spec.nbytes for spec in shard.specs)


def _check_room(target: _Target, output: Path) -> None:
    """A disk too small for the whole output is known before anything is written."""
    missing = [shard for shard in target.shards if not (target.folder / shard.file).exists()]
    # an adopted file may share its blocks with the source, and then needs none
    needed = sum(shard.layout.size for shard in missing if shard.adopted is None)
    stats = os.statvfs(target.folder)
    free = stats.f_bavail * stats.f_frsize
    free += sum(path.stat().st_blocks * 512 for path in _leftovers(target))  # swept before writing
    if 0 < free < needed:  # some file systems report 0
        raise CheckpointError(
            f"the disk is full: {needed} bytes are needed for the {len(missing)} files still to "
            f"be written, {free} are free. Make room, or choose an output on another disk.",
            file=shown(str(output)),
        )


def _target(job: Job, output: Path) -> _Target:
    """Where things go; refuses an output that could touch the input."""
    source = job.source
    if output.suffix == ".safetensors":
        if len(job.shards) != 1:
            raise CheckpointError(
                f"is one file, the checkpoint has {len(job.shards)}; give a folder as output.",
                file=shown(str(output)),
            )
        plan = output.with_name(f".{output.name}{PLAN_NAME}")
        target = _Target(output.parent, plan, (replace(job.shards[0], file=output.name),), {})
    else:
        documents = dict(job.documents)
        if len(job.shards) > 1 or source.index is not None:
            documents[INDEX_NAME] = _index(job)
        target = _Target(output, output / PLAN_NAME, job.shards, documents)
        if job.manifest is not None:
            path, records = output / job.manifest, output / RECORDS_NAME
            target = replace(target, manifest=path, records=records)
    real, home = _real(output), _real(source.root)
    inside = real.is_relative_to(home) if source.is_folder else real == home
    inputs = {_real(path) for path in source.paths.values()}
    finals = {_real(target.folder / shard.file) for shard in target.shards}
    if inside or finals & inputs:
        raise CheckpointError(
            f"is in the input {shown(str(source.root))}, or is the input itself; the input is "
            "never touched. Choose an output elsewhere.",
            file=shown(str(output)),
        )
    return target


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _index(job: Job) -> bytes:
    files = {spec.name: shard.file for shard in job.shards for spec in shard.specs}
    total = sum(spec.nbytes for shard in job.shards for spec in shard.specs)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    return json_bytes(document)


def json_bytes(document: object) -> bytes:
    """JSON as written into a checkpoint folder: indented, UTF-8, newline at the end."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _plan(job: Job, target: _Target) -> dict[str, Any]:
    """What must be equal for two runs to give the same bytes."""
    source = {}
    for file, header in job.source.headers.items():
        fd = job.source.fd(file)
        stat = os.fstat(fd)
        head = os.pread(fd, header.data_offset, 0)
        source[file] = {
            "bytes": stat.st_size,
            "modified_ns": stat.st_mtime_ns,
            "header_sha256": hashlib.sha256(head).hexdigest(),
        }
    outputs = {}
    for shard in target.shards:
        outputs[shard.file] = hashlib.sha256(shard.layout.header).hexdigest()
    documents = {n: hashlib.sha256(d).hexdigest() for n, d in target.documents.items()}
    return {
        "nvfp4_codec": __version__,
        "command": job.command,
        "arguments": json.loads(json.dumps(dict(job.arguments), sort_keys=True)),
        "input": source,
        "output_headers": outputs,
        "documents": documents,
        "manifest": job.manifest,
    }


def _claim(target: _Target, output: Path, plan: dict[str, Any], resume: bool, fault: Fault) -> bool:
    """Makes the output ours by writing the plan; True if there is nothing left to do."""
    shown_output = shown(str(output))
    if not target.plan.exists():
        finals = [target.folder / shard.file for shard in target.shards]
        if target.plan.name == PLAN_NAME:
            occupied = output.exists() and (
                not output.is_dir()
                or any(written_as(item.name) != PLAN_NAME for item in output.iterdir())
            )
        else:
            occupied = output.exists()
        if occupied and not resume:
            raise CheckpointError(
                "exists already and is not overwritten. Choose another output, remove it, or "
                "pass --resume if it is an interrupted run.",
                file=shown_output,
            )
        if occupied:
            if not all(path.is_file() for path in finals):
                raise CheckpointError(
                    f"holds no {target.plan.name}, so it is not an interrupted run of this "
                    "command; nothing was changed. Choose another output.",
                    file=shown_output,
                )
            for shard, path in zip(target.shards, finals, strict=True):
                _check_finished(shard, path)
            small: dict[str, bytes | None] = dict(target.documents)
            if target.manifest is not None:
                small[target.manifest.name] = None  # what it says of the values is unknown here
            for name, data in small.items():
                path = target.folder / name
                if not path.is_file() or (data is not None and path.read_bytes() != data):
                    raise CheckpointError(
                        "the run was complete, but this file is not what it wrote; nothing was "
                        "changed. Choose another output.",
                        file=shown(str(path)),
                    )
            return True
        _check_room(target, output)
        write_small(target.plan, json.dumps(plan, indent=2).encode(), fault)
        return False
    if not resume:
        raise CheckpointError(
            "is an interrupted run. Pass --resume to continue it, or remove it.", file=shown_output
        )
    try:
        earlier: Any = json.loads(read_small(target.plan, _MAX_PLAN_BYTES, target.plan.name))
    except (ValueError, RecursionError, CheckpointError):
        earlier = None
    if earlier != plan:
        known = isinstance(earlier, dict)
        differing = [key for key in plan if not known or earlier.get(key) != plan[key]]
        raise CheckpointError(
            f"the interrupted run differs in: {', '.join(differing) or 'unknown fields'}. Repeat "
            "its arguments on its unchanged input, or remove the output and start anew.",
            file=shown(target.plan.name),
        )
    _check_room(target, output)
    return False


def _check_finished(shard: Shard, path: Path) -> None:
    """A file under its final name must be what this job writes there."""
    head = shard.layout.header
    with os.fdopen(open_regular(path, str(path)), "rb") as file:
        same = file.read(len(head)) == head and os.fstat(file.fileno()).st_size == shard.layout.size
    if not same:
        raise CheckpointError(
            "has another size or header than this run writes: it was changed since, or written "
            "with other arguments. Repeat those, or remove the output and start anew.",
            file=shown(str(path)),
        )
