"""Opens a folder that somebody else wrote; what is wrong with its files is told file by file.

Nothing is executed or unpickled: only .safetensors and JSON are read, and no name or link is
followed out of the folder.
"""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

from nvfp4_codec.checkpoint.files import inside, read_small, strict_json
from nvfp4_codec.checkpoint.header import shown
from nvfp4_codec.checkpoint.reader import Checkpoint, index_name, read_index
from nvfp4_codec.checkpoint.verify import Finding
from nvfp4_codec.errors import CheckpointError, OutsideFolderError, TruncatedFileError

from ..config_file import config_of

_AGAIN = "Fetch the file again, or write it again."
_FIXES = {
    "index-outside-folder": "Do not load this checkpoint unless you know why it does so; fetch "
    "the index again from where the model comes from.",
    "missing-shard": "Fetch the file, or the index that belongs to these files.",
    "index-disagrees": "Fetch index and files again; they are of different checkpoints.",
    "shard-truncated": _AGAIN,
    "damaged-shard": _AGAIN,
    "damaged-file": _AGAIN,
}
_EXPECTED = {
    "index-outside-folder": "a plain name of a file in the folder",
    "missing-shard": "the file that the index names",
    "index-disagrees": "each tensor in the file that the index names, and nowhere else",
    "shard-truncated": "all the data that its header describes",
    "damaged-shard": "a safetensors file",
    "damaged-file": "a file of JSON in the folder",
}
#: What vLLM reads besides config.json and weights, where it is there; a tokenizer has 10 MB.
_DOCUMENTS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_LARGEST = 256 << 20
#: A hostile index may name millions of files.
_MOST = 100


def open_folder(folder: Path) -> Checkpoint | list[Finding]:
    """The open checkpoint, or what is wrong with its files.

    Raises CheckpointError where there is no checkpoint at all (no folder, no .safetensors file, an
    index that is no index), and as `config_of` does.
    """
    config_of(folder)
    try:
        return Checkpoint.open(folder)
    except CheckpointError as error:
        index = index_name(folder)
        files = _files(folder, index)
        if not files:
            raise
        looked = (_look(folder, file, index or file) for file in files)
        found = list(islice((finding for finding in looked if finding is not None), _MOST))
        return found or [_finding("index-disagrees", error, index or files[0])]


def look_at_strays(checkpoint: Checkpoint) -> list[Finding]:
    """Weight files that vLLM would load besides, because no index says which are the model's."""
    if checkpoint.index is not None:
        return []
    names = sorted({path.name for path in checkpoint.root.glob("*.safetensors")})
    return [
        Finding(
            "stray-file",
            shown(name),
            shown(str(checkpoint.root)),
            f"a second weight file beside {shown(file)}, and no index",
            "one file, or an index that names those of the model",
            "Move it elsewhere.",
        )
        for file in checkpoint.paths
        for name in names
        if name != file
    ]


def look_at_documents(folder: Path) -> list[Finding]:
    """Small files that cannot be read: vLLM stops at them, and waits for a pipe without end."""
    findings = []
    for name in _DOCUMENTS:
        if not os.path.lexists(folder / name):
            continue
        try:
            path = inside(folder, name, str(folder))
            strict_json(read_small(path, _LARGEST, name), name)
        except CheckpointError as error:
            findings.append(_finding("damaged-file", error, name))
    return findings


def _files(folder: Path, index: str | None) -> list[str]:
    """What the index names, or the only file; nothing if there is neither."""
    if index is not None:
        try:
            return sorted(set(read_index(inside(folder, index, str(folder))).values()))
        except CheckpointError:
            return []
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    return names if len(names) == 1 else []


def _look(folder: Path, file: str, index: str) -> Finding | None:
    try:
        path = inside(folder, file, index)
        Checkpoint(folder, {file: path}).close()
    except OutsideFolderError as error:
        return _finding("index-outside-folder", error, index)
    except TruncatedFileError as error:
        return _finding("shard-truncated", error, file)
    except CheckpointError as error:
        absent = not os.path.exists(folder / file)
        return _finding("missing-shard" if absent else "damaged-shard", error, file)
    return None


def _finding(code: str, error: CheckpointError, file: str) -> Finding:
    return Finding(
        code,
        error.tensor or shown(file),
        error.file or shown(file),
        _what(str(error)),
        _EXPECTED[code],
        _FIXES[code],
    )


def _what(message: str) -> str:
    """What was found, without where and without the advice, which are told apart."""
    return message.split(": ", 1)[-1].split(". ", 1)[0].rstrip(".")
