"""What a cubin says about itself: the target and the kernels. Read from its ELF sections."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import CompileError
from .targets import Target

_MACHINE_CUDA = 190
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")


@dataclass(frozen=True)
class Cubin:
    """target: as the assembler noted it, with its suffix. sm: the number of e_flags."""

    target: str
    sm: int
    kernels: tuple[str, ...]


def read_cubin(content: bytes) -> Cubin:
    """Read the headers of a cubin; CompileError if it is none."""
    if len(content) < _HEADER.size or content[:4] != b"\x7fELF":
        raise CompileError("the compiler's result is no ELF file, expected a cubin")
    header = _HEADER.unpack_from(content)
    machine, flags = header[2], header[7]
    if machine != _MACHINE_CUDA:
        raise CompileError(f"the compiler's result is for ELF machine {machine}, expected CUDA's")
    sections = dict(_sections(content, header[6], header[12], header[13]))
    note = sections.get(".note.nv.tkinfo", b"")
    # The assembler's own command line.
    match = re.search(rb"-arch (sm_\w+)", note)
    kernels = tuple(name[6:] for name in sections if name.startswith(".text."))
    return Cubin(match[1].decode() if match else "", flags >> 8 & 0xFF, kernels)


def check_cubin(content: bytes, target: Target) -> None:
    """Refuse a cubin for another target: plain sm_100 in place of sm_100a is a broken kernel."""
    found = read_cubin(content)
    number = int(re.sub(r"\D", "", target))
    if found.sm != number or found.target not in ("", target):
        raise CompileError(
            f"the compiler's result is for {found.target or f'sm_{found.sm}'}, expected {target}"
        )


def _sections(content: bytes, offset: int, count: int, names: int) -> Iterator[tuple[str, bytes]]:
    rows = [_SECTION.unpack_from(content, offset + i * _SECTION.size) for i in range(count)]
    strings = content[rows[names][4] : rows[names][4] + rows[names][5]]
    for row in rows:
        name = strings[row[0] : strings.index(b"\0", row[0])].decode()
        yield name, content[row[4] : row[4] + row[5]]
