"""Every error this package raises on purpose; what is wrong with a checkpoint itself is the
codec's ``CheckpointError``. Messages give the value found, the value expected and the fix.
"""

from __future__ import annotations


class DSV4Error(Exception):
    """Base of all errors raised by modelopt-v4-patches."""


class VersionError(DSV4Error):
    """A version of modelopt or transformers outside the tested range."""


class PatchError(DSV4Error):
    """A patch that did not take, or whose target has changed upstream."""


class SnapshotError(DSV4Error):
    """An amax snapshot that is malformed, incomplete or of another model."""


class CalibrationError(DSV4Error):
    """A calibration that cannot work: refused before it starts."""


class PolicyError(DSV4Error, ValueError):
    """An option that would make the checkpoint wrong, or a combination that contradicts itself."""


class ExecutorError(DSV4Error):
    """A worker process that died."""
