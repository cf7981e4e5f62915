"""The chat encoding that DeepSeek ships as a script beside the weights. It is copied, never run."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Final

from ...checkpoint.files import inside, read_small
from ...checkpoint.header import shown
from ...errors import CheckpointError

_FOLDER: Final = "encoding"
_SUFFIXES: Final = (".py", ".json", ".jinja", ".md", ".txt")
_MOST_BYTES: Final = 1 << 22


def encoding_files(root: Path) -> dict[str, bytes]:
    """The chat encoding's small text files, by their names below a checkpoint's folder."""
    folder = root / _FOLDER
    found: dict[str, bytes] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.suffix in _SUFFIXES:
            name = str(PurePosixPath(_FOLDER, path.name))
            if not name.isprintable():  # bytes that are no UTF-8 among others
                raise CheckpointError(
                    "a name that no manifest can hold. Rename the file, or remove it.",
                    file=shown(name),
                )
            found[name] = read_small(inside(root, name, str(root)), _MOST_BYTES, name)
    return found
