"""Open and parse files that somebody else arranged.

A checkpoint folder may hold links, pipes, devices and JSON that Python cannot write back.
Each is refused here with a message, before anything blocks or is read without bound.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from ..errors import CheckpointError, OutsideFolderError
from .header import shown

_MAX_CONFIG_BYTES = 1 << 24  # of a config.json; a larger one is something else


def inside(root: Path, name: str, source: str) -> Path:
    """``root / name``, refused if it can lead outside the folder.

    One kind of link is followed: the Hugging Face cache keeps ``snapshots/<revision>`` as
    links into the ``blobs`` folder beside ``snapshots``. ``source``: who names the file.
    """
    pure = PurePosixPath(name)
    if not name or "\0" in name or "\\" in name or pure.is_absolute() or ".." in pure.parts:
        raise OutsideFolderError(
            f"names the file {shown(name)!r}, which may leave the folder; expected a plain "
            "relative path. Do not use this checkpoint unless you know why.",
            file=shown(source),
        )
    path = root / name
    # os.path: Path.resolve raises RuntimeError for a link to itself before Python 3.13
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(root))
    cache = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if not real.is_relative_to(home) and not (cache is not None and real.parent == cache):
        raise OutsideFolderError(
            f"the file {shown(name)!r} is a link that leaves the folder, to {shown(str(real))}. "
            "Replace it by the file itself.",
            file=shown(source),
        )
    if not os.path.isfile(path):
        what = "is not a regular file" if os.path.exists(path) else "is missing"
        what = "is a broken link" if what == "is missing" and os.path.islink(path) else what
        raise CheckpointError(
            f"{what}, but {shown(source)} names it. Fetch it, or fetch the index again.",
            file=shown(name),
        )
    return path


def open_regular(path: Path, file: str) -> int:
    """A descriptor for reading; CheckpointError naming ``file`` if it is no regular file."""
    try:
        # without O_NONBLOCK, opening a pipe waits for its other end
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise CheckpointError(f"cannot be opened: {error.strerror}.", file=shown(file)) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(
            "is not a regular file; expected one, or a folder with some.", file=shown(file)
        )
    return fd


def read_small(path: Path, limit: int, file: str) -> bytes:
    """The whole of a regular file of at most ``limit`` bytes; CheckpointError otherwise."""
    fd = open_regular(path, file)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise CheckpointError(
                f"{size} bytes; at most {limit} are read of such a file. Move it out of the "
                "folder if it is something else.",
                file=shown(file),
            )
        parts = []
        while limit > 0 and (part := os.read(fd, min(limit, 1 << 24))):
            parts.append(part)
            limit -= len(part)
        return b"".join(parts)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}.", file=shown(file)) from None
    finally:
        os.close(fd)


def strict_json(data: bytes, file: str) -> Any:
    """A JSON document without NaN, Infinity, numbers beyond float64 or lone surrogates.

    Python's parser accepts those, but what is written from them is not JSON or not UTF-8.
    """
    try:
        document = json.loads(data.decode("utf-8-sig"), parse_constant=_refuse, parse_float=_finite)
        if b"\\u" in data:
            json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            "a string holds a lone surrogate (\\ud800..\\udfff), which is no text; repair it.",
            file=shown(file),
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"not JSON ({shown(str(error))}); repair it, or fetch it again.", file=shown(file)
        ) from None
    return document


def read_config_file(path: Path, file: str) -> dict[str, Any]:
    """A config.json; CheckpointError naming ``file`` for what is no JSON object."""
    config = strict_json(read_small(path, _MAX_CONFIG_BYTES, file), file)
    if not isinstance(config, dict):
        raise CheckpointError(
            f"is not a JSON object but a {type(config).__name__}; repair it.", file=shown(file)
        )
    return config


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"the number {constant}")


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0:
        raise ValueError(f"the number {text[:40]} is beyond float64")
    return value
