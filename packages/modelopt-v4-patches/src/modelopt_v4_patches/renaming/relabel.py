"""A checkpoint under other names in a new folder, its data shared with the old one or copied.

Every new file is the old one with another header. If that is no longer than the old header, as
official names make it, and the file system has reflinks (XFS, Btrfs), the two files share all
other blocks: 881 GB take seconds and no room. Otherwise the data is copied inside the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from nvfp4_codec import UnifiedPart
from nvfp4_codec.checkpoint import Checkpoint, ShardWriter
from nvfp4_codec.checkpoint.header import relabel, shown
from nvfp4_codec.checkpoint.job import Job, Outcome, Shard, Step, run
from nvfp4_codec.checkpoint.writer import Fault, share_blocks
from nvfp4_codec.convert import Unified
from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4.recognize import Recognized

from ..progress import progress
from .fused import FusedGroup, with_one_scale


@dataclass(frozen=True)
class Written:
    """What a run wrote. unified: by kind of group, what one weight_scale_2 cost.

    shared: files of this run whose blocks are shared with the source.
    """

    outcome: Outcome
    shared: int
    unified: Mapping[str, Unified]


def relabel_to_folder(
    source: Checkpoint,
    model: Recognized,
    documents: Mapping[str, bytes],
    output: Path,
    unify: Sequence[FusedGroup],
    *,
    resume: bool,
    fault: Fault,
) -> Written:
    """Writes the source's tensors under official names, and the small files.

    unify: groups that get one weight_scale_2. Raises CheckpointError as ``job.run`` does.
    """
    _check_room(source, output)
    worker = _Worker(source, model, unify)
    shards = tuple(worker.shard(file) for file in source.paths)
    job = Job("finalize", {"unify": bool(unify)}, source, shards, documents)
    with progress("finalize", sum(info.nbytes for info in source)) as advance:
        outcome = run(job, output, resume=resume, fault=fault, advance=advance)
    for group in unify:
        worker.measure(group)
    return Written(outcome, worker.shared, worker.unified)


@dataclass
class _Worker:
    """Writes shards: all data adopted, but for the scales of the groups that are unified."""

    source: Checkpoint
    model: Recognized
    groups: Sequence[FusedGroup]
    shared: int = 0
    unified: dict[str, Unified] = field(default_factory=dict)
    _changed: dict[str, dict[FusedGroup, list[str]]] = field(default_factory=dict)
    _measured: set[FusedGroup] = field(default_factory=set)

    def __post_init__(self) -> None:
        for group in self.groups:
            for name in (f"{m}.{p}" for m in group.modules for p in _SCALES):
                groups = self._changed.setdefault(self.model.tensors[name].file, {})
                groups.setdefault(group, []).append(name)

    def shard(self, file: str) -> Shard:
        """The new file of that name."""
        header, names = self.source.headers[file], self.model.names
        specs = tuple(
            replace(self.source.tensors[entry.name].spec, name=names[entry.name])
            for entry in header.entries
        )
        changed = self._changed.get(file, {})
        steps = [self._adopt(file, {name for found in changed.values() for name in found})]
        steps += [self._unify(group, found) for group, found in changed.items()]
        return Shard(file, specs, tuple(steps), adopted=relabel(header, names))

    def _adopt(self, file: str, but: Collection[str]) -> Step:
        def step(writer: ShardWriter) -> None:
            self.shared += writer.adopt(self.source, file, but)

        return step

    def _unify(self, group: FusedGroup, names: Collection[str]) -> Step:
        """The step that writes these scales of the group; others may lie in another file."""

        def step(writer: ShardWriter) -> None:
            tensors, parts = with_one_scale(self.source, self.model.tensors, group.modules)
            self._note(group, parts)
            for module, tensor in zip(group.modules, tensors, strict=True):
                assert isinstance(tensor.weight_scale_2, Tensor)  # a multiplier, as it was read
                scales = (tensor.weight_scale, tensor.weight_scale_2)
                for part, value in zip(_SCALES, scales, strict=True):
                    if (name := f"{module}.{part}") in names:
                        writer.write_tensor(name, value.reshape(writer.specs[name].shape))

        return step

    def measure(self, group: FusedGroup) -> None:
        """Counts a group that an earlier, interrupted run has written."""
        if group not in self._measured:
            self._note(group, with_one_scale(self.source, self.model.tensors, group.modules)[1])

    def _note(self, group: FusedGroup, parts: Collection[UnifiedPart]) -> None:
        if group not in self._measured:
            self._measured.add(group)
            self.unified[group.kind] = self.unified.get(group.kind, Unified()).plus(parts)


_SCALES = ("weight_scale", "weight_scale_2")


def _check_room(source: Checkpoint, output: Path) -> None:
    """Without shared blocks, the disk must hold everything a second time."""
    folder = next(path for path in (output, *output.absolute().parents) if path.is_dir())
    if _shares_blocks(source, folder):
        return
    files = [file for file in source.paths if not (output / file).exists()]
    needed = sum(os.fstat(source.fd(file)).st_size for file in files)
    stats = os.statvfs(folder)
    free = stats.f_bavail * stats.f_frsize
    if 0 < free < needed:  # some file systems report 0
        raise CheckpointError(
            f"{needed} bytes are needed, {free} are free, and no blocks can be shared with the "
            "source. Choose a folder on the source's own disk if that has reflinks (XFS, Btrfs), "
            "make room, or use --in-place.",
            file=shown(str(output)),
        )


def _shares_blocks(source: Checkpoint, folder: Path) -> bool:
    """Tries it with the smallest file, under no name."""
    fds = [source.fd(file) for file in source.paths]
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return share_blocks(min(fds, key=lambda fd: os.fstat(fd).st_size), fd)
    except OSError:
        return False
    finally:
        os.close(fd)
