"""What a compiler is for the rest of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from ..buffer_layout import INCLUDE
from .targets import Target

#: Language options common to all compilers.
STANDARD = "--std=c++20"


class Compiler(Protocol):
    """Turns one source text into a cubin. name and version become part of the cache's key."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def compile(self, name: str, text: str, target: Target, options: tuple[str, ...]) -> bytes:
        """The cubin; CompileError with the compiler's log."""
        ...


def include_folders(*, standard_library: bool) -> tuple[Path, ...]:
    """Where device headers are; our own few standard ones for compilers that have none."""
    return (INCLUDE,) if standard_library else (INCLUDE, INCLUDE / "nvrtc")
