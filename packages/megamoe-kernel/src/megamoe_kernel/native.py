"""The compiled extension, or why there is none."""

from __future__ import annotations

from .errors import BackendError

try:
    from . import _native as extension
except ImportError as error:
    import_error: str | None = str(error)
else:
    import_error = None

__all__ = ["extension", "import_error", "require_extension"]


def require_extension() -> None:
    """BackendError if ``extension`` is not there: what has no other way than the compiled one."""
    if import_error is not None:
        raise BackendError(
            "kernels are chosen by megamoe-kernel's compiled extension, without which it was "
            f"installed ({import_error}). Reinstall it with CMake and a C++20 compiler"
        )
