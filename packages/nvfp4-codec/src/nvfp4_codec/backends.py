"""The table of backends and the one place where one is chosen.

A backend is a module with the functions of ``reference`` (some may be missing). It gets
checked, contiguous arguments and must return the reference's bytes.
"""

from __future__ import annotations

import importlib
import logging
from functools import cache
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch

from .errors import BackendError

logger = logging.getLogger(__name__)

BackendName = Literal["reference", "native", "triton"]

_MODULES = {
    "reference": "nvfp4_codec.reference",
    "native": "nvfp4_codec.native",
    "triton": "nvfp4_codec.triton_kernels",
}
_SMALLEST, _ONE = np.float32(2.0**-149), np.float32(1)
_DEVICES = {"native": "cpu", "triton": "cuda"}


@cache
def _load(name: str) -> ModuleType | str:
    """Import a backend; return the reason, as text, if it cannot be used here."""
    try:
        module = importlib.import_module(_MODULES[name])
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    reason = getattr(module, "unavailable_reason", lambda: None)()
    return str(reason) if reason else module


def available() -> dict[str, str | None]:
    """Each backend's name with None if it works here, else the reason why not."""
    loaded = {name: _load(name) for name in _MODULES}
    return {name: found if isinstance(found, str) else None for name, found in loaded.items()}


def select(
    operation: str, device: torch.device, requested: str | None, *, profile: str | None = None
) -> Any:
    """Return the backend module for an operation on a device.

    requested: a backend's name, or None for the fastest one there is: native on CPU, triton
    on CUDA. Falling back to the reference is logged once per cause at WARNING.
    Raises BackendError if a named backend is unknown, absent, on the wrong device or
    lacks the operation.
    """
    if requested is not None and requested not in _MODULES:
        known = ", ".join(_MODULES)
        raise BackendError(f"backend is {requested!r}, expected None or one of: {known}")
    fastest = next((name for name, kind in _DEVICES.items() if kind == device.type), "reference")
    name = requested or fastest
    if _flushes_denormals():
        warn_once(
            "torch.set_flush_denormal(True) is on: what torch computes in the subnormal range "
            "(the reference, global scales of tiny tensors) is zero; turn it off for exact bytes"
        )
    reason = _obstacle(name, operation, device, profile)
    if reason is None:
        return _load(name)
    if requested is not None:
        raise BackendError(f"backend {name!r} cannot run {operation} here: {reason}")
    # A backend that is absent altogether is reported once, not once for each operation.
    what = "everything" if isinstance(_load(name), str) else operation
    warn_once(f"{what} runs on the slow reference backend: {name} cannot ({reason})")
    return _load("reference")


def _flushes_denormals() -> bool:
    # A NumPy scalar: the processor's mode is the same, and every operation asks.
    return bool(_SMALLEST * _ONE == 0)


def _obstacle(name: str, operation: str, device: torch.device, profile: str | None) -> str | None:
    if name in _DEVICES and device.type != _DEVICES[name]:
        return f"tensors are on {device.type}, it works on {_DEVICES[name]}"
    module = _load(name)
    if isinstance(module, str):
        return module
    if not hasattr(module, operation):
        return "not implemented there"
    if profile is not None and profile not in getattr(module, "NVFP4_PROFILES", (profile,)):
        return f"it does not implement profile {profile!r}"
    return None


@cache
def warn_once(message: str) -> None:
    logger.warning(message)
