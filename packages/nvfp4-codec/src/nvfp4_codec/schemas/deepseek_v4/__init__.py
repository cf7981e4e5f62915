"""DeepSeek-V4 as data: every tensor, its official format and shape, its name in three schemes.

Read ``table`` first: it is the whole model in one page. ``config`` says which rows a given
``config.json`` asks for, ``names`` translates between schemes without a config, ``schema`` lists
a whole checkpoint, ``report`` checks one, ``entries`` translates the globs of quantization configs.
``recognize`` holds a checkpoint's headers against the schema; import it from there, it needs numpy.
"""

from .config import Block, ModelConfig
from .entries import spell_out, translate_entries, translate_entry
from .names import (
    SCHEMES,
    Parsed,
    Scheme,
    Template,
    detect_scheme,
    from_official,
    fused_experts,
    fused_with,
    parse,
    to_official,
)
from .report import Report
from .schema import Entry, Layout, Schema, TensorSpec
from .table import Format, Role, Row

__all__ = [
    "SCHEMES",
    "Block",
    "Entry",
    "Format",
    "Layout",
    "ModelConfig",
    "Parsed",
    "Report",
    "Role",
    "Row",
    "Schema",
    "Scheme",
    "Template",
    "TensorSpec",
    "detect_scheme",
    "from_official",
    "fused_experts",
    "fused_with",
    "parse",
    "spell_out",
    "to_official",
    "translate_entries",
    "translate_entry",
]
