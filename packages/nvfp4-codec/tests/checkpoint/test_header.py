"""Headers: hostile ones by table, then by fuzzing against the official library."""

from __future__ import annotations

import json
import random
import re
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import pytest
import safetensors
import torch
from safetensors.torch import save

from nvfp4_codec.checkpoint.header import (
    DTYPE_BITS,
    TensorSpec,
    build_header,
    parse_header,
    shown,
)
from nvfp4_codec.errors import CheckpointError

T = TypeVar("T")

GOOD = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'


def allocating_less(most_bytes: int, call: Callable[[], T]) -> T:
    """The call's result; an error if it never allocates less at its peak.

    The tracer counts every thread, and a test runner has its own: so up to three calls.
    """
    peaks = []
    for _ in range(3):
        tracemalloc.start()
        try:
            result = call()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        if peaks[-1] < most_bytes:
            return result
    raise AssertionError(f"allocated {peaks} bytes, expected fewer than {most_bytes}")


def entry(**changes: object) -> bytes:
    fields: dict[str, object] = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
    fields.update(changes)
    return json.dumps({"a": {k: v for k, v in fields.items() if v is not None}}).encode()


HOSTILE = {
    "empty": (b"", "expected {"),
    "not an object": (b"[]", "expected {"),
    "no closing brace": (GOOD[:-1], "expected }"),
    "bytes after the brace": (GOOD + b"x", "bytes after"),
    "not UTF-8": (GOOD.replace(b'"a"', b'"\xff"'), "not valid UTF-8"),
    "lone surrogate": (GOOD.replace(b'"a"', b'"\\ud800"'), "not valid UTF-8"),
    "control character": (GOOD.replace(b'"a"', b'"\x01"'), "double quotes"),
    "duplicate tensor": (GOOD[:-1] + b"," + GOOD[1:], "appears twice"),
    "duplicate field": (GOOD.replace(b'"shape":[2]', b'"shape":[2],"shape":[2]'), "appears twice"),
    "unknown field": (entry(stride=[1]), "unknown field stride"),
    "no dtype": (entry(dtype=None), "no dtype"),
    "no shape": (entry(shape=None), "no shape"),
    "no offsets": (entry(data_offsets=None), "no data_offsets"),
    "dtype unknown": (entry(dtype="F12"), "F12"),
    "dtype a number": (entry(dtype=8), "expected a dtype name"),
    "dim negative": (entry(shape=[-2]), "'-2'"),
    "dim a float": (entry(shape=[2.0]), "'2.0'"),
    "dim a bool": (entry(shape=[True]), "'true'"),
    "dim a string": (entry(shape=["2"]), "integer"),
    "dim null": (entry(shape=[None]), "'null'"),
    "dim huge": (entry(shape=[2**63]), "integer from 0"),
    "dim 5000 digits": (entry(shape=[0]).replace(b"[0]", b"[" + b"9" * 5000 + b"]"), "short list"),
    "dim leading zero": (GOOD.replace(b"[2]", b"[02]"), "'02'"),
    "dim exponent": (GOOD.replace(b"[2]", b"[2e0]"), "'2e0'"),
    "product overflows": (entry(shape=[2**32, 2**32]), "more elements"),
    "product overflows beside 0": (entry(shape=[2**32, 0, 2**32]), "more elements"),
    "65 dims": (entry(shape=[1] * 65), "65 dimensions"),
    "a million dims": (entry(shape=[1] * 1_000_000), "short list"),
    "shape a number": (entry(shape=2), "expected ["),
    "shape nested": (entry(shape=[[2]]), "integer"),
    "size too small": (entry(shape=[3]), "need 3"),
    "size too large": (entry(shape=[1]), "need 1"),
    "size of dtype": (entry(dtype="F32"), "need 8"),
    "half a byte": (entry(dtype="F4", shape=[3]), "whole bytes"),
    "offsets reversed": (entry(data_offsets=[2, 0]), "begin <= end"),
    "offsets three": (entry(data_offsets=[0, 1, 2]), "begin, end"),
    "offsets huge": (entry(shape=[2**62], data_offsets=[0, 2**62]), "truncated"),
    "offsets a string": (entry(data_offsets="02"), "expected ["),
    "hole first": (entry(data_offsets=[1, 3]), "hole"),
    "bytes left": (entry(shape=[1], data_offsets=[0, 1]), "file holds 2"),
    "overlap": (
        b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
        b'"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        "overlap",
    ),
    "metadata a list": (b'{"__metadata__":[]}', "expected {"),
    "metadata a number": (b'{"__metadata__":{"a":1}}', "must be a string"),
    "metadata twice": (b'{"__metadata__":{},"__metadata__":{}}', "twice"),
    "metadata key twice": (b'{"__metadata__":{"a":"","a":""}}', "twice"),
    "depth bomb": (b'{"a":' * 100_000, "expected"),
    "list bomb": (b"[" * 100_000, "expected {"),
    "depth bomb in shape": (b'{"a":{"dtype":"U8","shape":' + b"[" * 100_000, "short list"),
    "NaN": (GOOD.replace(b"[2]", b"[NaN]"), "'NaN'"),
    "comma at the end": (GOOD[:-1] + b",}", "double quotes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_with_its_reason(name: str) -> None:
    raw, message = HOSTILE[name]

    def refused() -> None:
        with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
            parse_header(raw, 2, "x.safetensors")
        assert "x.safetensors" in str(caught.value)

    allocating_less(2 * len(raw) + 200_000, refused)


def test_the_error_names_the_tensor() -> None:
    with pytest.raises(CheckpointError, match="tensor layers.3.w1") as caught:
        parse_header(entry(dtype="F32").replace(b'"a"', b'"layers.3.w1"'), 2, "f")
    assert caught.value.tensor == "layers.3.w1"


GOOD_SPELLINGS = {
    "plain": GOOD,
    "spaces": b' { "a" : { "dtype" : "U8" , "shape" : [ 2 ] , "data_offsets" : [ 0 , 2 ] } } \n',
    "other order": b'{"a":{"data_offsets":[0,2],"shape":[1,2],"dtype":"I8"}}',
    "escapes": b'{"\\u00e9\\n":{"dtype":"\\u0055\\u0038","shape":[2],"data_offsets":[0,2]}}',
    "surrogate pair": b'{"\\ud83d\\ude00":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
    "no tensors but empty": b'{"a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}}',
    "zero size": GOOD[:-1] + b',"b":{"dtype":"F32","shape":[0,7],"data_offsets":[2,2]}}',
    "metadata": GOOD[:-1] + b',"__metadata__":{"a":"b","c":"{[,"}}',
    "F4": b'{"a":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}',
}


@pytest.mark.parametrize("name", GOOD_SPELLINGS)
def test_a_legal_header_is_read_as_the_official_library_reads_it(name: str) -> None:
    raw = GOOD_SPELLINGS[name]
    header = parse_header(raw, 2, "f")
    assert ours(raw, 2) == official(raw, 2)
    assert header.data_offset == 8 + len(raw)


def test_the_dtype_table_is_the_official_one() -> None:
    with pytest.raises(safetensors.SafetensorError) as caught:
        official(entry(dtype="?"), 2)
    assert re.findall(r"`([A-Z0-9_]+)`", str(caught.value)) == list(DTYPE_BITS)


def test_written_headers_equal_the_official_library_byte_for_byte() -> None:
    dtypes = [
        torch.bool, torch.uint8, torch.int8, torch.float8_e5m2, torch.float8_e4m3fn,
        torch.float8_e8m0fnu, torch.int16, torch.uint16, torch.float16, torch.bfloat16,
        torch.int32, torch.uint32, torch.float32, torch.complex64, torch.float64, torch.int64,
        torch.uint64,
    ]  # fmt: skip
    tensors = {
        f"{name}{i}": torch.zeros(i, 2, dtype=torch.uint8).to(dtype)
        for i, dtype in enumerate(dtypes)
        for name in ("b", "é", "a", '"\n')
    }
    for metadata in (None, {"format": "pt"}):
        raw = save(tensors, metadata=metadata)
        length = int.from_bytes(raw[:8], "little")
        header = parse_header(raw[8 : 8 + length], len(raw) - 8 - length, "f")
        specs = [TensorSpec(e.name, e.dtype, e.shape) for e in header.entries]
        random.Random(0).shuffle(specs)
        built, ranges = build_header(specs, metadata)
        assert built == raw[: 8 + length]
        assert max(end for _, end in ranges.values()) == len(raw)


def test_two_outputs_of_one_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match="taken"):
        build_header([TensorSpec("a", "U8", (1,)), TensorSpec("a", "U8", (2,))])


def test_names_are_safe_to_print() -> None:
    assert shown("a\x1b[31m\n") == "a\\x1b[31m\\n"
    assert len(shown("x" * 10_000)) < 250


Table = dict[str, tuple[str, tuple[int, ...]]]


def ours(raw: bytes, data_bytes: int) -> Table:
    entries = parse_header(raw, data_bytes, "f").entries
    return {e.name: (e.dtype, e.shape) for e in entries}


def official(raw: bytes, data_bytes: int) -> Table:
    whole = len(raw).to_bytes(8, "little") + raw + bytes(data_bytes)
    return {
        name: (info["dtype"], tuple(info["shape"])) for name, info in safetensors.deserialize(whole)
    }


# Why ours may refuse what the official library takes; each is in the module's docstring.
STRICTER = re.compile(
    "appears twice|unknown field|dimensions; at most|more elements|expected {|short list|"
    "integer from 0|must be a string|double quotes"
)


def inputs(count: int, seed: int) -> Iterator[tuple[bytes, int]]:
    """Headers near the legal ones: changed bytes, changed values, changed structure."""
    rng = random.Random(seed)
    atoms: list[object] = [
        0, 1, 2, 3, -1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**40, 1.5, True, None, "",
        "U8", "F4", "BF16", "F64", [], [0], [1, 1], [2], [0, 2], [2, 2], [0, 4], {},
        {"a": 1}, "\ud7ff",
    ]  # fmt: skip
    snippets = [
        b"[", b"]", b"{", b"}", b",", b":", b'"', b"\\", b"0", b"9" * 30, b"\x00", b"\xff", b"null",
        b"-", b"e1", b"\\u0000", b'"a"', b"[" * 50, b" ", b"__metadata__",
    ]  # fmt: skip
    for _ in range(count):
        names = rng.sample(["a", "b", "c.weight", "__metadata__", "é", "x" * 40], rng.randint(1, 4))
        position, document = 0, {}
        for name in names:
            if name == "__metadata__":
                document[name] = {"format": "pt"}
                continue
            dtype = rng.choice(list(DTYPE_BITS))
            shape = [rng.randint(0, 3) for _ in range(rng.randint(0, 3))]
            size = DTYPE_BITS[dtype]
            for dim in shape:
                size *= dim
            document[name] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [position, position + size // 8],
            }
            position += size // 8
        kind = rng.randrange(4)
        if kind == 1:  # a value of another kind or size
            target = document[rng.choice(names)]
            key = rng.choice([*target, "extra"])
            value = rng.choice(atoms)
            if isinstance(target.get(key), list) and target[key] and rng.random() < 0.5:
                target[key][rng.randrange(len(target[key]))] = value
            else:
                target[key] = value
        raw = json.dumps(document, ensure_ascii=rng.random() < 0.5).encode()
        if kind >= 2:  # damaged bytes
            data = bytearray(raw)
            for _ in range(rng.choice([1, 1, 1, 2, 5])):
                at = rng.randrange(len(data) + 1)
                action = rng.randrange(4)
                if action == 0 and at < len(data):
                    data[at] = rng.randrange(256)
                elif action == 1:
                    data[at:at] = rng.choice(snippets)
                elif action == 2:
                    del data[at : at + rng.randint(1, 8)]
                else:
                    other = rng.randrange(len(data) + 1)
                    data[at:at] = data[other : other + rng.randint(1, 20)]
            raw = bytes(data)
        yield raw, position if rng.random() < 0.9 else rng.randrange(100)


def fuzz_header(count: int, seed: int) -> int:
    """Feeds ``count`` headers to both readers; returns how many ours took.

    Ours must take only what the official library takes, read it the same, refuse the rest
    with CheckpointError and nothing else, and never allocate more than a few times the input.
    """
    accepted = 0
    for raw, data_bytes in inputs(count, seed):
        result, refusal = allocating_less(40 * len(raw) + 20_000, partial(read, raw, data_bytes))
        try:
            expected = official(raw, data_bytes)
        except safetensors.SafetensorError:
            assert result is None, (raw, data_bytes)
            continue
        if result is None:
            assert STRICTER.search(refusal), (raw, data_bytes, refusal)
        else:
            assert result == expected, raw
            accepted += 1
    return accepted


def read(raw: bytes, data_bytes: int) -> tuple[Table | None, str]:
    """What ours makes of it, or why not."""
    try:
        return ours(raw, data_bytes), ""
    except CheckpointError as error:
        return None, str(error)


def test_fuzzed_headers_agree_with_the_official_library() -> None:
    assert fuzz_header(2_000, seed=1) > 200


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
def test_fuzzed_headers_at_length(seed: int) -> None:
    assert fuzz_header(15_000, seed=100 + seed) > 1_500
