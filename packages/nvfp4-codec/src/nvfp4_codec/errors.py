"""Every error this package raises on purpose.

One base class, so that a caller can catch them all; each also derives from the
built-in it resembles. Messages give the value found, the value expected and what
to do about it.
"""

from __future__ import annotations


class CodecError(Exception):
    """Base of all errors raised by nvfp4-codec."""


class ShapeError(CodecError, ValueError):
    """A shape, block size or memory overlap that an operation does not accept."""


class DtypeError(CodecError, TypeError):
    """A dtype, or a Python type, that an operation does not accept."""


class NonFiniteError(CodecError, ValueError):
    """The input holds NaN or Inf and the policy is to refuse them."""


class ZeroAmaxError(CodecError, ValueError):
    """The input is all zero, so no global scale follows from it."""


class ScaleError(CodecError, ValueError):
    """A global scale that is zero, negative, infinite or NaN."""


class LosslessError(CodecError, ValueError):
    """A conversion that promised to be exact cannot be."""


class LayoutError(CodecError, ValueError):
    """A scale tensor is in another memory layout than the one asked for."""


class BackendError(CodecError, RuntimeError):
    """A backend or instruction set was named that this machine does not have."""


class CheckpointError(CodecError):
    """A checkpoint file that is malformed, incomplete or hostile.

    ``file`` and ``tensor`` say where (either may be None).
    """

    def __init__(self, message: str, *, file: str | None = None, tensor: str | None = None) -> None:
        where = [f"file {file}"] if file else []
        where += [f"tensor {tensor}"] if tensor else []
        super().__init__(f"{', '.join(where)}: {message}" if where else message)
        self.file = file
        self.tensor = tensor


class TruncatedFileError(CheckpointError):
    """A checkpoint file that ends before the data that its header describes."""


class OutsideFolderError(CheckpointError):
    """A name or a link in a checkpoint folder that leads out of it."""
