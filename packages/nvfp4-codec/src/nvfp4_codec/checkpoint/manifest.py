"""What was written, shard by shard: sizes, SHA-256 and the notes of the steps.

A shard's record is on disk before the shard has its name, so a continued run knows the digest
of what it finds. Records live in a hidden folder; the manifest is made of them at the end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from ..errors import CheckpointError
from .files import read_small, strict_json
from .writer import Fault, no_fault, write_small

RECORDS_NAME: Final = ".nvfp4-records"
_MAX_BYTES: Final = 1 << 28


@dataclass(frozen=True)
class Record:
    """One finished shard. ``notes``: what its steps noted, JSON values by name.

    modified_ns: when its last byte was written. A file changed since is written anew.
    """

    bytes: int
    sha256: str
    modified_ns: int
    notes: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path, file: str, fault: Fault = no_fault) -> None:
        """Makes the record of shard ``file`` durable in the folder of records."""
        write_small(_path(folder, file), json.dumps(asdict(self)).encode(), fault)

    @classmethod
    def read(cls, folder: Path, file: str) -> Record | None:
        """The record of shard ``file``, None if there is none, or nothing that we wrote."""
        path = _path(folder, file)
        if not path.exists():
            return None
        try:
            found = cls(**strict_json(read_small(path, _MAX_BYTES, path.name), path.name))
        except (CheckpointError, TypeError):
            return None
        return found if isinstance(found.notes, dict) and isinstance(found.sha256, str) else None


def _path(folder: Path, file: str) -> Path:
    """One flat name for each shard, whatever its name holds."""
    return folder / f"{hashlib.sha256(file.encode()).hexdigest()}.json"


def manifest(records: Mapping[str, Record], documents: Mapping[str, bytes]) -> dict[str, Any]:
    """The document: every file with its bytes and SHA-256, every note by name, all sorted."""
    files = {file: {"bytes": r.bytes, "sha256": r.sha256} for file, r in records.items()}
    for file, data in documents.items():
        files[file] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    notes = {name: note for record in records.values() for name, note in record.notes.items()}
    return {"files": dict(sorted(files.items())), "notes": dict(sorted(notes.items()))}


def read_notes(path: Path) -> dict[str, Any]:
    """The notes of a manifest on disk."""
    notes: dict[str, Any] = json.loads(read_small(path, _MAX_BYTES, path.name))["notes"]
    return notes
