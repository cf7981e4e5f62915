"""What lies beside the weights: tokenizer, index, traces of an unfinished run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ..files import inside
from ..header import shown
from ..job import PLAN_NAME
from ..manifest import RECORDS_NAME
from ..reader import Checkpoint, index_name, read_index_file
from ..rewrite import COPIED_NAMES
from ..verify import Finding

#: Any one of them is a tokenizer.
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model")
_COPY: Final = "Copy it from the source checkpoint."


def check_files(checkpoint: Checkpoint, against: Checkpoint | None) -> list[Finding]:
    """Files that are absent, an index of another size, an interrupted run."""
    root, findings = checkpoint.root, []
    present = {name for name in COPIED_NAMES if os.path.lexists(root / name)}
    if not present & set(_TOKENIZERS):
        findings.append(
            _missing(root, "tokenizer.json", "a tokenizer: " + " or ".join(_TOKENIZERS))
        )
    if "tokenizer_config.json" not in present:
        findings.append(_missing(root, "tokenizer_config.json", "the tokenizer's settings"))
    if against is not None and against.is_folder:
        told = {finding.tensor for finding in findings}
        for name in sorted(COPIED_NAMES - present - told):
            if os.path.lexists(against.root / name):
                findings.append(_missing(root, name, "the file that the source has"))
    for name in (PLAN_NAME, RECORDS_NAME):
        if not os.path.lexists(root / name):
            continue
        findings.append(
            Finding(
                "unfinished",
                name,
                shown(str(root)),
                "the record of a run that has not ended",
                "a complete checkpoint",
                "Repeat the command that writes this folder with --resume.",
            )
        )
        break
    return findings + _index(checkpoint)


def _missing(root: Path, name: str, expected: str) -> Finding:
    return Finding("missing-file", name, shown(str(root)), "absent", expected, _COPY)


def _index(checkpoint: Checkpoint) -> list[Finding]:
    """``total_size``, by which loaders plan their memory; names were compared when opening."""
    name = index_name(checkpoint.root)
    if checkpoint.index is None or name is None:
        return []
    # read as it was when opening, byte order mark and all
    document = read_index_file(inside(checkpoint.root, name, str(checkpoint.root)))
    metadata = document.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = sum(info.nbytes for info in checkpoint)
    if size is None or size == total:
        return []
    return [
        Finding(
            "index-size",
            "metadata.total_size",
            shown(name),
            f"{size}",
            f"{total}, the bytes of all tensors",
            "Index and files are of different exports: export again.",
        )
    ]
