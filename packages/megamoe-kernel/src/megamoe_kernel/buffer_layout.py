"""Where each field of the symmetric buffer lies: the table of include/megamoe/layout/buffer.hpp.

That table is the only one. The native extension answers from its compiled form; without the
extension the same rows are read from the header file, and a WARNING says so once. Offsets follow by
one rule: fields in the order of the table, each at the next multiple of 128 bytes.
"""

from __future__ import annotations

import ast
import logging
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType

from . import native
from .errors import LayoutError

INCLUDE = Path(__file__).parent / "include"
HEADER = INCLUDE / "megamoe" / "layout" / "buffer.hpp"
TYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {"U8": 1, "E4M3": 1, "BF16": 2, "F32": 4, "U32": 4, "I64": 8, "U64": 8}
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BufferSizes:
    """What the table depends on, in the order of ``BufferSizes`` in buffer.hpp."""

    num_ranks: int
    num_local_experts: int
    max_tokens: int
    num_topk: int
    token_bytes: int
    token_scales: int
    intermediate_bytes: int
    intermediate_scales: int
    token_scale_count: int
    hidden: int
    ring_rows: int
    ring_tiles: int


@dataclass(frozen=True)
class Field:
    """One row of the table, and where it begins.

    type: a key of TYPE_BYTES. access: "Peers" (other ranks read or write it), "Host" (the caller
    writes it before the launch) or "Kernel" (this rank's kernel alone).
    """

    name: str
    type: str
    access: str
    rows: int
    columns: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.columns * TYPE_BYTES[self.type]


@dataclass(frozen=True)
class BufferLayout:
    """All fields by name. shared_bytes: up to there peers and the caller write; nbytes: all."""

    fields: Mapping[str, Field]
    shared_bytes: int
    nbytes: int


def buffer_layout(sizes: BufferSizes) -> BufferLayout:
    """Lay the buffer out; from the extension, or from the header where it was not built.

    Raises LayoutError if the extension was compiled from another header than kernels will be.
    """
    from_header = layout_of_header(sizes)
    if native.import_error is not None:
        _warn_once()
        return from_header
    rows, shared_bytes, nbytes = native.extension.buffer_layout(astuple(sizes))
    compiled = BufferLayout(_by_name(Field(*row) for row in rows), shared_bytes, nbytes)
    if compiled != from_header:
        raise LayoutError(
            f"the compiled extension does not have the fields of {HEADER.name}, from which kernels "
            "are compiled: it is older or newer. Reinstall megamoe-kernel"
        )
    return compiled


def layout_of_header(sizes: BufferSizes) -> BufferLayout:
    """Lay the buffer out from the rows in the header's text."""
    rows, alignment = _parse_header()
    known = {field.name: getattr(sizes, field.name) for field in fields(sizes)}
    laid_out: list[Field] = []
    end = shared_bytes = 0
    for name, kind, access, height, width in rows:
        field = Field(name, kind, access, _evaluate(height, known), _evaluate(width, known), end)
        laid_out.append(field)
        end = -(-(end + field.nbytes) // alignment) * alignment
        if access != "Kernel":
            shared_bytes = end
    return BufferLayout(_by_name(laid_out), shared_bytes, end)


def names_of_header() -> tuple[str, ...]:
    """The members of BufferSizes in the header's text."""
    (body,) = re.findall(r"^struct BufferSizes \{\n(.*?)^\};", HEADER.read_text(), re.M | re.S)
    return tuple(re.findall(r"^  uint64_t (\w+);", body, re.M))


@cache
def _parse_header() -> tuple[list[tuple[str, ...]], int]:
    text = HEADER.read_text()
    rows = re.findall(r'^ +\{"(\w+)", Type::k(\w+), Access::k(\w+), (.+?), (.+?)\},', text, re.M)
    (alignment,) = re.findall(r"kFieldAlignment = (\d+);", text)
    return rows, int(alignment)


_OPERATORS = {ast.Add: operator.add, ast.Mult: operator.mul}


def _evaluate(expression: str, known: Mapping[str, int]) -> int:
    """A row's expression: members of ``s``, integers, + and *."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "s":
            return known[node.attr]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            result: int = _OPERATORS[type(node.op)](value(node.left), value(node.right))
            return result
        raise ValueError(f"{HEADER.name} has {expression!r}, expected members of s, + and *")

    return value(ast.parse(expression, mode="eval").body)


def _by_name(rows: Iterable[Field]) -> Mapping[str, Field]:
    return MappingProxyType({field.name: field for field in rows})


@cache
def _warn_once() -> None:
    logger.warning(
        "megamoe-kernel was installed without its compiled extension (%s); the buffer's layout is "
        "read from the header, and no kernel for GPUs can be chosen. Reinstall with CMake and a "
        "C++20 compiler to have the extension",
        native.import_error,
    )
