"""The compiled extension, or why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import BackendError, ShapeError

try:
    from . import _native as extension
except ImportError as error:
    import_error: str | None = str(error)
else:
    import_error = None

__all__ = ["choosing", "extension", "import_error"]


@contextmanager
def choosing() -> Iterator[None]:
    """Around calls of ``extension`` that choose kernels.

    BackendError if it is not there, ShapeError for sizes that no kernel has.
    """
    if import_error is not None:
        raise BackendError(
            "kernels are chosen by megamoe-kernel's compiled extension, without which it was "
            f"installed ({import_error}). Reinstall it with CMake and a C++20 compiler"
        )
    try:
        yield
    except ValueError as error:
        raise ShapeError(str(error)) from error
