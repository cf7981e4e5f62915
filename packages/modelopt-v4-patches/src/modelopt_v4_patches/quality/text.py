"""Text that every machine with Python has: the standard library's sources, in a fixed split.

A module belongs to one of three sides by the SHA-256 of its path alone, on every Python alike. A
first byte that 16 divides holds it out; then an even second byte makes it validation, an odd one
evaluation. Calibration reads the training side, every perplexity the evaluation side. The rule is
the one by which the tiny test model was trained and settled (tools/tiny_dsv4/data.py): nothing of
it, weights or config, was chosen on the evaluation side. The texts themselves differ a little
between Python versions; their licence is PSF-2.0.
"""

from __future__ import annotations

import hashlib
import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import DSV4Error

Side = Literal["training", "validation", "evaluation"]

#: The held-out sides have one module in so many, and give it in pieces of this size.
HELD_OUT_ONE_IN = 16
EXCERPT_BYTES = 8192

# Character tables would crowd out the rest, and _sysconfigdata describes the machine.
_SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "encodings", "site-packages"}
_SKIPPED_PREFIX = "_sysconfigdata"


def side_of(name: str) -> Side:
    """What the module at this path (relative to the standard library) is for."""
    first, second = hashlib.sha256(name.encode()).digest()[:2]
    if first % HELD_OUT_ONE_IN:
        return "training"
    return "evaluation" if second % 2 else "validation"


def held_out_excerpts(side: Side = "evaluation") -> dict[str, bytes]:
    """The whole EXCERPT_BYTES pieces of that side's ASCII modules, name+offset -> bytes.

    The first piece of every module in order of the paths' SHA-256, then the second of those that
    have one, and so on, so that any first few are a fair sample.
    """
    modules = _long_ascii_modules(side)
    longest = max(map(len, modules.values()), default=0)
    return {
        f"{name}+{start}" if start else name: text[start : start + EXCERPT_BYTES]
        for start in range(0, longest, EXCERPT_BYTES)
        for name, text in modules.items()
        if len(text) >= start + EXCERPT_BYTES
    }


def held_out_windows(
    num_windows: int, length: int = 4096, side: Side = "evaluation"
) -> NDArray[np.int64]:
    """``num_windows`` windows of that side, one token per byte, int64 ``[num_windows, length]``.

    No window crosses from one module into another. The first windows are those of the first
    excerpts (see `held_out_excerpts`). Raises DSV4Error for more windows than there is text, or a
    length that does not divide EXCERPT_BYTES.
    """
    if not 0 < length <= EXCERPT_BYTES or EXCERPT_BYTES % length:
        raise DSV4Error(f"windows of {length} bytes do not divide excerpts of {EXCERPT_BYTES}")
    text = b"".join(held_out_excerpts(side).values())
    windows = np.frombuffer(text, dtype=np.uint8).reshape(-1, length).astype(np.int64)
    if not 0 < num_windows <= len(windows):
        raise DSV4Error(
            f"{num_windows} windows were asked for; there are {len(windows)} of {length}"
        )
    return windows[:num_windows]


def calibration_texts(count: int, length: int = 512) -> list[str]:
    """``count`` pieces of ``length`` ASCII characters from the training side.

    From different modules, in order of the paths' SHA-256, each from its module's middle: the
    beginnings are much alike. Raises DSV4Error for more pieces than there are modules.
    """
    modules = _long_ascii_modules("training")
    if not 0 < count <= len(modules) or not 0 < length <= EXCERPT_BYTES // 2:
        raise DSV4Error(
            f"{count} texts of {length} characters were asked for; there are {len(modules)} of at "
            f"most {EXCERPT_BYTES // 2}"
        )
    middle = EXCERPT_BYTES // 2
    chosen = list(modules.values())[:count]
    return [text[middle : middle + length].decode("ascii") for text in chosen]


@lru_cache(maxsize=3)
def _long_ascii_modules(side: Side) -> dict[str, bytes]:
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
            or side_of(name) != side
        ):
            continue
        text = path.read_bytes()
        if len(text) >= EXCERPT_BYTES and text.isascii():
            found[name] = text
    return dict(sorted(found.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest()))
