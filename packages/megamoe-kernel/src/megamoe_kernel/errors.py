"""Every error this package raises on purpose.

One base class, so that a caller can catch them all; each also derives from the built-in it
resembles. Messages give the value found, the value expected and what to do about it.
"""

from __future__ import annotations


class MegaMoEError(Exception):
    """Base of all errors raised by megamoe-kernel."""


class ShapeError(MegaMoEError, ValueError):
    """A shape, an alignment or a device that an operation does not accept."""


class DtypeError(MegaMoEError, TypeError):
    """A dtype, or a Python type, that an operation does not accept."""


class ScaleError(MegaMoEError, ValueError):
    """A block scale that is NaN or negative, or a global scale that is not positive or missing."""


class RecipeError(MegaMoEError, ValueError):
    """A recipe, or a limit of the activation function, that the kernels do not compute."""


class LayoutError(MegaMoEError, ValueError):
    """Weights that are not transformed, or not for this layer, architecture or size."""


class ArchitectureError(MegaMoEError, ValueError):
    """An architecture that is not known, or an activation that it does not have."""


class RoutingError(MegaMoEError, ValueError):
    """Expert ids that name no expert."""


class BackendError(MegaMoEError, RuntimeError):
    """A backend that does not exist, or not for this request."""


class CompileError(MegaMoEError, RuntimeError):
    """A kernel that does not compile, or no compiler to do it."""


class CacheError(MegaMoEError, OSError):
    """A cache folder or entry of compiled kernels that others could have written, or
    that cannot be read or written."""


class LaunchError(MegaMoEError, RuntimeError):
    """A CUDA driver that is missing, or that refuses a compiled kernel or its launch."""
