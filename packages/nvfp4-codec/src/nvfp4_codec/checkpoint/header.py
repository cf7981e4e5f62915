"""The safetensors header, every field checked before anything is allocated for it.

The format: 8 bytes little-endian length, that many bytes of JSON, then the data. A
header comes from a file somebody else wrote, so it is scanned with a grammar that
knows only what a header may hold, instead of a general JSON parser whose objects can
be many times larger than the file.

The rules are those of the official Rust library (safetensors 0.8): length at most
100,000,000; no gap, no overlap and no byte left over; sizes that multiply out. Stricter
than the library, because each of these hides a mistake: a duplicate tensor or
``__metadata__`` key, an unknown field in an entry, more than 64 dimensions, the null
and list spellings that serde accepts, and dimensions whose product overflows even if
one of them is 0.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, NoReturn

from ..errors import CheckpointError, TruncatedFileError

MAX_HEADER_BYTES: Final = 100_000_000
MAX_RANK: Final = 64
MAX_METADATA_ENTRIES: Final = 100_000
_MAX_INT: Final = 2**63 - 1

#: Bits per element. The order is the official library's, which sorts the data by it.
DTYPE_BITS: Final[Mapping[str, int]] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
_DTYPE_ORDER: Final = {name: order for order, name in enumerate(DTYPE_BITS)}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype (a safetensors name) and shape of a tensor that is or will be in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return byte_size(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a header; ``begin`` and ``end`` count from the first data byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: entries in file order, metadata, and where the data starts."""

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]
    data_offset: int


def byte_size(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a dense tensor; the bits of sub-byte dtypes are rounded up."""
    bits = DTYPE_BITS[dtype]
    for dim in shape:
        bits *= dim
    return (bits + 7) // 8


def shown(name: str) -> str:
    """A name as safe to print: control characters escaped, long names cut."""
    if not name.isprintable():
        name = name.encode("unicode_escape").decode("ascii")
    return name if len(name) <= 200 else f"{name[:200]}... ({len(name)} characters)"


def some_names(names: Sequence[str], most: int = 3) -> str:
    """The first names for a message, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(shown(name) for name in names[:most]) + more


def read_header(fd: int, file: str) -> Header:
    """Reads and checks the header of an open file.

    Raises CheckpointError naming ``file``, the tensor, what was found and expected.
    """
    size = os.fstat(fd).st_size
    prefix = os.pread(fd, 8, 0)
    if len(prefix) < 8:
        raise TruncatedFileError(
            f"{size} bytes long; a safetensors file has at least 8. {_NOT_WHOLE}", file=file
        )
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"header length {length}; at most {MAX_HEADER_BYTES} is legal. "
            "This is not a safetensors file, or its first 8 bytes are damaged.",
            file=file,
        )
    if length > size - 8:
        raise TruncatedFileError(
            f"header length {length}, but only {size - 8} bytes follow it. {_NOT_WHOLE}", file=file
        )
    raw = os.pread(fd, length, 8)
    if len(raw) != length:
        raise CheckpointError(
            f"read {len(raw)} of {length} header bytes; the file shrank while it was read.",
            file=file,
        )
    return parse_header(raw, size - 8 - length, file)


def parse_header(raw: bytes, data_bytes: int, file: str) -> Header:
    """Checks the JSON of a header against ``data_bytes`` bytes of data.

    Raises CheckpointError as :func:`read_header` does.
    """
    entries, metadata = _Scanner(raw, file).header()
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    position, previous = 0, "the header"
    for entry in entries:
        if entry.begin != position:
            what = "overlap" if entry.begin < position else "leave a hole after"
            raise CheckpointError(
                f"data_offsets [{entry.begin}, {entry.end}] {what} {shown(previous)}, which ends "
                f"at byte {position}. {_DAMAGED}",
                file=file,
                tensor=shown(entry.name),
            )
        position, previous = entry.end, entry.name
    if position != data_bytes:
        short = position > data_bytes
        raise (TruncatedFileError if short else CheckpointError)(
            f"the header describes {position} bytes of data, the file holds {data_bytes}. "
            f"{_NOT_WHOLE if short else _DAMAGED}",
            file=file,
            tensor=shown(previous) if short and entries else None,
        )
    return Header(tuple(entries), metadata, 8 + len(raw))


class Layout(NamedTuple):
    """A file to be written: its header, and each tensor's [begin, end) from the file's start."""

    header: bytes
    ranges: dict[str, tuple[int, int]]

    @property
    def size(self) -> int:
        """Size of the whole file in bytes."""
        return max([len(self.header), *(end for _, end in self.ranges.values())])


def build_header(specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> Layout:
    """The first bytes of a file, and each tensor's [begin, end) counted from the file's start.

    The order is the official library's (dtype by its table downwards, then name) and so
    is the padding to 8 bytes, so the bytes equal ``safetensors.torch.save_file``'s.
    """
    ordered = sorted(specs, key=lambda spec: (-_DTYPE_ORDER[spec.dtype], spec.name))
    table: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    ranges: dict[str, tuple[int, int]] = {}
    for spec in ordered:
        if spec.name in ranges or spec.name == "__metadata__":
            raise CheckpointError(
                "the name is taken; each output tensor needs its own.", tensor=shown(spec.name)
            )
        end = position + spec.nbytes
        ranges[spec.name] = (position, end)
        table[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [position, end],
        }
        position = end
    body = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    body += b" " * (-len(body) % 8)
    start = 8 + len(body)
    moved = {name: (begin + start, end + start) for name, (begin, end) in ranges.items()}
    return Layout(len(body).to_bytes(8, "little") + body, moved)


def relabel(header: Header, names: Mapping[str, str]) -> Layout:
    """The header of the same data under other names: order, dtypes and shapes stay.

    A header that is no longer than the old one is filled up with spaces to its length, so that
    no byte of the data moves; a longer one is padded to 8 bytes.
    """
    table: dict[str, object] = {}
    if header.metadata:
        table["__metadata__"] = dict(header.metadata)
    for entry in header.entries:
        name = names[entry.name]
        if name in table:
            raise CheckpointError("two tensors would get this name.", tensor=shown(name))
        table[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    body = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    old = header.data_offset - 8
    body += b" " * (old - len(body) if len(body) <= old else -len(body) % 8)
    start = 8 + len(body)
    ranges = {names[e.name]: (e.begin + start, e.end + start) for e in header.entries}
    return Layout(len(body).to_bytes(8, "little") + body, ranges)


_NOT_WHOLE = "The file is truncated or still being written: fetch it again."
_DAMAGED = "The header is damaged or was written wrongly: fetch or write the file again."

_SPACE = re.compile(rb"[ \t\n\r]*+")
# Possessive, so that a long string costs no backtracking memory.
_STRING = re.compile(rb'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"')
_INTEGER = re.compile(rb"0|[1-9][0-9]{0,18}")
# The spelling every writer uses; anything else legal takes the slower path below.
_N = rb"(?:0|[1-9][0-9]{0,17})"
_USUAL_ENTRY = re.compile(
    rb'\{"dtype":"([A-Z0-9_]{1,16})","shape":\[((?:%b(?:,%b){0,63})?)\],'
    rb'"data_offsets":\[(%b),(%b)\]\}' % (_N, _N, _N, _N)
)
# A whole entry that another one follows, in the same spelling.
_USUAL_ITEM = re.compile(
    rb'"([^"\\\x00-\x1f]++)":\{"dtype":"([A-Z0-9_]{1,16})","shape":\[((?:%b(?:,%b){0,63})?)\],'
    rb'"data_offsets":\[(%b),(%b)\]\}(?=,")' % (_N, _N, _N, _N)
)


class _Scanner:
    """Recursive descent over the bytes of one header; depth is fixed by the grammar."""

    def __init__(self, raw: bytes, file: str) -> None:
        self.raw = raw
        self.file = file
        self.at = 0
        self.name: str | None = None

    def header(self) -> tuple[list[Entry], dict[str, str]]:
        entries: list[Entry] = []
        metadata: dict[str, str] | None = None
        seen: set[str] = set()
        self.expect(b"{")
        if not self.accept(b"}"):
            while True:
                self.usual_entries(entries, seen)
                self.name = None
                name = self.string("a tensor name")
                self.name = name
                if name in seen:
                    self.refuse("the name appears twice")
                seen.add(name)
                self.expect(b":")
                if name == "__metadata__":
                    metadata = self.metadata()
                else:
                    entries.append(self.entry(name))
                if not self.more():
                    break
        self.name = None
        self.space()
        if self.at != len(self.raw):
            self.refuse("bytes after the closing brace")
        return entries, metadata or {}

    def usual_entries(self, entries: list[Entry], seen: set[str]) -> None:
        """Entries in the spelling of every writer, up to one that is not, or the last."""
        while usual := _USUAL_ITEM.match(self.raw, self.at):
            literal, dtype, dims, begin, end = usual.groups()
            try:
                name = literal.decode()
            except UnicodeDecodeError:
                return
            if name in seen or name == "__metadata__":
                return
            seen.add(name)
            self.name = name
            self.at = usual.end()
            shape = tuple(map(int, dims.split(b","))) if dims else ()
            offsets = int(begin), int(end)
            entries.append(self.checked(name, dtype.decode("ascii"), shape, offsets))
            self.at += 1

    def entry(self, name: str) -> Entry:
        self.space()
        usual = _USUAL_ENTRY.match(self.raw, self.at)
        if usual:
            self.at = usual.end()
            dtype, dims, begin, end = usual.groups()
            shape = tuple(map(int, dims.split(b","))) if dims else ()
            return self.checked(name, dtype.decode("ascii"), shape, (int(begin), int(end)))
        texts: dict[str, str] = {}
        lists: dict[str, tuple[int, ...]] = {}
        self.expect(b"{")
        while True:
            field = self.string("dtype, shape or data_offsets")
            if field in texts or field in lists:
                self.refuse(f"the field {field} appears twice")
            self.expect(b":")
            if field == "dtype":
                texts[field] = self.string("a dtype name")
            elif field in ("shape", "data_offsets"):
                lists[field] = self.integers(field)
            else:
                self.refuse(f"unknown field {shown(field)}; expected dtype, shape and data_offsets")
            if not self.more():
                break
        missing = {"dtype", "shape", "data_offsets"} - texts.keys() - lists.keys()
        if missing:
            self.refuse(f"the entry has no {' and no '.join(sorted(missing))}")
        return self.checked(name, texts["dtype"], lists["shape"], lists["data_offsets"])

    def checked(
        self, name: str, dtype: str, shape: tuple[int, ...], offsets: tuple[int, ...]
    ) -> Entry:
        bits = DTYPE_BITS.get(dtype)
        if bits is None:
            self.refuse(f"dtype {shown(dtype)}; known are {', '.join(DTYPE_BITS)}")
        if len(shape) > MAX_RANK:
            self.refuse(f"{len(shape)} dimensions; at most {MAX_RANK} are legal")
        if len(offsets) != 2 or offsets[0] > offsets[1]:
            self.refuse(f"data_offsets {list(offsets)}; expected [begin, end] with begin <= end")
        count = bound = 1
        for dim in shape:
            count *= dim
            bound *= dim or 1
            if bound > _MAX_INT:
                self.refuse(f"shape {list(shape)} has more elements than 2^63 - 1")
        if count * bits % 8:
            self.refuse(f"shape {list(shape)} of {bits}-bit elements does not fill whole bytes")
        begin, end = offsets
        if end - begin != count * bits // 8:
            self.refuse(
                f"data_offsets [{begin}, {end}] hold {end - begin} bytes; dtype {dtype} and shape "
                f"{list(shape)} need {count * bits // 8}"
            )
        return Entry(name, dtype, shape, begin, end)

    def metadata(self) -> dict[str, str]:
        found: dict[str, str] = {}
        self.expect(b"{")
        if self.accept(b"}"):
            return found
        while True:
            key = self.string("a metadata key")
            if key in found:
                self.refuse(f"the metadata key {shown(key)} appears twice")
            if len(found) >= MAX_METADATA_ENTRIES:
                self.refuse(f"more than {MAX_METADATA_ENTRIES} metadata entries")
            self.expect(b":")
            found[key] = self.string("a metadata value, which must be a string")
            if not self.more():
                return found

    def string(self, what: str) -> str:
        self.space()
        match = _STRING.match(self.raw, self.at)
        if match is None:
            self.refuse(f"expected {what} in double quotes")
        self.at = match.end()
        literal = match[0]
        try:
            # strict decoding first: json.loads would let a lone surrogate through
            text = str(json.loads(literal)) if b"\\" in literal else literal[1:-1].decode()
            text.encode()
        except UnicodeError:
            self.refuse(f"{what} is not valid UTF-8")
        return text

    def integers(self, field: str) -> tuple[int, ...]:
        self.expect(b"[")
        end = self.raw.find(b"]", self.at, self.at + 4096)
        if end < 0:
            self.refuse(f"{field} is not a short list of integers")
        body = self.raw[self.at : end]
        self.at = end + 1
        return self.numbers(body)

    def numbers(self, body: bytes) -> tuple[int, ...]:
        if not body.strip(b" \t\n\r"):
            return ()
        return tuple([self.number(part.strip(b" \t\n\r")) for part in body.split(b",")])

    def number(self, part: bytes) -> int:
        value = int(part) if _INTEGER.fullmatch(part) else None
        if value is None or value > _MAX_INT:
            self.refuse(
                f"{shown(part[:40].decode('ascii', 'replace'))!r} where an integer from 0 to "
                "2^63 - 1 is expected"
            )
        return value

    def space(self) -> None:
        match = _SPACE.match(self.raw, self.at)
        self.at = match.end() if match else self.at

    def accept(self, char: bytes) -> bool:
        self.space()
        if self.raw[self.at : self.at + 1] == char:
            self.at += 1
            return True
        return False

    def expect(self, char: bytes) -> None:
        if not self.accept(char):
            self.refuse(f"expected {char.decode()}")

    def more(self) -> bool:
        """True after a comma, False after the closing brace."""
        if self.accept(b","):
            return True
        self.expect(b"}")
        return False

    def refuse(self, problem: str) -> NoReturn:
        found = self.raw[self.at : self.at + 16].decode("ascii", "replace")
        raise CheckpointError(
            f"{problem} (header byte {self.at}, next is {shown(found)!r}). {_DAMAGED}",
            file=self.file,
            tensor=None if self.name is None else shown(self.name),
        )
