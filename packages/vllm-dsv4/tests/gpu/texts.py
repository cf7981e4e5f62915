"""What the model is asked: sources of Python's standard library that it was not trained on.

The asset has one token per byte and starts every text with token 256. The modules are on the side
that `tools/train_tiny_dsv4.py` holds out; every Python has them.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

BEGIN = 256
#: Beyond 512 * 4 tokens the indexer has to choose; at 8,000 it leaves three of four entries out.
LENGTHS = (17, 64, 130, 300, 700, 1300, 2600)
LONG = 8000
_MODULES = (
    "enum.py", "bz2.py", "uuid.py", "http/cookies.py", "ctypes/_aix.py",
    "asyncio/base_subprocess.py", "pydoc.py", "collections/__init__.py",
)  # fmt: skip


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """One prompt of each length, the first token included, each from a module of its own."""
    return [
        [BEGIN, *_text(module, length - 1)]
        for module, length in zip(_MODULES, lengths, strict=False)
    ]


def long_prompt() -> list[int]:
    """The prompt for which the indexer counts."""
    return [BEGIN, *_text("collections/__init__.py", LONG - 1)]


def windows(count: int, length: int = 4096) -> list[list[int]]:
    """Contexts to measure a perplexity on."""
    return [[BEGIN, *_text(module, length - 1)] for module in _MODULES[:count]]


def _text(module: str, size: int) -> bytes:
    path = Path(sysconfig.get_path("stdlib")) / module
    text = path.read_bytes()[:size]
    assert len(text) == size, f"{path} has {len(text)} bytes, {size} are needed"
    return text
