"""Text that every machine with Python has: the standard library's sources, in a fixed split.

Measuring and calibrating must not see the same text, so a module belongs to one side by the
SHA-256 of its path alone, on every Python alike. The rule is the one by which the tiny test model
was trained (tools/tiny_dsv4/data.py): what is held out here was held out there. The texts
themselves differ a little between Python versions; their licence is PSF-2.0.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DSV4Error

#: The held-out side has one module in so many, and gives this much of each.
HELD_OUT_ONE_IN = 16
EXCERPT_BYTES = 8192

# Character tables would crowd out the rest, and _sysconfigdata describes the machine.
_SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "encodings", "site-packages"}
_SKIPPED_PREFIX = "_sysconfigdata"


def is_held_out(name: str) -> bool:
    """Whether the module at this path (relative to the standard library) is for measuring."""
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def held_out_excerpts(names: Iterable[str] | None = None) -> dict[str, bytes]:
    """The first EXCERPT_BYTES of every held-out ASCII module that has them, path -> bytes.

    In order of the paths' SHA-256, so that any first few are a fair sample. ``names`` asks for
    these modules instead; DSV4Error if this Python lacks one.
    """
    modules = _long_ascii_modules(held_out=True)
    if names is None:
        return dict(modules)
    wanted = list(names)
    if missing := [name for name in wanted if name not in modules]:
        raise DSV4Error(
            f"this Python's standard library has no held-out module {missing[0]!r} of "
            f"{EXCERPT_BYTES} bytes; it has {len(modules)} others"
        )
    return {name: modules[name] for name in wanted}


def held_out_windows(
    count: int, length: int = 4096, names: Iterable[str] | None = None
) -> NDArray[np.int64]:
    """``count`` windows of held-out text, one token per byte, int64 ``[count, length]``.

    No window crosses from one module into another. The first windows are those of the first
    excerpts (see `held_out_excerpts`). Raises DSV4Error for more windows than there is text, or a
    length that does not divide EXCERPT_BYTES.
    """
    if not 0 < length <= EXCERPT_BYTES or EXCERPT_BYTES % length:
        raise DSV4Error(f"windows of {length} bytes do not divide excerpts of {EXCERPT_BYTES}")
    text = b"".join(held_out_excerpts(names).values())
    windows = np.frombuffer(text, dtype=np.uint8).reshape(-1, length).astype(np.int64)
    if not 0 < count <= len(windows):
        raise DSV4Error(f"{count} windows were asked for; there are {len(windows)} of {length}")
    return windows[:count]


def calibration_texts(count: int, length: int = 512) -> list[str]:
    """``count`` pieces of ``length`` ASCII characters from the side that is not held out.

    From different modules, in order of the paths' SHA-256, each from its module's middle: the
    beginnings are much alike. Raises DSV4Error for more pieces than there are modules.
    """
    modules = _long_ascii_modules(held_out=False)
    if not 0 < count <= len(modules) or not 0 < length <= EXCERPT_BYTES // 2:
        raise DSV4Error(
            f"{count} texts of {length} characters were asked for; there are {len(modules)} of at "
            f"most {EXCERPT_BYTES // 2}"
        )
    middle = EXCERPT_BYTES // 2
    chosen = list(modules.values())[:count]
    return [text[middle : middle + length].decode("ascii") for text in chosen]


@lru_cache(maxsize=2)
def _long_ascii_modules(*, held_out: bool) -> dict[str, bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    found = {}
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        folders = set(relative.parts[:-1])
        name = relative.as_posix()
        if (
            folders & _SKIPPED_FOLDERS
            or any(folder.startswith("config-") for folder in folders)
            or relative.name.startswith(_SKIPPED_PREFIX)
            or "test" in name  # not installed everywhere
            or is_held_out(name) is not held_out
        ):
            continue
        text = path.read_bytes()[:EXCERPT_BYTES]
        # ASCII as a whole file, as in training: the excerpt's own bytes are not enough.
        if len(text) == EXCERPT_BYTES and path.read_bytes().isascii():
            found[name] = text
    return dict(sorted(found.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest()))
