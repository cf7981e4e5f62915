"""Where ``inspect --plot`` may write: a new file, or over an older page."""

from __future__ import annotations

import os
from pathlib import Path

from .checkpoint import Checkpoint
from .checkpoint.header import shown
from .checkpoint.writer import write_small
from .errors import CheckpointError


def check_page(path: Path, *checkpoints: Checkpoint | None) -> None:
    """CheckpointError if a page would replace a file of a checkpoint or anything but a page."""
    if not os.path.lexists(path):
        return
    files = [file for c in checkpoints if c is not None for file in c.paths.values()]
    own = path.exists() and any(path.samefile(file) for file in files)
    if own or path.suffix.lower() != ".html":
        raise CheckpointError(
            "exists and is no HTML page, so --plot does not overwrite it; give a new name "
            "that ends in .html.",
            file=shown(str(path)),
        )


def write_page(path: Path, text: str) -> None:
    """Writes the page whole or not at all; an older page stays until then."""
    if not path.parent.is_dir():
        raise CheckpointError(
            "No such file or directory: the folder of the page must exist.", file=shown(str(path))
        )
    write_small(path, text.encode())
