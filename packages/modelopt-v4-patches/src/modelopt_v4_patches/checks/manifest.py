"""The manifest that the exporter writes last: every file with its size and SHA-256.

It also holds notes by tensor (blocks that could not be cast exactly, activation scales taken from
elsewhere).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nvfp4_codec.checkpoint.files import read_small, strict_json
from nvfp4_codec.checkpoint.header import shown
from nvfp4_codec.checkpoint.verify import Finding
from nvfp4_codec.errors import CheckpointError

if TYPE_CHECKING:
    from ..executor import Executor

_MAX_BYTES: Final = 1 << 28


@dataclass(frozen=True)
class Manifest:
    """A manifest as read: file name -> (bytes, SHA-256), and the notes."""

    name: str = ""
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    notes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, root: Path) -> Manifest | None:
        """The folder's manifest, None if it has none. Raises CheckpointError for a broken one."""
        for path in sorted(root.glob("*_manifest.json")):
            document = strict_json(read_small(path, _MAX_BYTES, path.name), path.name)
            try:
                files = {
                    n: (int(f["bytes"]), str(f["sha256"])) for n, f in document["files"].items()
                }
                if any(Path(n).is_absolute() or ".." in Path(n).parts for n in files):
                    raise ValueError
                notes = {name: dict(note) for name, note in document.get("notes", {}).items()}
            except (AttributeError, KeyError, TypeError, ValueError):
                raise CheckpointError(
                    'is no manifest; expected {"files": {name: {"bytes", "sha256"}}}. Remove it, '
                    "or export again.",
                    file=shown(path.name),
                ) from None
            return cls(path.name, files, notes)
        return None

    @property
    def requantized(self) -> dict[str, int]:
        """Blocks that could not be cast exactly, by official weight name."""
        key = "requantized_blocks"
        return {name: int(note[key]) for name, note in self.notes.items() if key in note}

    @property
    def borrowed(self) -> list[str]:
        """Modules whose input_scale is another's, because calibration did not reach them."""
        return [
            name.removesuffix(".input_scale")
            for name, note in self.notes.items()
            if note.get("input_scale_from") in ("layer", "model")
        ]

    def check(self, root: Path, hashed: bool, executor: Executor | None) -> list[Finding]:
        """Files that are absent or of another size; with ``hashed``, of other content."""
        findings, whole = [], []
        for name, (size, _) in self.files.items():
            path = root / name
            found = path.stat().st_size if path.is_file() else None
            if found == size:
                whole.append((name, path.absolute()))
                continue
            text = "absent" if found is None else f"{found} bytes"
            findings.append(self._other(root, name, text, f"{size} bytes"))
        if not hashed:
            return findings
        digests = map(sha256, whole) if executor is None else executor.map(sha256, whole)
        for name, digest in digests:
            if digest != self.files[name][1]:
                expected = f"SHA-256 {self.files[name][1]}"
                findings.append(self._other(root, name, f"SHA-256 {digest}", expected))
        return findings

    def _other(self, root: Path, name: str, found: str, expected: str) -> Finding:
        return Finding(
            "manifest-mismatch",
            shown(name),
            shown(str(root)),
            found,
            f"{expected}, as {self.name} says",
            "The file was changed or cut since it was written: copy it again, or export again.",
        )


def sha256(file: tuple[str, Path]) -> tuple[str, str]:
    """(name, digest) of a file, read in large pieces."""
    name, path = file
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while data := stream.read(1 << 24):
            digest.update(data)
    return name, digest.hexdigest()
