"""Texts to calibrate on, and what is said of a dataset that is not one."""

import hashlib
import logging
from pathlib import Path

import pytest

from modelopt_v4_patches.calibration.samples import read_texts
from modelopt_v4_patches.errors import CalibrationError

LINES = (
    '{"text": "one"}\n'
    "\n"
    '{"text": " "}\n'
    '{"messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "2"}]}\n'
    '{"text": "three\\u2028", "id": 3}\r\n'
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.jsonl"


def test_reads_texts_and_messages(path: Path) -> None:
    path.write_bytes(LINES.encode())
    texts, name = read_texts(path, 3)
    assert texts == ["one", "two\n2", "three\u2028"]
    assert name == f"some.jsonl, sha256 {hashlib.sha256(LINES.encode()).hexdigest()}"


def test_takes_the_first_and_reads_no_further(path: Path) -> None:
    path.write_text(LINES + "broken")
    assert read_texts(path, 2)[0] == ["one", "two\n2"]
    assert read_texts(["a", "", "b", "c"], 2)[0] == ["a", "b"]


def test_too_few_are_one_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_text(LINES)
    with caplog.at_level(logging.WARNING, "modelopt_v4_patches"):
        assert len(read_texts(path, 128)[0]) == 3
    assert [r.getMessage().endswith("has 3 samples, not 128") for r in caplog.records] == [True]


@pytest.mark.parametrize(
    "line",
    ["broken", "[1]", '"text"', "{}", '{"text": 3}', '{"messages": []}', '{"messages": ["a"]}',
     '{"messages": [{"content": "a"}, {"content": null}]}', "\udcff"],
)  # fmt: skip
def test_other_lines_are_refused_by_number(line: str, path: Path) -> None:
    path.write_bytes(b'{"text": "one"}\n' + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(CalibrationError, match=r'dataset some.jsonl, line 2: expected \{"text"'):
        read_texts(path, 128)


def test_no_text_at_all_is_refused(path: Path) -> None:
    path.write_text("\n")
    with pytest.raises(CalibrationError, match="some.jsonl, sha256 .*: no text in it"):
        read_texts(path, 128)
    with pytest.raises(CalibrationError, match="No such file or directory"):
        read_texts(path.with_name("absent.jsonl"), 128)
