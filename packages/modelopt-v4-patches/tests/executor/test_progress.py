"""Log lines where nobody looks at a bar: at most one each ten seconds, with honest rates."""

from __future__ import annotations

import logging

import pytest

from modelopt_v4_patches.progress import LogLines, progress


def test_rate_and_time_left(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    lines = LogLines("export", 881_000_000_000, clock=lambda: now[0])
    with caplog.at_level(logging.INFO):
        now[0] = 0.5
        lines.advance(400_000_000_000)  # what an earlier run has written
        for _ in range(20):
            now[0] += 1.0
            lines.advance(1_000_000_000)
    assert [record.getMessage() for record in caplog.records] == [
        "export: 410.00 of 881.00 GB, 1.000 GB/s, 7 min 51 s left",
        "export: 420.00 of 881.00 GB, 1.000 GB/s, 7 min 41 s left",
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        for _ in range(400):
            now[0] += 1.0
            lines.advance(10_000_000)
    assert caplog.records[-1].getMessage() == (
        "export: 424.00 of 881.00 GB, 0.010 GB/s, 12 h 41 min left"
    )


def test_without_a_terminal_there_is_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("export", 10) as advance:
        advance(10)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_a_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress("export", 10) as advance:
        advance(10)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "export" in captured.err
