"""Takes the official DeepSeek-V4 checkpoint to NVFP4, exactly where that is possible.

The names below import on first use: nothing here waits for torch, transformers or modelopt.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from nvfp4_codec.lazy import attach

if TYPE_CHECKING:
    from .dequantize import dequantize_checkpoint
    from .export import ExportOptions, export_checkpoint
    from .finalize import finalize_checkpoint
    from .registry import apply_patches
    from .snapshot import Snapshot
    from .validate import validate

try:
    __version__ = version("modelopt-v4-patches")
except PackageNotFoundError:  # a plain checkout on the path
    __version__ = "0+unknown"

_HOMES = {
    "ExportOptions": "export",
    "Snapshot": "snapshot",
    "apply_patches": "registry",
    "dequantize_checkpoint": "dequantize",
    "export_checkpoint": "export",
    "finalize_checkpoint": "finalize",
    "validate": "validate",
}

__all__ = [
    "ExportOptions",
    "Snapshot",
    "apply_patches",
    "dequantize_checkpoint",
    "export_checkpoint",
    "finalize_checkpoint",
    "validate",
]

__getattr__, __dir__ = attach(__name__, _HOMES)
