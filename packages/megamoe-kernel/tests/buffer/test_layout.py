"""One table, two readers: the compiled header and the header's text give the same layout."""

from __future__ import annotations

import logging
import shutil
import subprocess
from dataclasses import astuple, fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamoe_kernel import LayoutError, native
from megamoe_kernel import buffer_layout as module
from megamoe_kernel.buffer_layout import (
    HEADER,
    INCLUDE,
    TYPE_BYTES,
    BufferSizes,
    buffer_layout,
    layout_of_header,
    names_of_header,
)
from megamoe_kernel.buffer_sizes import layer_layout
from megamoe_kernel.models import MODELS

SIZES = BufferSizes(8, 48, 8192, 6, 3584, 448, 1536, 192, 1, 7168, 32768, 4096)
NUMBER = st.integers(min_value=0, max_value=10_000)


def _needs_extension() -> None:
    if native.import_error is not None:
        pytest.skip(f"needs the compiled extension: {native.import_error}")


def test_sizes_are_those_of_the_header() -> None:
    assert names_of_header() == tuple(field.name for field in fields(BufferSizes))


@given(st.tuples(*[NUMBER] * len(fields(BufferSizes))))
def test_the_extension_and_the_header_agree(numbers: tuple[int, ...]) -> None:
    _needs_extension()
    sizes = BufferSizes(*numbers)
    assert buffer_layout(sizes) == layout_of_header(sizes)


def test_an_extension_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _needs_extension()
    changed = layout_of_header(replace(SIZES, num_topk=7))
    monkeypatch.setattr(module, "layout_of_header", lambda sizes: changed)
    with pytest.raises(LayoutError, match="buffer.hpp.*Reinstall megamoe-kernel"):
        buffer_layout(SIZES)


def test_fields_follow_each_other() -> None:
    layout = layout_of_header(SIZES)
    rows = list(layout.fields.values())
    assert rows[0].offset == 0
    for row, after in pairwise(rows):
        assert after.offset % 128 == 0
        assert 0 <= after.offset - (row.offset + row.nbytes) < 128
    assert 0 <= layout.nbytes - (rows[-1].offset + rows[-1].nbytes) < 128
    assert set(TYPE_BYTES) >= {row.type for row in rows}


def test_what_others_touch_comes_first() -> None:
    layout = layout_of_header(SIZES)
    for row in layout.fields.values():
        assert row.access in ("Peers", "Host", "Kernel")
        assert (row.offset < layout.shared_bytes) == (row.access != "Kernel")


def test_the_documented_fields() -> None:
    """Pro at EP 8 with 8192 tokens a rank, counted by hand."""
    found = {
        name: (row.type, row.rows, row.columns)
        for name, row in layer_layout(MODELS["deepseek-v4-pro"], "nvfp4", 8, 8192).fields.items()
    }
    assert found["x"] == ("U8", 8192, 3584)
    assert found["x_sf"] == ("E4M3", 8192, 448)
    assert found["x_scale"] == ("F32", 8192, 1)
    assert found["topk_idx"] == ("I64", 8192, 6)
    assert found["topk_weights"] == ("F32", 8192, 6)
    assert found["slots"] == ("BF16", 49152, 7168)
    bf16 = layer_layout(MODELS["deepseek-v4-pro"], "bf16", 8, 8192).fields
    assert (bf16["x"].columns, bf16["x_sf"].columns, bf16["x_scale"].nbytes) == (14336, 0, 0)


def test_kernels_compute_the_same_offsets_at_compile_time(tmp_path: Path) -> None:
    """The header alone, by a C++20 compiler: offsets as constants, a wrong name refused."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler on PATH")
    layout = layout_of_header(SIZES)
    numbers = ", ".join(map(str, astuple(SIZES)))
    checks = "\n".join(
        f'static_assert(kLayout.offset[field("{row.name}")] == {row.offset});'
        for row in layout.fields.values()
    )
    source = f"""#include "megamoe/layout/buffer.hpp"
using namespace megamoe;
constexpr BufferLayout kLayout = buffer_layout({{{numbers}}});
{checks}
static_assert(kLayout.bytes == {layout.nbytes} && kNumFields == {len(layout.fields)});
"""

    def compiles(text: str) -> bool:
        path = tmp_path / "layout.cpp"
        path.write_text(text)
        command = [compiler, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
        result = subprocess.run([*command, f"-I{INCLUDE}", str(path)], capture_output=True)
        return result.returncode == 0

    assert compiles(source)
    assert not compiles(source + 'constexpr int kWrong = field("x_scales");\n')


def test_without_the_extension_there_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "import_error", "No module named '_native'")
    module._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        first, second = buffer_layout(SIZES), buffer_layout(SIZES)
    assert first == second == layout_of_header(SIZES)
    assert len(caplog.records) == 1
    assert "without its compiled extension" in caplog.text
    module._warn_once.cache_clear()


@pytest.mark.parametrize("row", ["s.hidden - 1", "s.hidden / 2", "hidden", "f(s.hidden)", "1.5"])
def test_rows_that_python_cannot_read_are_refused(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = HEADER.read_text().replace("Access::kHost, s.max_tokens,", f"Access::kHost, {row},")
    assert text != HEADER.read_text()
    changed = tmp_path / "buffer.hpp"
    changed.write_text(text)
    monkeypatch.setattr(module, "HEADER", changed)
    module._parse_header.cache_clear()
    try:
        with pytest.raises(ValueError, match="expected members of s"):
            layout_of_header(SIZES)
    finally:
        module._parse_header.cache_clear()
