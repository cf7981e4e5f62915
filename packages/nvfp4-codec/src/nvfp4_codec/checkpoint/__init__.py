"""Checkpoints on disk: read, write, inspect, verify, quantize, convert and diff them.

The names here import lazily, so that a conversion that copies bytes never waits for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import attach

if TYPE_CHECKING:
    from .convert import ConvertOptions, ConvertReport, convert_checkpoint
    from .diff import Difference, diff_checkpoints
    from .families import Family, find_families
    from .inspect import FamilyStats, Row, inspect_checkpoint, summarize
    from .quantize import QuantizeOptions, QuantizeReport, quantize_checkpoint
    from .reader import Checkpoint, TensorInfo
    from .verify import Finding, verify_checkpoint
    from .writer import ShardWriter

_HOMES = {
    "Checkpoint": "reader",
    "ConvertOptions": "convert",
    "ConvertReport": "convert",
    "Difference": "diff",
    "Family": "families",
    "FamilyStats": "inspect",
    "Finding": "verify",
    "QuantizeOptions": "quantize",
    "QuantizeReport": "quantize",
    "Row": "inspect",
    "ShardWriter": "writer",
    "TensorInfo": "reader",
    "convert_checkpoint": "convert",
    "diff_checkpoints": "diff",
    "find_families": "families",
    "inspect_checkpoint": "inspect",
    "quantize_checkpoint": "quantize",
    "summarize": "inspect",
    "verify_checkpoint": "verify",
}

__all__ = [
    "Checkpoint",
    "ConvertOptions",
    "ConvertReport",
    "Difference",
    "Family",
    "FamilyStats",
    "Finding",
    "QuantizeOptions",
    "QuantizeReport",
    "Row",
    "ShardWriter",
    "TensorInfo",
    "convert_checkpoint",
    "diff_checkpoints",
    "find_families",
    "inspect_checkpoint",
    "quantize_checkpoint",
    "summarize",
    "verify_checkpoint",
]

__getattr__, __dir__ = attach(__name__, _HOMES)
