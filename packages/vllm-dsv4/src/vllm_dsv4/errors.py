"""Every error this package raises on purpose; what is wrong with a checkpoint itself is the
codec's ``CheckpointError``. Messages give the value found, the value expected and the fix.
"""

from __future__ import annotations


class DSV4Error(Exception):
    """Base of all errors raised by vllm-dsv4."""


class VersionError(DSV4Error):
    """A vLLM outside the tested range."""


class StoredError(DSV4Error, ValueError):
    """A checkpoint whose layout is not one that can be served."""


class OptionError(DSV4Error, ValueError):
    """An option that does not exist, or that this checkpoint or this GPU cannot follow."""


class LoadError(DSV4Error):
    """Weights that did not arrive in the model as they stand in the checkpoint."""


class PlanError(DSV4Error, ValueError):
    """A deployment that cannot fit or does not exist."""
